"""The command line: ``bcnet COMMAND``. One module per group of commands, each plain functions.

Modules here import torch only inside a command that needs it, so that help and arithmetic are instant.
"""

from __future__ import annotations

from typing import Annotated

import typer

from bcnet import __version__
from bcnet.cli.bench import bench_app
from bcnet.cli.console import OneLineErrors
from bcnet.cli.export import export_network
from bcnet.cli.fairness import show_fairness
from bcnet.cli.inspect import balance, list_models, show_cost, show_model
from bcnet.cli.pick import pick_network
from bcnet.cli.recipe import recipe_app
from bcnet.cli.run import add_run_commands
from bcnet.cli.search import show_front

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


add_run_commands(app)
app.command("pick")(pick_network)
app.command("front")(show_front)
app.command("export")(export_network)
app.add_typer(recipe_app, name="recipe")
app.command("models")(list_models)
app.command("show")(show_model)
app.command("cost")(show_cost)
app.command("balance")(balance)
app.command("fairness")(show_fairness)
app.add_typer(bench_app, name="bench")
