"""Searching configurations within the budgets."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from bcnet.errors import BcnetError
from bcnet.run.folder import DOUBT
from bcnet.run.recipe import Prior, Recipe
from bcnet.run.schema import Measure
from bcnet.run.session import Run
from bcnet.run.stages.budgets import best_by_model, hold_latency
from bcnet.run.stages.configurations import configuration, named_widths, rule_names, rules_of_thumb
from bcnet.run.stages.scoring import HEALING, RATES, cut_scorer, open_scorer, scores_in_parts
from bcnet.search import LogWidthModel, PathLosses, SearchProgress, Trial, TrialStore, front_of, search
from bcnet.search.constraints import Constraints
from bcnet.search.noise import tells_apart
from bcnet.search.store import TRIALS
from bcnet.search.strategies.neighbours import near
from bcnet.space.cost import QuadraticCost
from bcnet.space.widths import Widths
from bcnet.supernet.loss_log import LossLog
from bcnet.supernet.scoring import Evaluator
from bcnet.training import distributed
from bcnet.training.inherit import CutScorer

SCREENED = 4
"""How many random configurations are cut for each one that the search begins with."""
PROBED = 16
"""Configurations that scores must tell apart before they decide."""


def find(run: Run) -> None:
    """Search, from the prior of the training losses or from what criteria and rules of thumb propose."""
    r, start = run.recipe, time.monotonic()
    if r.allot is not None:
        _choose(run, r.allot, [f"the widths are those of {r.allot}, as asked for: nothing was searched"], start)
        return
    scorer = open_scorer(run)
    initial, notes = _prior(run) if r.scorer == "supernet" else (proposals(run), [])
    if run.done(HEALING):
        notes = [*notes, run.read(HEALING)["note"]]
    ranked_by, doubt = _trusted_measure(run, scorer, initial)
    notes += [doubt] if doubt else []
    if ranked_by is None:
        # Uniform widths need no score. From a trained MobileNetV2 at 15% of its FLOPs they end at 90.1% and balanced
        # ones at 85.2% (docs/results/rivals.md); from scratch neither is known to be better (log-width-trial.md).
        _choose(run, "uniform", notes, start)
        return
    scorer.by = ranked_by
    most = run.recipe.most_scored(len(run.data.train))
    if bound := _bound(run, most):
        run.listener.note(bound)
        notes = [*notes, bound]
    with _open_store(run) as store:
        result = search(
            run.space,
            scorer,
            run.constraints.budgets,
            run.costs,
            replace(r.search, seed=r.seed, evaluations=most),
            initial=initial,
            importance=run.channel_scores if r.search.strategy == "legr" else None,
            store=store,
            progress=lambda state: _tell_search(run, state, ranked_by),
        )
    notes += result.notes
    if result.best is None:
        raise BcnetError(f"the search found no widths within {', '.join(r.budgets)}: {'; '.join(notes)}")
    reference, rules = _scored(scorer, named_widths(run)), {}
    if r.race is not None and r.start == "trained":  # the best of them races
        rules = _scored(scorer, {name: np.array(widths) for name, widths in rules_of_thumb(run).items()})
    known = [t for t in result.trials if t.score is not None]
    best, checked = hold_latency(run, result.best, lambda within: best_by_model(run, within, known)[1])
    found = {
        "best": best.to_dict(),
        "latency": checked,
        "front": [trial.to_dict() for trial in result.front],
        "evaluations": len(result.trials),
        "hits": result.hits,
        "prior": None if result.prior is None else result.prior.to_dict(),
        "log_width": None if result.log_width is None else result.log_width.to_dict(),
        "reference": reference,
        "rules": rules,
    }
    _write(run, found, notes, ranked_by, start)


def _bound(run: Run, most: int) -> str:
    """In a sentence why a search scores no more than ``most`` configurations, where more are asked for."""
    r = run.recipe
    asked, tuning = min(r.search.evaluations, run.space.size), r.retrain.epochs * len(run.data.train)
    if most >= asked:
        return ""
    return (
        f"the search scores at most {most:,} configurations instead of {asked:,}, because {r.healing.steps} steps heal "
        f"each of them and fine-tuning the network that ships takes {tuning:,} (healing.share: {r.healing.share:g}): "
        "for more, set healing.share: 0 or raise retrain.epochs"
    )


def scored_beside(recipe: Recipe) -> int:
    """About how many configurations are scored beside those that a search asks for: at several rates of healing, to
    tell whether scores can be trusted, and to compare with."""
    rates = len(RATES) if recipe.scorer == "steps" and recipe.healing.lr is None else 0
    probed = max(0, PROBED - recipe.search.population) if recipe.fallback else 0
    return rates + probed + 1 + (len(rule_names(recipe)) if recipe.race is not None else 0)


def _scored(scorer: Evaluator | CutScorer, widths: dict[str, Widths]) -> dict[str, float]:
    """The scores of configurations by name, where they have one."""
    found = {name: scorer.score(row) for name, row in widths.items()}
    return {name: score for name, score in found.items() if np.isfinite(score)}


def _write(run: Run, found: dict[str, Any], notes: list[str], ranked_by: str, start: float) -> None:
    nothing: dict[str, Any] = {"evaluations": 0, "hits": 0, "prior": None, "log_width": None, "reference": {}}
    how = {"ranked_by": ranked_by, "scored_by": run.recipe.scorer}
    for name in (DOUBT, HEALING):
        run.remove(name)
    run.write("search", {**nothing, **found, **how, "notes": notes, "seconds": time.monotonic() - start})


def _trusted_measure(
    run: Run, scorer: Evaluator | CutScorer, initial: Widths | PathLosses | None
) -> tuple[Measure | None, str]:
    """What scores tell configurations apart by: the recipe's measure, else the loss, else nothing; and in a sentence
    why, where it is not the recipe's. Known after the first time, so that a resumed search does the same."""
    if not run.recipe.fallback:
        return run.recipe.rank_by, ""
    if not run.done(DOUBT):
        rng = np.random.default_rng([run.recipe.seed, 31])
        rows = run.constraints.sample(rng, PROBED)[0]
        if isinstance(initial, np.ndarray):  # scored anyway
            rows = np.unique(np.concatenate([initial, rows[len(initial) :]]), axis=0)
        asked: list[Measure] = ["score", "loss"] if run.recipe.rank_by == "score" else ["loss"]
        by = next((by for by in asked if tells_apart(scores_in_parts(run, scorer, rows, by))), None)
        run.write(DOUBT, {"ranked_by": by, "note": _doubt(run.recipe.rank_by, by, len(rows))})
    known = run.read(DOUBT)
    ranked_by: Measure | None = known["ranked_by"]
    return ranked_by, known["note"]


