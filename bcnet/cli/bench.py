"""``bcnet bench``: the Channel-Bench-Macro tables."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from bcnet.cli.console import JSON_OPTION, print_json, table

bench_app = typer.Typer()

SPACE_ARGUMENT = typer.Argument(metavar="SPACE", help="mobilenet, resnet, or the .json file of a space.")
TABLE_OPTION = typer.Option(
    "--table", help="The table's file, or the folder of released tables; else $CHANNEL_BENCH_DIR, then the cache."
)
VERIFY_OPTION = typer.Option(help="Whether the table of a released space must be the released one.")


@bench_app.callback(invoke_without_command=True)
def _bench(context: typer.Context) -> None:
    """Channel-Bench-Macro: tables of networks trained at every widths of a small space."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


@bench_app.command("stats")
def show_stats(
    space: Annotated[str, SPACE_ARGUMENT],
    path: Annotated[Path | None, TABLE_OPTION] = None,
    verify: Annotated[bool, VERIFY_OPTION] = True,
    out: Annotated[Path | None, typer.Option(help="Folder for stats.json, stats.html and histograms.svg.")] = None,
    as_json: Annotated[bool, JSON_OPTION] = False,
) -> None:
    """Show how FLOPs and parameters rank the networks of a table, and how well any score could."""
    from bcnet.bench.stats import statistics, write_report
    from bcnet.bench.table import ChannelBench

    loaded = ChannelBench.load(space, path, verify)
    figures = statistics(loaded)
    files = write_report(loaded, out) if out else []
    if as_json:
        print_json(figures)
        return
    ceilings = figures["ceilings"] or dict.fromkeys(figures["flops"], "-")
    rows = [("FLOPs", figures["flops"]), ("parameters", figures["params"]), ("perfect predictor", ceilings)]
    table(
        f"Space {figures['space']}: {figures['networks']:,} networks, correlation with mean accuracy",
        ["score", "Pearson", "Spearman", "Kendall"],
        [(name, *(v if v == "-" else f"{v:.3f}" for v in row.values())) for name, row in rows],
    )
    for file in files:
        typer.echo(f"wrote {file}")


@bench_app.command("fetch")
def fetch_tables(
    space: Annotated[str | None, typer.Argument(metavar="SPACE", help="mobilenet or resnet; else both.")] = None,
    to: Annotated[Path | None, typer.Option(help="Folder to download into; else the user cache.")] = None,
) -> None:
    """Download the released tables and verify their checksums."""
    from bcnet.bench.files import fetch
    from bcnet.bench.spaces import SPACES

    for name in [space] if space else SPACES:
        typer.echo(f"{name}: {fetch(name, to)}")
