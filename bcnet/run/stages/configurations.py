"""Configurations that have a name: what a search is compared with, and what races beside its choice."""

from __future__ import annotations

import numpy as np

from bcnet.run.recipe import Recipe
from bcnet.run.session import Run
from bcnet.search import LogWidthModel
from bcnet.search.constraints import Constraints
from bcnet.search.criteria import allot, find_allotment
from bcnet.search.strategies.neighbours import MEANT, mean_of
from bcnet.space.importance import kinds
from bcnet.space.widths import Widths

NEXT_BEST = 3
"""Scores that may race beside the best one, where there is room."""
SHARE = 8
"""The best eighth of the trials counts as the best, whose mean races; of few trials the eighth best would not."""


def named_widths(run: Run) -> dict[str, Widths]:
    """The full network and uniform scaling, which every search's scores are shown beside."""
    return {"full": run.full, "uniform": run.constraints.uniform()}


def configuration(run: Run, name: str, within: Constraints | None = None) -> list[int]:
    """The widths of ``full``, ``uniform``, ``balanced``, ``random`` or a criterion's allotment ``within`` budgets, by
    default the run's, latency as it was measured."""
    within = run.held if within is None else within
    if name == "full" or (name == "uniform" and within is run.constraints):
        widths: list[int] = run.read("trace")["widths"][name]
        return widths
    if name == "uniform":
        return within.uniform().tolist()
    if name == "balanced":
        return LogWidthModel.balanced(run.space).best(within).tolist()
    if name == "random":
        rng = np.random.default_rng([run.recipe.seed, 20])
        return within.sample_full(rng, 1)[0].tolist()
    if name == "uniform-8":
        return within.uniform(8).tolist()
    allotment = find_allotment(name)
    return allot(within, run.scores_by(allotment.criterion), allotment.scope, kinds(run.space)).tolist()


def rules_of_thumb(run: Run) -> dict[str, list[int]]:
    """What one would take without a search, by name. Balanced widths are not among them: inherited, they were five
    points below uniform ones (docs/results/rivals.md)."""
    return {name: configuration(run, name) for name in rule_names(run.recipe)}


def rule_names(recipe: Recipe) -> list[str]:
    """Uniform widths, and widths by that criterion by which channels are kept (but never by chance) and by others."""
    criterion = recipe.keep if recipe.keep != "random" else "l2"
    scoped = [f"{criterion}-isomorphic", "taylor-global", f"{criterion}-global", "lamp-isomorphic", "lamp-global"]
    return list(dict.fromkeys(["uniform", *scoped]))


def finalists(run: Run) -> dict[str, list[int]]:
    """All that may race, by name, the most trusted first: the mean of those that scored best, which no
    single one's luck is in (docs/results/rivals.md), the search's choice, the rule of thumb that scored best, uniform
    widths, the other rules, and more of those that scored best."""
    trials = [trial for trial in run.trials() if trial.feasible and trial.score is not None]
    trials = [trial for trial in trials if bool(run.held.feasible(np.array([trial.widths]))[0])]
    scored = [list(trial.widths) for trial in sorted(trials, key=lambda t: -(t.score or 0.0))[:MEANT]]
    meant = scored[: max(2, len(trials) // SHARE)]
    named = {"best-score" if n == 1 else f"score-{n}": widths for n, widths in enumerate(scored[: 1 + NEXT_BEST], 1)}
    if scored:
        named["mean-of-best"] = mean_of(run.held, np.array(meant))[0].tolist()
    searched, rules = run.read("search"), rules_of_thumb(run)
    known: dict[str, float] = searched.get("rules", {})
    ranked = sorted(rules, key=lambda rule: -known.get(rule, -np.inf))
    found = {"search": list(searched["best"]["widths"])} | rules | named
    first = ["mean-of-best", "search", ranked[0], "uniform", *ranked]
    different: dict[tuple[int, ...], str] = {}
    for name in [*first, *found]:
        if name in found:
            different.setdefault(tuple(found[name]), name)
    return {name: list(widths) for widths, name in different.items()}