def _doubt(asked: str, by: str | None, count: int) -> str:
    if by == asked:
        return ""
    words = f"the {'losses' if asked == 'loss' else 'scores'} of {count} configurations differ by no more than chance"
    if by is not None:
        return f"{words}, so the search ranked by {by}"
    also = ", and so do their losses" if asked == "score" else ""
    return f"{words}{also}, so nothing was searched and uniform widths were taken: more epochs may help"


def _choose(run: Run, name: str, notes: list[str], start: float) -> None:
    """The widths of a configuration that has a name, without a search."""

    def choose(within: Constraints) -> Trial:
        widths = configuration(run, name, within)
        return Trial(1, tuple(widths), None, run.cost_of(widths), True, 1, 0.0)

    best, checked = hold_latency(run, choose(run.constraints), choose)
    _store_trials(run, name, [best])
    _write(run, {"best": best.to_dict(), "front": [], "latency": checked}, notes, run.recipe.rank_by, start)


def _store_trials(run: Run, how: str, trials: Sequence[Trial]) -> None:
    """Keep trials that no search makes, unless they are there; of several processes, the first one does."""

    def keep() -> None:
        with TrialStore(run.path(TRIALS)) as store:
            store.claim({how: [b.text for b in run.constraints.budgets]})
            if not store.trials():
                store.add(trials)

    distributed.decide(keep)


def _open_store(run: Run) -> TrialStore:
    """The trials of the run; of several processes, the first alone writes them, and the others begin with a copy."""

    def stored() -> list[Trial]:
        with TrialStore(run.path(TRIALS)) as store:
            return list(store.trials())

    trials = distributed.decide(stored) if distributed.world()[1] > 1 else []
    if distributed.main_process():
        return TrialStore(run.path(TRIALS))
    store = TrialStore()
    store.add(trials)
    return store


