"""How much work a run does, in one word.

``quick`` is for a first look, ``normal`` is as the recipe has it, ``paper`` as long as the paper trains and searches.
"""

from __future__ import annotations

from bcnet.errors import BcnetError
from bcnet.run.recipe import Recipe

QUICK = {
    "given.epochs": 15,
    "supernet.epochs": 15,
    "healing.steps": 20,
    "search.evaluations": 40,
    "search.population": 10,
    "race.finalists": 4,
    "race.rounds": 2,
    "retrain.epochs": 5,
}
PAPER = {
    "given.epochs": 300,
    "supernet.epochs": 300,
    "search.evaluations": 2000,
    "search.population": 40,
    "retrain.epochs": 300,
}
EFFORTS = ("quick", "normal", "paper")


def with_effort(recipe: Recipe, effort: str) -> Recipe:
    """``recipe`` with less work (never more) for ``quick``, more (never less) for ``paper``."""
    if effort not in EFFORTS:
        raise BcnetError(f"--effort is {effort!r:.40}, but it must be one of {', '.join(EFFORTS)}")
    if effort == "normal":
        return recipe
    wanted, pick = (QUICK, min) if effort == "quick" else (PAPER, max)
    content = recipe.to_dict()
    for key, value in wanted.items():
        group, _, name = key.partition(".")
        if content[group] is not None:
            content[group][name] = pick(content[group][name], value)
    if effort == "paper":
        content["healing"]["share"] = 0  # as many configurations as it says, however long the fine-tuning
    for group in ("given", "supernet", "retrain"):
        content[group]["warmup"] = min(content[group]["warmup"], content[group]["epochs"] / 4)
    # The baseline ``random`` cannot train its networks for longer than the others.
    content["random"]["epochs"] = min(content["random"]["epochs"], content["retrain"]["epochs"])
    return Recipe.parse(content)
