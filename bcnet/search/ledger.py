"""The bookkeeping of a search: every configuration is scored once, recorded as it happens, and counted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from bcnet.errors import BcnetError
from bcnet.search.constraints import Constraints
from bcnet.search.scorers import Executor
from bcnet.search.store import TrialStore
from bcnet.search.trial import Trial, best_of
from bcnet.space.widths import Floats, Widths

FAILURES_AT_START = 100


@dataclass(frozen=True)
class SearchProgress:
    """Where a search stands; ``hits`` counts widths that were asked for again, which is the same after a resume."""

    generation: int
    evaluations: int
    most_evaluations: int
    hits: int
    failures: int
    best: Trial | None


class Ledger:
    """Trials by widths, at most ``evaluations`` of them; ``told`` hears of every new one.

    ``reserved`` evaluations are kept back until it is set to less.
    """

    def __init__(
        self,
        constraints: Constraints,
        executor: Executor,
        store: TrialStore,
        evaluations: int,
        told: Callable[[SearchProgress], None],
    ):
        self._constraints, self._executor, self._store, self._told = constraints, executor, store, told
        self._evaluations = evaluations
        self.reserved = 0
        self._stored = {trial.widths: trial for trial in store.trials()}
        self._trials: dict[tuple[int, ...], Trial] = {}
        self.hits = 0
        self._failures = 0
        self._best: Trial | None = None

    @property
    def trials(self) -> tuple[Trial, ...]:
        """All trials in order of their number."""
        return tuple(sorted(self._trials.values(), key=lambda t: t.number))

    def __len__(self) -> int:
        return len(self._trials)

    def trial(self, widths: Widths) -> Trial:
        """The trial of widths (L,) that were scored."""
        return self._trials[tuple(int(c) for c in widths)]

    @property
    def room(self) -> int:
        """How many more widths can be scored."""
        return self._evaluations - self.reserved - len(self)

    def score(self, widths: Widths, generation: int) -> Floats:
        """The scores (n,) of widths (n, L); NaN where scoring failed, or where there is no room left for it."""
        asked = [tuple(int(c) for c in row) for row in widths]
        new = [key for key in dict.fromkeys(asked) if key not in self._trials]
        new = new[: self.room]
        self.hits += sum(key in self._trials for key in asked)
        numbers = {key: len(self) + i for i, key in enumerate(new)}
        for key in [key for key in new if key in self._stored]:
            self._replay(self._stored[key], numbers[key])
        self._score_new({key: number for key, number in numbers.items() if key not in self._stored}, generation)
        scores = [self._trials[key].score if key in self._trials else None for key in asked]
        return np.array([np.nan if score is None else score for score in scores])

    def _replay(self, trial: Trial, number: int) -> None:
        if trial.number != number:
            raise BcnetError(
                f"the stored trial {trial.number} is number {number} of this search, so it was made by another "
                f"version of bcnet or pymoo, or with another scorer: search in another folder"
            )
        self._take(trial)

    def _score_new(self, numbers: dict[tuple[int, ...], int], generation: int) -> None:
        if not numbers:
            return
        keys = list(numbers)
        widths = np.array(keys, dtype=np.int64)
        columns = {name: cost(widths) for name, cost in self._constraints.costs.items()}
        feasible = self._constraints.feasible(widths)
        for row, score, failure, seconds in self._executor(widths):
            costs = {name: int(column[row]) for name, column in columns.items()}
            number, fits = numbers[keys[row]], bool(feasible[row])
            trial = Trial(number, keys[row], score, costs, fits, generation, seconds, failure)
            self._store.add([trial])
            self._take(trial)

    def _take(self, trial: Trial) -> None:
        self._trials[trial.widths] = trial
        self._failures += trial.score is None
        self._best = best_of([t for t in (self._best, trial) if t is not None], self._constraints.budgets[0].name)
        if self._failures == len(self) == FAILURES_AT_START:
            raise BcnetError(f"the first {FAILURES_AT_START} trials all failed, the last with: {trial.failure}")
        state = (trial.generation, len(self), self._evaluations, self.hits, self._failures, self._best)
        self._told(SearchProgress(*state))
