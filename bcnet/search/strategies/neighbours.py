"""Generation after generation near the best configurations so far, in the logarithms of their widths.

For scores of networks that inherit trained weights. Each costs as much as it is worth there, so few are asked for, and
what rules give (uniform, a criterion's allotment) is a good place to begin: from a trained MobileNetV2, 24
configurations found what is half a point better than the best rule (docs/results/rivals.md).
"""

from __future__ import annotations

import numpy as np

from bcnet.search.config import SearchConfig
from bcnet.search.constraints import Constraints
from bcnet.search.strategies.base import Strategy
from bcnet.space.widths import Widths

PARENTS, APART = 4, 0.25
"""The best configurations that a generation lies around, and how far: a deviation of the logarithms of widths."""
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
        best = distinct[np.argsort(-found[first], kind="stable")[:PARENTS]]
        rows = near(constraints, best if len(best) else uniform, config.population, rng)


def near(constraints: Constraints, known: Widths, count: int, rng: np.random.Generator) -> Widths:
    """Configurations (count, L) that fill the budgets, each near one of ``known`` (n, L) in turn."""
    space = constraints.space
    logs = np.log(known[np.arange(count) % len(known)]) + rng.normal(0, APART, (count, len(space)))
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
