"""The command line: ``bcnet COMMAND``. One module per command, named as the command; each is a plain function.

Modules here import torch only inside a command that needs it, so that help and arithmetic are instant.
"""

from __future__ import annotations

from typing import Annotated

import typer

from bcnet import __version__
from bcnet.cli.balance import balance
from bcnet.cli.bench import bench_app
from bcnet.cli.console import Command, OneLineErrors
from bcnet.cli.cost import cost
from bcnet.cli.export import export
from bcnet.cli.fairness import fairness
from bcnet.cli.front import front
from bcnet.cli.models import models
from bcnet.cli.options import flag
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
        bool, flag("--version", "Print the version and leave.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Slim a convolutional network to a budget: find good channel widths, and keep what it has learnt.

    Begin with `bcnet run`, which slims a small example and writes a report.
    """
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


COMMANDS = {
    "Slim a network": (run, report, export, pick, front),
    "Look at a network": (models, show, cost, balance),
    "One stage of a run at a time": tuple(stage_command(name) for name in STAGES),
    "Recipes and research": (fairness,),
}
for _panel, _commands in COMMANDS.items():
    for _command in _commands:
        app.command(_command.__name__, cls=Command, rich_help_panel=_panel)(_command)
app.add_typer(recipe_app, name="recipe", rich_help_panel="Recipes and research")
app.add_typer(bench_app, name="bench", rich_help_panel="Recipes and research")
