"""The strategy ``neighbours`` as it was before the bottleneck model, to compare with (docs/results/bottleneck.md).

Generations lie at random around the best configurations so far and their mean; of eight drawn, the one is asked for
that a ridge regression on the logarithms of widths likes best, fitted to the better half of the scores.
"""

from __future__ import annotations

import numpy as np

from bcnet.search.config import SearchConfig
from bcnet.search.constraints import Constraints
from bcnet.search.strategies.base import Strategy
from bcnet.search.strategies.neighbours import mean_of, near
from bcnet.space.widths import Floats, Widths

PARENTS, MEANT, DRAWN, RIDGE = 4, 8, 8, 3.0


def linear_neighbours(constraints: Constraints, config: SearchConfig, initial: Widths | None = None) -> Strategy:
    """Generations of ``config.population``, the first of them ``initial`` or near uniform widths."""
    rng = np.random.default_rng([config.seed, 6])
    uniform = constraints.space.decode(constraints.uniform_index())[None]
    rows = np.concatenate([uniform, near(constraints, uniform, config.population - 1, rng)])
    rows = rows if initial is None else initial
    asked, found = np.empty((0, len(constraints.space)), dtype=np.int64), np.empty(0)
    for _ in range(10 * config.evaluations):
        scores = yield rows
        known = np.isfinite(scores)
        asked, found = np.concatenate([asked, rows[known]]), np.concatenate([found, scores[known]])
        distinct, first = np.unique(asked, axis=0, return_index=True)
        ranked = distinct[np.argsort(-found[first], kind="stable")]
        best = np.concatenate([ranked[:PARENTS], mean_of(constraints, ranked[:MEANT])]) if len(ranked) else uniform
        drawn = near(constraints, best, DRAWN * config.population, rng)
        liked = linear(distinct, found[first], drawn)
        rows = drawn[np.argsort(-liked, kind="stable")[: config.population]]


def linear(asked: Widths, found: Floats, drawn: Widths, better_half: bool = True) -> Floats:
    """What the regression expects of ``drawn`` (m, L) from those ``asked`` (n, L) that scored ``found`` (n,)."""
    some = max(asked.shape[1], len(asked) // 2) if better_half else len(asked)
    better = np.argsort(-found, kind="stable")[:some]
    logs = np.log(asked[better])
    middle = logs.mean(0)
    apart = max(float((logs - middle).std()), 1e-9)
    x, y = (logs - middle) / apart, found[better] - found[better].mean()
    slope = np.linalg.solve(x.T @ x + RIDGE * np.eye(x.shape[1]), x.T @ y)
    expected: Floats = (np.log(drawn) - middle) / apart @ slope
    return expected
