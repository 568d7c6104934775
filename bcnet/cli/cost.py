"""``bcnet cost``: what a network costs at given widths."""

from __future__ import annotations

from typing import Annotated

import typer

from bcnet.cli import options
from bcnet.cli.console import print_json, table
from bcnet.cli.network import TITLES, by, costs_of, load, one_line_warnings, ordered, read_widths


def cost(
    model: Annotated[str, options.MODEL],
    widths: Annotated[str, typer.Option(metavar="44,51,…", help="One width per variable, or @file.json.")],
    input_shape: Annotated[str | None, options.INPUT] = None,
    ignore: Annotated[list[str] | None, options.IGNORE] = None,
    squeeze: Annotated[bool, options.SQUEEZE] = False,
    as_json: Annotated[bool, options.JSON] = False,
) -> None:
    """Count the FLOPs, parameters and memory of a network at given widths."""
    given = read_widths(widths)
    loaded = load(model, input_shape)
    with one_line_warnings():
        space = loaded.space(ignore=ignore or (), squeeze=squeeze)
    chosen = space.check(ordered(given, space.names) if isinstance(given, dict) else given)
    full = costs_of(space, space.max)
    costs = costs_of(space, chosen)
    ratio = {name: costs[name] / full[name] for name in costs}
    if as_json:
        print_json({"model": loaded.spec, "widths": chosen, **costs, "full": full, "ratio": ratio})
        return
    table(
        f"{loaded.spec} at {len(chosen)} given widths, for one input of {by(loaded.input_shape)}",
        ["cost", "at these widths", "full network", "ratio"],
        [(TITLES[name], costs[name], full[name], f"{ratio[name]:.4f}") for name in costs],
    )
