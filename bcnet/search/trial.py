"""A trial: widths, their score, and what they cost. Scores are better when higher, as accuracy is."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Trial:
    """One scored configuration; ``score`` is None where scoring failed, and ``failure`` then says why.

    ``costs`` are in their own units, ``feasible`` says whether every budget holds, ``generation`` counts
    the strategy's rounds from 1, ``seconds`` is the time scoring took.
    """

    number: int
    widths: tuple[int, ...]
    score: float | None
    costs: dict[str, int]
    feasible: bool
    generation: int
    seconds: float
    failure: str | None = None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Trial:
        """The inverse of :meth:`to_dict`, also after a round trip through JSON."""
        return cls(**{**data, "widths": tuple(data["widths"])})


def best_of(trials: Iterable[Trial], cost: str) -> Trial | None:
    """The highest score within the budgets; of equals the cheapest, then the earliest."""
    scored = [t for t in trials if t.score is not None and t.feasible]
    return min(scored, key=lambda t: _rank(t, cost), default=None)


def front_of(trials: Iterable[Trial], cost: str) -> tuple[Trial, ...]:
    """The Pareto front of score and ``cost``, cheapest first: no trial scores as high for less."""
    front: list[Trial] = []
    for trial in sorted((t for t in trials if t.score is not None), key=lambda t: (t.costs[cost], *_rank(t, cost))):
        if not front or _score(trial) > _score(front[-1]):
            front.append(trial)
    return tuple(front)


def best_so_far(trials: Sequence[Trial]) -> list[float | None]:
    """After every trial in order of number, the best feasible score so far; None before there is one."""
    best: float | None = None
    course = []
    for trial in sorted(trials, key=lambda t: t.number):
        if trial.feasible and trial.score is not None:
            best = trial.score if best is None else max(best, trial.score)
        course.append(best)
    return course


def _score(trial: Trial) -> float:
    assert trial.score is not None
    return trial.score


def _rank(trial: Trial, cost: str) -> tuple[float, int, int]:
    return -_score(trial), trial.costs[cost], trial.number
