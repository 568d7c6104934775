"""Searching configurations within the budgets."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np

from bcnet.errors import BcnetError
from bcnet.run.session import Run
from bcnet.run.stages.configurations import rules_of_thumb
from bcnet.run.stages.scoring import cut_scorer, open_scorer
from bcnet.search import LossLog as Recorded
from bcnet.search import SearchProgress, TrialStore, search
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
