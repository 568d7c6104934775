"""``bcnet show``: the width variables of a network."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

from bcnet.cli import options
from bcnet.cli.console import console, print_json, table
from bcnet.cli.network import TITLES, by, costs_of, load, one_line_warnings

if TYPE_CHECKING:
    from bcnet.models.load import LoadedModel
    from bcnet.space.network import NetworkSpace


def show(
    model: Annotated[str, options.MODEL],
    groups: Annotated[int, options.GROUPS] = 20,
    base: Annotated[int, options.BASE] = 1,
    round_to: Annotated[int, options.ROUND_TO] = 1,
    input_shape: Annotated[str | None, options.INPUT] = None,
    ignore: Annotated[list[str] | None, options.IGNORE] = None,
    squeeze: Annotated[bool, options.SQUEEZE] = False,
    as_json: Annotated[bool, options.JSON] = False,
) -> None:
    """Show which widths of a network can vary, the layers that share each, and the range of its costs."""
    loaded = load(model, input_shape)
    with one_line_warnings():
        space = loaded.space(groups=groups, base=base, round_to=round_to, ignore=ignore or (), squeeze=squeeze)
        own_class = space.own_class
    if as_json:
        print_json(_report(loaded, space) | {"own_class": own_class})
    else:
        _print_space(loaded, space, own_class)


def _report(loaded: LoadedModel, space: NetworkSpace) -> dict[str, Any]:
    low, high = costs_of(space, space.min), costs_of(space, space.max)
    return {
        "model": loaded.spec,
        "input": loaded.input_shape,
        "variables": [
            {"name": v.name, "candidates": v.candidates, "layers": v.layers, "unit": v.unit} for v in space.variables
        ],
        "size": space.size,
        **{name: {"min": low[name], "max": high[name]} for name in low},
        "full": high,
        "reducible_flops": space.reducible_flops,
        "fixed": [{"layer": layer, "reason": reason} for layer, reason in space.fixed],
    }


def _print_space(loaded: LoadedModel, space: NetworkSpace, own_class: bool) -> None:
    out = console()
    low, high = costs_of(space, space.min), costs_of(space, space.max)
    table(
        f"{loaded.spec}: {len(space)} width variables, for one input of {by(loaded.input_shape)}",
        ["", "variable", "candidates", "layers that share it"],
        [(i, v.name, _candidates(v.candidates), _layers(v.layers[1:])) for i, v in enumerate(space.variables, 1)],
    )
    table(
        f"The space has {_count(space.size)} networks",
        ["cost", "narrowest", "full network", "ratio"],
        [(TITLES[name], low[name], high[name], f"{low[name] / high[name]:.4f}") for name in low],
    )
    table("Layers that keep their width", ["layer", "because"], space.fixed)
    kind = type(loaded.model).__name__
    built = f"the class {kind} itself" if own_class else f"the exported graph of {kind}, without its Python code"
    out.print(f"Networks at other widths are built from {built}.", soft_wrap=True)
    out.print(f"{space.reducible_flops:.1%} of the FLOPs can be reduced.", soft_wrap=True)


def _count(number: int) -> str:
    return f"{number:,}" if number < 10**9 else f"about 10^{len(str(number)) - 1}"


def _candidates(widths: Sequence[int]) -> str:
    """The candidates as text: some of them where there are many, and how many there are."""
    texts = [f"{c}" for c in widths]
    shown = texts if len(texts) <= 6 else [*texts[:3], "...", *texts[-2:]]
    return f"{', '.join(shown)} ({len(texts)})"


def _layers(layers: Sequence[str]) -> str:
    if not layers:
        return "-"
    more = f" and {len(layers) - 3} more" if len(layers) > 3 else ""
    return ", ".join(layers[:3]) + more
