"""Searching configurations within the budgets."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from bcnet.errors import BcnetError
from bcnet.run.session import Run
from bcnet.run.stages.configurations import rules_of_thumb
from bcnet.run.stages.scoring import cut_scorer, open_scorer
from bcnet.search import LogWidthModel, SearchProgress, Trial, TrialStore, front_of, search
from bcnet.search import LossLog as Recorded
from bcnet.space.cost import QuadraticCost
from bcnet.space.widths import Widths
from bcnet.supernet.loss_log import LossLog

SCREENED = 4
"""Random configurations cut for each that begins the search."""


def find(run: Run) -> None:
    """Search, from the prior of the training losses or from what criteria and rules of thumb propose."""
    r, start = run.recipe, time.monotonic()
    scorer, scores = open_scorer(run)
    initial, notes = _prior(run) if r.scorer == "supernet" else (proposals(run), [])
    with TrialStore(run.path("trials.sqlite")) as store:
        result = search(
            run.space,
            scorer,
            run.constraints.budgets,
            run.costs,
            replace(r.search, seed=r.seed),
            initial=initial,
            store=store,
            progress=lambda state: _tell_search(run, state),
        )
    notes += result.notes
    if result.best is None:
        raise BcnetError(f"the search found no widths within {', '.join(r.budgets)}: {'; '.join(notes)}")
    run.write(
        "search",
        {
            "best": result.best.to_dict(),
            "front": [trial.to_dict() for trial in result.front],
            "evaluations": len(result.trials),
            "hits": result.hits,
            "prior": None if result.prior is None else result.prior.to_dict(),
            "ranked_by": r.rank_by,
            "log_width": None if result.log_width is None else result.log_width.to_dict(),
            "scored_by": r.scorer,
            "reference": scores,
            "notes": notes,
            "seconds": time.monotonic() - start,
        },
    )


def choose_known(run: Run, trials: Sequence[Trial]) -> None:
    """Choose within the run's budgets from ``trials`` that were scored before: no score is computed."""
    start = time.monotonic()
    scored = [t for t in trials if t.score is not None]
    inside = run.constraints.feasible(np.array([t.widths for t in scored]))
    own = [replace(t, number=i, feasible=bool(inside[i - 1])) for i, t in enumerate(scored, 1)]
    model = LogWidthModel.fit([t.widths for t in own], [t.score or 0.0 for t in own], run.space.layer_counts)
    widths = tuple(int(w) for w in model.best(run.constraints))
    predicted = float(model.predict(np.array(widths)[None])[0])
    best = Trial(0, widths, predicted, run.cost_of(widths), True, 0, 0.0)
    name = run.constraints.budgets[0].name
    with TrialStore(run.path("trials.sqlite")) as store:
        store.claim({"picked": [b.text for b in run.constraints.budgets]})
        if not store.trials():
            store.add(own)
    run.write(
        "search",
        {
            "best": best.to_dict(),
            "front": [trial.to_dict() for trial in front_of(own, name)],
            "evaluations": 0,
            "hits": 0,
            "prior": None,
            "ranked_by": run.recipe.rank_by,
            "log_width": model.to_dict(),
            "scored_by": run.recipe.scorer,
            "reference": {},
            "notes": [f"chosen from {len(own):,} scores of the run's other searches, by the log-width model over them"],
            "seconds": time.monotonic() - start,
        },
    )


def proposals(run: Run) -> Widths | None:
    """The first configurations of a search among inherited networks: what would be raced without one, and random
    ones, of which the cheap score of the bare cut keeps the best."""
    r = run.recipe
    if r.search.strategy != "evolution":
        return None
    known = [np.asarray(widths) for widths in rules_of_thumb(run).values()]
    wanted = r.search.population - len(known)
    if wanted < 1:
        return np.stack(known[: r.search.population])
    rng = np.random.default_rng([r.seed, 30])
    drawn = run.constraints.fill(run.constraints.sample(rng, SCREENED * wanted)[0], rng)
    scores = cut_scorer(run, "cut").score_many(drawn)
    best = drawn[np.argsort(-scores, kind="stable")[:wanted]]
    return np.unique(np.concatenate([np.stack(known), best]), axis=0)


def _tell_search(run: Run, state: SearchProgress) -> None:
    figures: dict[str, float] = {"generation": state.generation, "hits": state.hits}
    if state.best is not None and state.best.score is not None:
        best = state.best.score
        figures |= {"best": best} if run.recipe.rank_by == "score" else {"lowest loss": -best}
    run.listener.step("search", state.evaluations, state.most_evaluations, figures)


def _prior(run: Run) -> tuple[Recorded | None, list[str]]:
    """The best losses of training, for the first population; None, with the reason, where they are of no use."""
    r = run.recipe
    if r.prior is None or r.search.strategy != "evolution":
        return None, []
    if not any(isinstance(run.costs[b.name], QuadraticCost) for b in run.constraints.budgets):
        return None, ["no budget is one of FLOPs or parameters, so the search began at random, without the prior"]
    kept = {k.removeprefix("log."): t for k, t in run.tensors("train").items() if k.startswith("log.")}
    log = LossLog.from_tensors(kept)
    widths, losses = log.best(r.prior.best, after=int(r.prior.after * run.read("train")["steps"]))
    return Recorded(run.space, widths, losses), []
