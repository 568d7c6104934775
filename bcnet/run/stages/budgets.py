"""Budgets of latency, held by measurement: a table of layers predicts, the whole network decides."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from bcnet.latency.compare import compare_backend
from bcnet.latency.table import LatencyTable
from bcnet.run.session import Run
from bcnet.search import LogWidthModel, Trial
from bcnet.search.constraints import Budget, Constraints
from bcnet.search.predictors.bottleneck import BottleneckModel, costs_of_widening
from bcnet.search.strategies.neighbours import MEANT, REACH, mean_of
from bcnet.space.widths import Widths
from bcnet.training import distributed

ROUNDS = 5
"""The most corrections of the table."""
SLACK = 1.02
"""The factor by which a measured latency may exceed its limit and still hold: clocks are no more precise."""


def limit_ms(run: Run, budget: Budget, full_ms: float) -> float:
    """What ``budget`` allows, in milliseconds: a percentage is of the full network as it is measured."""
    if not budget.text.rstrip().endswith("%"):
        return budget.limit / 1e6
    return full_ms * budget.limit / float(run.costs["latency"](run.full)[0])


Choose = Callable[[Constraints], Trial]
"""What is chosen within budgets."""


def hold_latency(run: Run, best: Trial, choose: Choose) -> tuple[Trial, dict[str, Any] | None]:
    """``best``, or the next one that holds a budget of latency when it is measured; and what was measured.

    Where the measurement is above the limit, the table is corrected by what it was off, and ``choose`` chooses again
    within that. Of several processes, the first one measures for all.
    """
    budget, table = _latency_budget(run), run.costs.get("latency")
    if budget is None or not isinstance(table, LatencyTable):
        return best, None
    held, checked = distributed.decide(lambda: _held(run, best, choose, budget, table))
    if not checked["held"]:
        run.listener.note(
            f"the budget {budget.text} is not met by measurement: {checked['slim_ms']:.3g} ms, but "
            f"{checked['limit_ms']:.3g} ms are allowed; {_advice(run, held)}"
        )
    elif checked["correction"] != 1.0:
        by = f"{checked['correction'] - 1:+.0%}"
        run.listener.note(f"predictions of latency were corrected by {by} until {budget.text} held when measured")
    return held, checked


def holding(run: Run, name: str, networks: Mapping[str, Sequence[int]]) -> list[str]:
    """Which configurations (by name) hold a budget of latency when they are measured side by side: a prediction that is
    right for one of them is some per cent off for others. All of them, where there is no such budget.

    Known for these configurations as the result ``search/NAME`` after the first time: a resumed run does the same.
    """
    budget = _latency_budget(run)
    if budget is None:
        return list(networks)
    kept, asked = f"search/{name}", {name: list(widths) for name, widths in networks.items()}
    if not run.done(kept) or run.read(kept)["asked"] != asked:
        found = distributed.decide(lambda: _holding(run, budget, networks))
        run.write(kept, {"asked": asked, "holding": found})
    held: list[str] = run.read(kept)["holding"]
    return held


def _latency_budget(run: Run) -> Budget | None:
    return next((b for b in run.constraints.budgets if b.name == "latency"), None)


def _holding(run: Run, budget: Budget, networks: Mapping[str, Sequence[int]]) -> list[str]:
    searched = run.read("search")
    proven = searched["best"]["widths"] if (searched.get("latency") or {}).get("held") else None
    found, limit = _timed(run, budget, networks)
    return [name for name, widths in networks.items() if list(widths) == proven or found[name] <= SLACK * limit]


def _timed(run: Run, budget: Budget, networks: Mapping[str, Sequence[int]]) -> tuple[dict[str, float], float]:
    """Milliseconds of the ``full`` network and of configurations by name, side by side, and what ``budget`` allows."""
    built = {name: run.fresh(np.array(widths)).eval() for name, widths in {"full": run.full, **networks}.items()}
    found = compare_backend(built, run.original.example, run.recipe.latency)
    return found, limit_ms(run, budget, found["full"])


def _advice(run: Run, best: Trial) -> str:
    if best.widths == tuple(run.space.min.tolist()):
        return "there is no smaller network in this space, but a larger budget may be met"
    return "a smaller budget or a larger round_to may help"


def _held(run: Run, best: Trial, choose: Choose, budget: Budget, table: LatencyTable) -> tuple[Trial, dict[str, Any]]:
    factor, checked = 1.0, _measured(run, best, budget)
    most = (budget.limit - 1) / (float(table(run.space.min)[0]) + 1)  # which leaves only the smallest network
    for _ in range(ROUNDS):
        if checked["held"] or factor >= most:
            break
        factor = min(factor * 1.01 * checked["slim_ms"] / checked["limit_ms"], most)
        within = Constraints(run.space, {**run.costs, "latency": table.corrected(factor)}, run.constraints.budgets)
        best = choose(within)
        checked = {**_measured(run, best, budget), "correction": factor}
    return best, checked


def _measured(run: Run, trial: Trial, budget: Budget) -> dict[str, Any]:
    """The full network and one at the widths of ``trial``, timed side by side."""
    found, limit = _timed(run, budget, {"slim": trial.widths})
    held = found["slim"] <= SLACK * limit
    return {
        "correction": 1.0, "full_ms": found["full"], "slim_ms": found["slim"], "limit_ms": limit, "held": held
    }  # fmt: skip


def best_by_model(run: Run, within: Constraints, trials: Sequence[Trial]) -> tuple[LogWidthModel | None, Trial]:
    """The best configuration ``within`` budgets by a model over the scores of ``trials``: the bottleneck model where
    networks inherit trained weights, of whose scores it knows more (docs/results/bottleneck.md), else the log-width
    model, which is the other result."""
    asked, scores = np.array([t.widths for t in trials]), np.array([t.score or 0.0 for t in trials])
    if run.recipe.scorer == "supernet":
        model = LogWidthModel.fit(asked, scores, run.space.layer_counts)
        widths = model.best(within)
        return model, _expected(run, widths, float(model.predict(widths[None])[0]))
    about = mean_of(within, asked[np.argsort(-scores, kind="stable")[:MEANT]])[0]
    bottleneck = BottleneckModel.fit(asked, scores, costs_of_widening(within))
    widths = bottleneck.best(within, about, REACH[0])
    return None, _expected(run, widths, bottleneck.score(widths))


def _expected(run: Run, widths: Widths, score: float) -> Trial:
    """A configuration (L,) that a model expects to have a score."""
    return Trial(0, tuple(int(width) for width in widths), score, run.cost_of(widths), True, 0, 0.0)
