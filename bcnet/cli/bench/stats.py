"""``bcnet bench stats``: how simple predictors rank the networks of a table."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from bcnet.cli import options
from bcnet.cli.console import print_json, table


def stats(
    space: Annotated[str, typer.Argument(metavar="SPACE", help="mobilenet, resnet, or the .json file of a space.")],
    path: Annotated[Path | None, options.TABLE] = None,
    verify: Annotated[
        bool, typer.Option(help="Whether the table of a released space must be the released one.")
    ] = True,
    out: Annotated[Path | None, typer.Option(help="Folder for stats.json, stats.html and histograms.svg.")] = None,
    as_json: Annotated[bool, options.JSON] = False,
) -> None:
    """Show how FLOPs, parameters and widths rank the networks of a table, and how well any score could."""
    from bcnet.bench.predictors import PREDICTORS
    from bcnet.bench.stats import statistics, write_statistics
    from bcnet.bench.table import ChannelBench

    loaded = ChannelBench.load(space, path, verify)
    figures = statistics(loaded)
    files = write_statistics(loaded, out) if out else []
    if as_json:
        print_json(figures)
        return
    ceilings = figures["ceilings"] or dict.fromkeys(figures["flops"], "-")
    rows = [*((label, figures[name]) for name, label in PREDICTORS.items()), ("perfect predictor", ceilings)]
    table(
        f"Space {figures['space']}: {figures['networks']:,} networks, correlation with mean accuracy",
        ["score", "Pearson", "Spearman", "Kendall"],
        [(name, *(v if v == "-" else f"{v:.3f}" for v in row.values())) for name, row in rows],
    )
    for file in files:
        typer.echo(f"wrote {file}")
