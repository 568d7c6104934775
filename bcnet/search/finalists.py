"""The last word on a measured cost: the best few are measured for real before one is chosen."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bcnet.errors import BcnetError
from bcnet.search.constraints import Budget
from bcnet.search.trial import Trial


@dataclass(frozen=True)
class Finalist:
    """A trial with what its cost was predicted to be, what it is, and whether that holds the budget."""

    trial: Trial
    predicted: float
    measured: float
    holds: bool


def measure_finalists(
    trials: Sequence[Trial], budget: Budget, measure: Callable[[list[tuple[int, ...]]], Sequence[float]], n: int = 5
) -> list[Finalist]:
    """The ``n`` best feasible trials, best first, with their cost as ``measure`` (widths to costs) finds it.

    The first that holds is the one to take; where none does, the budget was met in prediction only, and
    a tighter one must be searched.
    """
    scored = [t for t in trials if t.feasible and t.score is not None]
    if not scored:
        raise BcnetError("there are no finalists: no widths within the budgets got a score")
    best = sorted(scored, key=lambda t: (-(t.score or 0.0), t.costs[budget.name], t.number))[:n]
    found = measure([t.widths for t in best])
    return [
        Finalist(t, float(t.costs[budget.name]), float(cost), float(cost) <= budget.limit)
        for t, cost in zip(best, found, strict=True)
    ]
