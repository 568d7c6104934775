"""The command line: ``bcnet COMMAND``. One module per command, named as the command; each is a plain function.

Modules here import torch only inside a command that needs it, so that help and arithmetic are instant.
"""

from __future__ import annotations

from typing import Annotated

import typer

from bcnet import __version__
from bcnet.cli.balance import balance
from bcnet.cli.bench import bench_app
from bcnet.cli.console import OneLineErrors
from bcnet.cli.cost import cost
from bcnet.cli.export import export
from bcnet.cli.fairness import fairness
from bcnet.cli.front import front
from bcnet.cli.models import models
from bcnet.cli.pick import pick
from bcnet.cli.recipe import recipe_app
from bcnet.cli.report import report
from bcnet.cli.run import run
from bcnet.cli.show import show
from bcnet.cli.stage import STAGES, stage_command

app = typer.Typer(
    cls=OneLineErrors, add_completion=False, pretty_exceptions_enable=False, context_settings={"max_content_width": 100}
)


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"bcnet {__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and leave.")
    ] = False,
) -> None:
    """Find the best channel widths of a convolutional network under a budget."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


app.command("run")(run)
for _stage in STAGES:
    app.command(_stage)(stage_command(_stage))
for _command in (report, pick, front, export, models, show, cost, balance, fairness):
    app.command(_command.__name__)(_command)
app.add_typer(recipe_app, name="recipe")
app.add_typer(bench_app, name="bench")
