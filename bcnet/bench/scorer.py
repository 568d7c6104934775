"""Simulated search: the table answers in place of training, and counts what training would have cost."""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from bcnet.bench.spaces import BenchSpace
from bcnet.errors import BcnetError
from bcnet.space.widths import Floats

WhichRun = int | NDArray[np.integer] | Literal["mean"] | None


class TableScorer:
    """Scores widths by one recorded training run each.

    The run is chosen per query: by default at random from ``seed``, or named as ``run`` (0..S-1, or one
    for each configuration, or "mean" for the mean of all S). ``queries`` counts the scores given;
    ``evaluations`` counts the distinct trainings they stand for, the currency of a real search.
    """

    def __init__(self, space: BenchSpace, acc: Floats, seed: int = 0):
        self._space = space
        self._acc = acc
        self._rng = np.random.default_rng(seed)
        self._trained = np.zeros(acc.shape, dtype=bool)
        self.queries = 0

    @property
    def evaluations(self) -> int:
        return int(self._trained.sum())

    def __call__(self, widths: ArrayLike, run: WhichRun = None) -> float:
        """The score of one configuration (L,), in percent."""
        return float(self.score_many(self._space.check(widths)[None], run)[0])

    def score_many(self, widths: ArrayLike, run: WhichRun = None) -> Floats:
        """The scores of widths (n, L), in percent: (n,)."""
        index = self._space.index(widths)
        if index.ndim != 1:
            raise BcnetError("call the scorer with one configuration (L,), and score_many with rows of them (n, L)")
        if isinstance(run, str):
            if run != "mean":
                raise BcnetError(f"run is {run!r}, but it must be a number, 'mean' or None")
            self._trained[index] = True
            scores = self._acc[index].mean(axis=1)
        else:
            runs = self._runs(run, len(index))
            self._trained[index, runs] = True
            scores = self._acc[index, runs]
        self.queries += len(index)
        return scores

    def _runs(self, run: int | NDArray[np.integer] | None, count: int) -> NDArray[np.int64]:
        seeds = self._acc.shape[1]
        if run is None:
            return self._rng.integers(0, seeds, size=count)
        runs = np.asarray(run)
        if runs.shape not in ((), (count,)) or runs.dtype.kind not in "iu" or ((runs < 0) | (runs >= seeds)).any():
            raise BcnetError(f"a run is a whole number in 0..{seeds - 1}, one for all widths or one for each")
        return np.broadcast_to(runs, (count,))
