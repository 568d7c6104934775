"""Widths as Markov chains, after DMCP ("Differentiable Markov Channel Pruning"), under any scorer.

Every variable has a chain over its candidates: the probability that the next group of channels is kept, given that
those before it are. DMCP learns it by gradients through a network that it trains at the same time; here each generation
is drawn from the chains, filled to the budget in place of DMCP's FLOPs loss, scored like every other strategy's, and
the chains move towards its best quarter (the cross-entropy method).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from bcnet.search.config import SearchConfig
from bcnet.search.constraints import Constraints
from bcnet.search.strategies.base import Strategy
from bcnet.space.widths import Floats

BEST, PACE, LEAST = 0.25, 0.3, 0.02
"""The share of a generation that chains move towards, how far, and the least probability of either way."""


def markov(constraints: Constraints, config: SearchConfig) -> Strategy:
    """Generations of ``config.population`` drawn from the chains of all variables."""
    rng = np.random.default_rng([config.seed, 4])
    counts = np.array([len(v.candidates) for v in constraints.space.variables])
    steps = np.arange(counts.max() - 1)
    keep = 1 - 1 / (counts[:, None] - steps).clip(min=2)  # all candidates alike, (L, K - 1)
    for _ in range(10 * config.evaluations):
        index = _drawn(keep, counts, config.population, rng)
        index = constraints.space.encode(
            constraints.fill(constraints.space.decode(constraints.shrink(index, rng)), rng)
        )
        scores = yield constraints.space.decode(index)
        known = np.flatnonzero(np.isfinite(scores))
        best = index[known[np.argsort(-scores[known], kind="stable")[: max(1, round(BEST * len(known)))]]]
        if not len(best):
            continue
        reached = (best[:, :, None] >= steps).sum(axis=0)  # (L, K - 1): how many had the choice
        kept = (best[:, :, None] > steps).sum(axis=0)
        shares = np.where(reached > 0, kept / np.maximum(reached, 1), keep)
        keep = ((1 - PACE) * keep + PACE * shares).clip(LEAST, 1 - LEAST)


def _drawn(keep: Floats, counts: NDArray[np.int64], n: int, rng: np.random.Generator) -> NDArray[np.int64]:
    """Candidate indices (n, L): how many groups each chain keeps beyond the first."""
    kept = rng.random((n, *keep.shape)) < keep
    index = np.cumprod(kept, axis=2).sum(axis=2)
    return np.minimum(index, counts - 1)
