"""Generation after generation near the best configurations so far, in the logarithms of their widths.

For scores of networks that inherit trained weights. Each costs as much as it is worth there, so few are asked for, and
what rules give (uniform, a criterion's allotment) is a good place to begin: from a trained MobileNetV2, 24
configurations found what is half a point better than the best rule (docs/results/rivals.md). Of the many that lie
near, those are asked for which a linear model of the scores so far likes best. Single scores are lucky; the mean of
the best is less so, and generations lie around it too.
"""

from __future__ import annotations

import numpy as np

from bcnet.search.config import SearchConfig
from bcnet.search.constraints import Constraints
from bcnet.search.strategies.base import Strategy
from bcnet.space.widths import Floats, Widths

PARENTS, APART = 4, 0.25
"""The best configurations that a generation lies around, and how far: a deviation of the logarithms of widths."""
MEANT = 8
"""The best configurations whose mean counts as one more."""
DRAWN, RIDGE = 8, 3.0
"""How many are drawn for one that is asked for; the ridge of the linear model that chooses among them."""
HALVINGS = 40


def neighbours(constraints: Constraints, config: SearchConfig, initial: Widths | None = None) -> Strategy:
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
        liked = _linear(distinct, found[first], drawn)
        rows = drawn[np.argsort(-liked, kind="stable")[: config.population]]


def _linear(asked: Widths, found: Floats, drawn: Widths) -> Floats:
    """What a ridge regression on the logarithms of widths expects of ``drawn`` (m, L), from the better half of those
    ``asked`` (n, L) that scored ``found`` (n,): it tells which way to go, not how bad the bad ones are."""
    better = np.argsort(-found, kind="stable")[: max(asked.shape[1], len(asked) // 2)]
    if not len(better):
        return np.zeros(len(drawn))
    logs = np.log(asked[better])
    middle = logs.mean(0)
    apart = max(float((logs - middle).std()), 1e-9)
    x, y = (logs - middle) / apart, found[better] - found[better].mean()
    slope = np.linalg.solve(x.T @ x + RIDGE * np.eye(x.shape[1]), x.T @ y)
    expected: Floats = (np.log(drawn) - middle) / apart @ slope
    return expected


def near(constraints: Constraints, known: Widths, count: int, rng: np.random.Generator) -> Widths:
    """Configurations (count, L) that fill the budgets, each near one of ``known`` (n, L) in turn."""
    logs = np.log(known[np.arange(count) % len(known)]) + rng.normal(0, APART, (count, len(constraints.space)))
    return _filled(constraints, logs, rng)


def mean_of(constraints: Constraints, some: Widths) -> Widths:
    """The geometric mean of ``some`` configurations (n, L) as one that fills the budgets: (1, L)."""
    return _filled(constraints, np.log(some).mean(0, keepdims=True), np.random.default_rng(0))


def _filled(constraints: Constraints, logs: Floats, rng: np.random.Generator) -> Widths:
    """Configurations (n, L) that fill the budgets, in the proportions of ``logs`` (n, L)."""
    space, count = constraints.space, len(logs)
    low, high = np.full((count, 1), 1e-3), np.full((count, 1), 1e3)
    for _ in range(HALVINGS):  # all widths of a configuration by one factor, as large as it fits
        middle = np.sqrt(low * high)
        fits = constraints.feasible(_floor(constraints, logs, middle))[:, None]
        low, high = np.where(fits, middle, low), np.where(fits, high, middle)
    rows = _floor(constraints, logs, low)
    rows = space.decode(constraints.shrink(space.encode(rows), rng))  # where the smallest factor was too large
    return constraints.fill(rows, rng)


def _floor(constraints: Constraints, logs: np.ndarray, factor: np.ndarray) -> Widths:
    space = constraints.space
    return space.floor(np.minimum(np.exp(logs) * factor, space.max).astype(np.int64))
