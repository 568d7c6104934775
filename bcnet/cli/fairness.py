"""``bcnet fairness``: how often each channel of a layer is used, under each principle."""

from __future__ import annotations

from itertools import pairwise
from typing import Annotated, Any

import numpy as np
import typer
from numpy.typing import NDArray

from bcnet.cli import options
from bcnet.cli.console import console, print_json, table
from bcnet.space.widths import WidthVariable, candidates
from bcnet.supernet.principle import PRINCIPLES, Principle, get_principle

PLOT_WIDTH = 72
MOST_ROWS = 400


def fairness(
    largest: Annotated[int, typer.Option("--max", help="Channels of the layer, l.")] = 64,
    groups: Annotated[int, options.GROUPS] = 20,
    base: Annotated[int, options.BASE] = 5,
    principle: Annotated[
        str,
        typer.Option(
            help="How a width takes its channels of the supernet: ua, bc, bcv2, bcv2-printed, or all to compare them."
        ),
    ] = "bcv2",
    as_json: Annotated[bool, options.JSON] = False,
) -> None:
    """Show how often each channel of one layer is used over all its candidate widths."""
    chosen = PRINCIPLES if principle == "all" else (get_principle(principle),)
    variable = WidthVariable("layer", candidates(largest, groups, base))
    if as_json:
        reports = [_report(p, variable) for p in chosen]
        print_json({"principles": reports} if principle == "all" else reports[0])
        return
    out = console()
    out.print(f"candidates ({len(variable.candidates)}): {_shortened(variable.candidates)}\n", soft_wrap=True)
    _print_table(chosen, variable)
    top = max(int(p.cardinality(variable).max()) for p in chosen)
    for p in chosen:
        cardinality = p.cardinality(variable)
        out.print(f"\n{_verdict(p, cardinality)}")
        for line in plot(cardinality, top, height=4 if len(chosen) > 1 else 8, ascii_only=out.options.ascii_only):
            out.print(line, soft_wrap=True)


def _shortened(widths: tuple[int, ...]) -> str:
    texts = [str(c) for c in widths]
    return ", ".join(texts if len(texts) <= 40 else [*texts[:20], "...", *texts[-5:]])


def _report(principle: Principle, variable: WidthVariable) -> dict[str, Any]:
    return {
        "principle": principle.name,
        "total": principle.total(variable),
        "cardinality": principle.cardinality(variable),
        "fair": principle.fair(variable),
    }


def _verdict(principle: Principle, cardinality: NDArray[np.int64]) -> str:
    low, high = int(cardinality.min()), int(cardinality.max())
    uses = f"each used {low}x: fair" if low == high else f"used {low}x to {high}x: not fair"
    return f"{principle.name}: {len(cardinality)} channels, {uses}"


def _print_table(chosen: tuple[Principle, ...], variable: WidthVariable) -> None:
    """One row per run of channels that all principles use alike; a dash where a principle has no such channel."""
    columns = [p.cardinality(variable) for p in chosen]
    count = max(len(column) for column in columns)
    padded = np.stack([np.pad(column, (0, count - len(column)), constant_values=-1) for column in columns])
    starts = [0, *(np.flatnonzero((padded[:, 1:] != padded[:, :-1]).any(axis=0)) + 1), count]
    if len(starts) > MOST_ROWS:
        console().print(f"The table has {len(starts) - 1} rows; --json prints the cardinality of every channel.")
        return
    rows: list[list[object]] = []
    for start, end in pairwise(starts):
        channels = f"{start + 1}" if end == start + 1 else f"{start + 1}-{end}"
        rows.append([channels, *("-" if uses < 0 else int(uses) for uses in padded[:, start])])
    table("Cardinality: how often a channel is used", ["channels", *(p.name for p in chosen)], rows)


def plot(values: NDArray[np.int64], top: int, height: int, ascii_only: bool = False) -> list[str]:
    """Bars of ``values`` (n,) from 0 to ``top``, as ``height`` lines of text and an axis.

    At most ``PLOT_WIDTH`` columns: of more values, evenly spaced ones are drawn.
    """
    shown = values[np.linspace(0, len(values) - 1, min(len(values), PLOT_WIDTH)).round().astype(int)]
    blocks = " #" if ascii_only else " ▁▂▃▄▅▆▇█"
    levels = len(blocks) - 1
    filled = np.ceil(shown * height * levels / top).astype(int)
    margin = len(str(top))
    bar, corner, rule = ("|", "+", "-") if ascii_only else ("│", "└", "─")
    lines = []
    for row in range(height - 1, -1, -1):
        label = str(top) if row == height - 1 else ""
        bars = "".join(blocks[k] for k in np.clip(filled - row * levels, 0, levels))
        lines.append(f"{label:>{margin}} {bar}{bars}".rstrip())
    lines.append(f"{'0':>{margin}} {corner}{rule * len(shown)}")
    last = str(len(values)) if len(shown) > 1 else ""
    lines.append(f"{'':>{margin}}  1{last:>{len(shown) - 1}}")
    return lines
