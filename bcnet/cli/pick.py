"""``bcnet pick``: one more slim network from the scores a run has already."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bcnet.cli import options
from bcnet.cli.console import interruptible
from bcnet.cli.network import ordered, read_widths
from bcnet.cli.stage import open_run, print_run
from bcnet.errors import BcnetError

if TYPE_CHECKING:
    from bcnet.run.session import Run


def pick(
    run: Annotated[Path, options.RUN],
    budget: Annotated[str, typer.Option(metavar="NAME=VALUE", help="What it may cost: flops=40%, params=3M, ...")],
    widths: Annotated[
        str | None,
        typer.Option(
            metavar="44,51,…", help="Take these widths, one per variable, or @file.json: a point of the front, say."
        ),
    ] = None,
    device: Annotated[str | None, options.DEVICE] = None,
    trust: Annotated[bool, options.TRUST] = False,
    as_json: Annotated[bool, options.JSON] = False,
) -> None:
    """Fine-tune one more network for another budget, chosen from the scores a run already has."""
    from bcnet.run import pipeline
    from bcnet.run.folder import RunFolder
    from bcnet.run.recipe import PYTHON
    from bcnet.utils.progress import terminal_listener

    if RunFolder.open(run).recipe.model == PYTHON:
        call = f"bcnet.slim(..., out={str(run)!r}).pick({budget!r:.40})"
        raise BcnetError(f"{run} was made from Python, and so is what is picked from it: {call}")
    parent = open_run(run, device, trust)
    with interruptible("go on with the same command"), terminal_listener() as screen, parent.lock():
        parent.listener = screen
        target = pipeline.pick(parent, budget, None if widths is None else _read(widths, parent))
    print_run(target, "report", as_json)


def _read(widths: str, run: Run) -> list[int]:
    given = read_widths(widths)
    return ordered(given, run.space.names) if isinstance(given, dict) else given
