"""``bcnet balance``: widths within a budget without any training."""

from __future__ import annotations

from typing import Annotated

from bcnet.cli import options
from bcnet.cli.console import print_json, table
from bcnet.cli.network import TITLES, by, costs_of, load, one_line_warnings

EXPERIMENTAL = "Balanced widths are experimental: they did not win a trial against uniform scaling."


def balance(
    model: Annotated[str, options.MODEL],
    budget: Annotated[list[str], options.BUDGET],
    groups: Annotated[int, options.GROUPS] = 20,
    base: Annotated[int, options.BASE] = 1,
    round_to: Annotated[int, options.ROUND_TO] = 1,
    input_shape: Annotated[str | None, options.INPUT] = None,
    ignore: Annotated[list[str] | None, options.IGNORE] = None,
    squeeze: Annotated[bool, options.SQUEEZE] = False,
    as_json: Annotated[bool, options.JSON] = False,
) -> None:
    """Find widths within a budget at once, without training: a width counts as much as it has layers (experimental)."""
    from bcnet.search import Constraints, LogWidthModel

    loaded = load(model, input_shape)
    with one_line_warnings():
        space = loaded.space(groups=groups, base=base, round_to=round_to, ignore=ignore or (), squeeze=squeeze)
    constraints = Constraints(space, space.costs, budget)
    constraints.check()
    uniform, balanced = constraints.uniform(), LogWidthModel.balanced(space).best(constraints)
    costs = {
        "full": costs_of(space, space.max),
        "uniform": costs_of(space, uniform),
        "balanced": costs_of(space, balanced),
    }
    if as_json:
        print_json({"model": loaded.spec, "widths": balanced, "uniform": uniform, "costs": costs})
        return
    budgets = ", ".join(b.text for b in constraints.budgets)
    table(
        f"{loaded.spec} within {budgets}, for one input of {by(loaded.input_shape)}",
        ["", "variable", "layers", *costs],
        [
            (i, v.name, len(v.layers), v.max, int(u), int(b))
            for i, (v, u, b) in enumerate(zip(space.variables, uniform, balanced, strict=True), 1)
        ],
    )
    table(
        "What they cost",
        ["cost", *costs],
        [(TITLES[name], *(costs[who][name] for who in costs)) for name in costs["full"]],
    )
    print(EXPERIMENTAL)
