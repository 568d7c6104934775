"""One verb: :func:`search`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from bcnet.errors import BcnetError
from bcnet.search.config import SearchConfig
from bcnet.search.constraints import Budget, Constraints, Feasibility
from bcnet.search.ledger import Ledger, SearchProgress
from bcnet.search.predictors.log_width import LogWidthModel
from bcnet.search.prior.population import PathLosses, PriorReport, potential_errors, prior_population
from bcnet.search.scorers import open_executor
from bcnet.search.store import TrialStore
from bcnet.search.strategies import baselines
from bcnet.search.strategies.agent import agent
from bcnet.search.strategies.base import Strategy
from bcnet.search.strategies.enumerate import LARGEST, enumerate_all
from bcnet.search.strategies.greedy import greedy
from bcnet.search.strategies.legr import legr
from bcnet.search.strategies.markov import markov
from bcnet.search.strategies.neighbours import neighbours
from bcnet.search.trial import Trial, best_of, front_of
from bcnet.space.cost import Cost
from bcnet.space.widths import Floats, Widths, WidthSpace

STRATEGIES = ("evolution", "neighbours", "prior", "markov", "agent", "legr", "greedy", "random", "uniform", "enumerate")
IDLE_ROUNDS = 100

Ranked = list[Floats]


@dataclass(frozen=True)
class SearchResult:
    """What a search found. ``best`` is the highest score within all budgets, or the choice of the log-width model
    where it decides (None where nothing got a score); ``front`` the Pareto front of score and first
    budget's cost over all trials, cheapest first, those above the budgets included (``feasible`` tells);
    ``notes`` what a person should know."""

    best: Trial | None
    front: tuple[Trial, ...]
    trials: tuple[Trial, ...]
    feasibility: Feasibility
    hits: int
    prior: PriorReport | None
    notes: tuple[str, ...]
    log_width: LogWidthModel | None = None


def search(
    space: WidthSpace,
    score: Any,
    budgets: Sequence[str | Budget],
    costs: Mapping[str, Cost] | None = None,
    config: SearchConfig | None = None,
    *,
    initial: ArrayLike | PathLosses | None = None,
    importance: Sequence[ArrayLike] | None = None,
    store: TrialStore | None = None,
    progress: Callable[[SearchProgress], None] | None = None,
) -> SearchResult:
    """Find the best widths within all budgets.

    ``score`` is a function ``widths (L,) -> float``, higher is better, or an object with a method
    ``score`` or ``score_many``. ``budgets`` are texts such as ``"flops=50%"``; ``costs`` those of the
    space where left out. ``initial`` starts evolution from given widths (n, L), or from the prior of a
    training's losses, rather than at random; strategy ``prior`` scores nothing but samples of that prior. Strategy
    ``legr`` ranks channels by their ``importance``, an array for each variable (see :mod:`bcnet.space.importance`). A
    space that is no larger than the evaluations allow is scored as a whole instead. With a ``store`` on disk a search
    that was killed goes on where it stopped.
    """
    config = config or SearchConfig()
    if config.strategy in ("evolution", "neighbours", "random") and config.feasible_only and space.size <= config.room:
        config, initial = replace(config, strategy="enumerate"), None
    constraints = Constraints(space, costs if costs is not None else getattr(space, "costs", {}), budgets)
    feasibility = constraints.check()
    population, prior = _initial(constraints, config, initial)
    ranked = None if importance is None else [np.asarray(row, dtype=np.float64) for row in importance]
    strategy = _strategy(constraints, config, population, ranked)
    trials = store or TrialStore()
    trials.claim(_identity(constraints, config, population, ranked))
    with closing(open_executor(score, config.executor, config.workers)) as executor:
        ledger = Ledger(constraints, executor, trials, config.evaluations, progress or (lambda _: None))
        ledger.reserved = int(config.by_log_width)
        notes = [*(prior.notes if prior else ()), *_run(strategy, ledger, config)]
        notes += _short_of_uniform(constraints, ledger) if config.strategy == "uniform" else []
        log_width = _log_width(ledger, space) if config.by_log_width else None
        best = (
            best_of(ledger.trials, constraints.budgets[0].name)
            if log_width is None
            else _choice(log_width, constraints, ledger, notes)
        )
    if store is None:
        trials.close()
    if best is None:
        failure = next((trial.failure for trial in reversed(ledger.trials) if trial.failure), None)
        notes.append(
            "no widths within the budgets got a score" + (f", the last failed with {failure}" if failure else "")
        )
    front = front_of(ledger.trials, constraints.budgets[0].name)
    return SearchResult(best, front, ledger.trials, feasibility, ledger.hits, prior, tuple(notes), log_width)


def _log_width(ledger: Ledger, space: WidthSpace) -> LogWidthModel | None:
    """The log-width model of all scores, None where there are none."""
    scored = [(t.widths, t.score) for t in ledger.trials if t.score is not None]
    if not scored:
        return None
    return LogWidthModel.fit([widths for widths, _ in scored], [s for _, s in scored], space.layer_counts)


def _choice(log_width: LogWidthModel, constraints: Constraints, ledger: Ledger, notes: list[str]) -> Trial | None:
    """The trial of the best configuration by ``log_width`` within the budgets, or the best score where that failed."""
    widths = log_width.best(constraints)
    ledger.reserved = 0
    ledger.score(widths[None], max(t.generation for t in ledger.trials) + 1)
    trial = ledger.trial(widths)
    if trial.score is not None:
        return trial
    notes.append(f"the log-width model's choice could not be scored ({trial.failure}), so the best score was taken")
    return best_of(ledger.trials, constraints.budgets[0].name)


def _run(strategy: Strategy, ledger: Ledger, config: SearchConfig) -> list[str]:
    """Run the strategy until it or the evaluations end; returns notes for people."""
    ended = False
    idle, scores = 0, None
    for generation in range(1, IDLE_ROUNDS * config.evaluations):
        try:
            widths = next(strategy) if scores is None else strategy.send(scores)
        except StopIteration:
            ended = True
            break
        before = len(ledger)
        scores = ledger.score(widths, generation)
        idle = idle + 1 if len(ledger) == before else 0
        full = ledger.room <= 0 and bool(np.isnan(scores).any() or config.strategy != "enumerate")
        if full or idle == IDLE_ROUNDS:
            break
    strategy.close()
    if config.strategy == "enumerate":
        return [
            f"all {len(ledger)} configurations within the budgets were scored"
            if ended
            else f"the first {len(ledger)} configurations within the budgets were scored: allow more for all of them"
        ]
    natural = ended and config.strategy in ("greedy", "uniform", "prior")
    if natural or ledger.room <= 0:
        return []
    return [f"the search ended after {len(ledger)} of {config.evaluations} evaluations: it found no other widths"]


def _short_of_uniform(constraints: Constraints, ledger: Ledger) -> list[str]:
    """A note for searches whose candidates cannot express uniform scaling, if the scorer takes only candidates."""
    exact = tuple(constraints.uniform().tolist())
    if any(t.widths == exact and t.score is not None for t in ledger.trials):
        return []
    about = constraints.space.decode(constraints.uniform_index())
    used = 1 + float(constraints.excess(about[None]).max())
    return [f"the candidates cannot express uniform scaling: those about it use {used:.1%} of the budget"]


def _initial(
    constraints: Constraints, config: SearchConfig, initial: ArrayLike | PathLosses | None
) -> tuple[Widths | None, PriorReport | None]:
    if config.strategy == "prior" and not isinstance(initial, PathLosses):
        raise BcnetError("strategy 'prior' samples from the losses of a supernet's training: give them as initial")
    if initial is None:
        return None, None
    if config.strategy not in ("evolution", "neighbours", "prior"):
        raise BcnetError(f"strategy {config.strategy!r} takes no initial population: leave it out, or use evolution")
    if isinstance(initial, PathLosses):
        rng = np.random.default_rng([config.seed, 3])
        errors = potential_errors(constraints.space, initial)
        wanted = config.room if config.strategy == "prior" else config.population
        widths, report = prior_population(constraints, errors, wanted, rng, config.prior_spread)
        return (widths if config.strategy == "prior" else constraints.with_uniform(widths)[:wanted]), report
    return constraints.space.decode(np.atleast_2d(constraints.space.encode(initial))), None


def _strategy(
    constraints: Constraints, config: SearchConfig, population: Widths | None, importance: Ranked | None
) -> Strategy:
    if (importance is not None) != (config.strategy == "legr"):
        raise BcnetError("strategy 'legr', and no other, ranks channels by their importance: give both or neither")
    if importance is not None:
        return legr(constraints, config, importance)
    if config.strategy == "neighbours":
        return neighbours(constraints, config, population)
    if config.strategy == "evolution":
        from bcnet.search.strategies.evolution import evolution

        return evolution(constraints, config, population)
    if config.strategy == "prior" and population is not None:
        return baselines.given(population, config)
    plain = {
        "markov": markov,
        "agent": agent,
        "greedy": greedy,
        "random": baselines.random,
        "uniform": baselines.uniform,
        "enumerate": enumerate_all,
    }
    if config.strategy not in plain:
        raise BcnetError(f"unknown strategy {config.strategy!r}: choose from {', '.join(STRATEGIES)}")
    if config.strategy == "enumerate" and constraints.space.size > LARGEST:
        raise BcnetError(
            f"this space has {constraints.space.size:,} configurations, but at most {LARGEST:,} can be enumerated: "
            "search by evolution"
        )
    return plain[config.strategy](constraints, config)


def _identity(
    constraints: Constraints, config: SearchConfig, population: Widths | None, importance: Ranked | None
) -> dict[str, Any]:
    """What decides which widths a search asks for: a store holds the trials of one of these."""
    return {
        **config.identity(),
        "variables": list(constraints.space.names),
        "candidates": [list(v.candidates) for v in constraints.space.variables],
        "budgets": {b.name: b.limit for b in constraints.budgets},
        "initial": None if population is None else population.tolist(),
        **({} if importance is None else {"importance": [row.tolist() for row in importance]}),
    }
