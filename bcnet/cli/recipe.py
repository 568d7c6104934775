"""``bcnet recipe list``, ``show`` and ``check``."""

from __future__ import annotations

from typing import Annotated

import typer

from bcnet.cli import options
from bcnet.cli.console import Command, OneLineErrors, console, print_json, table
from bcnet.cli.stage import require_trust

recipe_app = typer.Typer(cls=OneLineErrors)


@recipe_app.callback(invoke_without_command=True)
def _recipe(context: typer.Context) -> None:
    """List, print or check recipes, files that say everything a run does."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


@recipe_app.command("list", cls=Command)
def list_recipes(as_json: Annotated[bool, options.JSON] = False) -> None:
    """List the recipes that come with bcnet."""
    from bcnet.run.recipe import Recipe, names

    recipes = {name: Recipe.read(name) for name in names()}
    if as_json:
        print_json({"recipes": [{"name": name, **recipe.to_dict()} for name, recipe in recipes.items()]})
        return
    table(
        "Recipes: bcnet run --recipe NAME",
        ["name", "model", "data", "budget", "the paper's budgets", "supernet, retrain epochs"],
        [
            (
                name,
                r.model,
                r.data,
                ", ".join(r.budgets),
                ", ".join(r.paper_budgets) or "-",
                f"{r.supernet.epochs}, {r.retrain.epochs}",
            )
            for name, r in recipes.items()
        ],
    )


@recipe_app.command("show", cls=Command)
def show_recipe(
    place: Annotated[str, options.RECIPE] = "cluttered_digits",
    as_json: Annotated[bool, options.JSON] = False,
) -> None:
    """Print a recipe with every key and what it means, as YAML to start your own from."""
    from bcnet.run.recipe import Recipe
    from bcnet.run.recipe_comments import commented

    recipe = Recipe.read(place)
    if as_json:
        print_json(recipe.to_dict())
    else:
        print(commented(recipe), end="")


@recipe_app.command("check", cls=Command)
def check_recipe(
    place: Annotated[str, options.RECIPE],
    trust: Annotated[bool, options.TRUST] = False,
    as_json: Annotated[bool, options.JSON] = False,
) -> None:
    """Say whether a recipe is in order: its keys, its network, and its budgets for that network."""
    from bcnet.models.load import load_model
    from bcnet.run.recipe import Recipe
    from bcnet.run.session import make_constraints, make_space, needed_latency

    recipe = Recipe.read(place)
    require_trust(recipe, trust)
    space, full = make_space(load_model(recipe.model, recipe.input), recipe)
    latency = needed_latency(space, full, recipe)
    costs = space.costs if latency is None else {**space.costs, "latency": latency}
    wanted: list[tuple[str, ...]] = [(target,) for target in recipe.targets]
    checked = [
        make_constraints(space, full, costs, budgets).check().to_dict() for budgets in wanted or [recipe.budgets]
    ]
    if as_json:
        print_json({"recipe": place, "model": recipe.model, "variables": len(space), "feasibility": checked})
        return
    text = f"{place} is in order: {recipe.model}, {len(space)} width variables, within {', '.join(recipe.budgets)}"
    console().print(text, soft_wrap=True)