def choose_known(run: Run, scored: Sequence[Trial], ranked_by: str, widths: Sequence[int] | None = None) -> None:
    """Take ``widths`` (L,), or choose within the run's budgets by trials that were ``scored`` before: no score is
    computed."""
    start = time.monotonic()
    inside = run.constraints.feasible(np.array([t.widths for t in scored]))
    own = [replace(t, number=i, feasible=bool(inside[i - 1])) for i, t in enumerate(scored, 1)]

    def choose(within: Constraints) -> tuple[LogWidthModel | None, Trial]:
        return best_by_model(run, within, own) if widths is None else (None, _trial_of(run, own, widths))

    model, best = choose(run.constraints)
    best, checked = hold_latency(run, best, lambda within: choose(within)[1])
    name = run.constraints.budgets[0].name
    _store_trials(run, "picked", own)
    front = [trial.to_dict() for trial in front_of(own, name)]
    known = None if model is None else model.to_dict()
    found = {"best": best.to_dict(), "front": front, "latency": checked, "log_width": known}
    by = "bottleneck" if model is None else "log-width"
    note = f"chosen from {len(own):,} scores of the run's other searches, by the {by} model over them"
    if widths is not None:
        note = "the widths are those that were asked for: nothing was searched"
    _write(run, found, [note], ranked_by, start)


def _trial_of(run: Run, trials: Sequence[Trial], widths: Sequence[int]) -> Trial:
    """The trial of a configuration (L,), without a score if it is none of ``trials``."""
    unscored = Trial(0, tuple(widths), None, run.cost_of(widths), True, 0, 0.0)
    return next((trial for trial in trials if trial.widths == unscored.widths), unscored)


def proposals(run: Run) -> Widths | None:
    """The first configurations of a search among inherited networks: what would be raced without one, and others near
    it, or for evolution random ones, of which the cheap score of the bare cut keeps the best."""
    r = run.recipe
    if r.search.strategy not in ("evolution", "neighbours"):
        return None
    rng = np.random.default_rng([r.seed, 30])
    rules = np.stack([np.asarray(widths) for widths in rules_of_thumb(run).values()])
    about = run.space.floor(rules)  # candidates; a rule may ask for less than the smallest
    about = about[run.constraints.feasible(about)]
    if not len(about):  # a latency may be less at a width than at the candidate below it
        about = run.space.decode(run.constraints.uniform_index())[None]
    known = run.constraints.fill(about, rng)
    wanted = r.search.population - len(known)
    if wanted < 1:
        return known[: r.search.population]
    if r.search.strategy == "neighbours":
        return np.unique(np.concatenate([known, near(run.constraints, known, wanted, rng)]), axis=0)
    drawn = run.constraints.fill(run.constraints.sample(rng, SCREENED * wanted)[0], rng)
    scores = cut_scorer(run, "cut").score_many(drawn)
    best = drawn[np.argsort(-scores, kind="stable")[:wanted]]
    return np.unique(np.concatenate([known, best]), axis=0)


def _tell_search(run: Run, state: SearchProgress, ranked_by: str) -> None:
    figures: dict[str, float] = {"generation": state.generation}
    if state.best is not None and state.best.score is not None:
        best = state.best.score
        figures |= {"best": best} if ranked_by == "score" else {"lowest loss": -best}
    run.listener.step("search", state.evaluations, state.most_evaluations, figures)


def _prior(run: Run) -> tuple[PathLosses | None, list[str]]:
    """The best losses of training, for the first population; None, with the reason, where they are of no use."""
    r = run.recipe
    if r.prior is None or r.search.strategy not in ("evolution", "prior"):
        return None, []
    if not any(isinstance(run.costs[b.name], QuadraticCost) for b in run.constraints.budgets):
        return None, ["no budget is one of FLOPs or parameters, so the search began at random, without the prior"]
    return path_losses(run, r.prior), []


def path_losses(run: Run, prior: Prior) -> PathLosses:
    """The losses of the widths trained that ``prior`` asks for, least first."""
    kept = {k.removeprefix("log."): t for k, t in run.tensors("train").items() if k.startswith("log.")}
    log = LossLog.from_tensors(kept)
    return PathLosses(*log.best(prior.best or len(log), after=int(prior.after * run.read("train")["steps"])))
