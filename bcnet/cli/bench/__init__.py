"""``bcnet bench``: the Channel-Bench-Macro tables. One module per command."""

from __future__ import annotations

import typer

from bcnet.cli.bench.ablate import ablate
from bcnet.cli.bench.build import build
from bcnet.cli.bench.fetch import fetch
from bcnet.cli.bench.rank import rank
from bcnet.cli.bench.stats import stats
from bcnet.cli.console import Command, OneLineErrors

bench_app = typer.Typer(cls=OneLineErrors)
for _command in (stats, rank, ablate, build, fetch):
    bench_app.command(_command.__name__, cls=Command)(_command)


@bench_app.callback(invoke_without_command=True)
def _bench(context: typer.Context) -> None:
    """Judge scores by Channel-Bench-Macro: tables of small networks that were trained at all widths."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
