"""Generation after generation near the best configurations so far, where a model of all scores expects better ones.

For scores of networks that inherit trained weights. There a score costs seconds, so few are asked for, and what rules
give (uniform, a criterion's allotment) is a good place to begin. Most of a generation are the optima of bottleneck
models (:mod:`bcnet.search.predictors.bottleneck`) within reach of the best configuration so far: one of the model
fitted to all scores, the others of models fitted to the scores weighted at random. These disagree where scores say
little, so that is where the search learns. A single score may be luck; the mean of the best configurations is less so,
and is asked for too. Because models err, the rest are drawn at random near all of these.
"""

from __future__ import annotations

import numpy as np

from bcnet.search.config import SearchConfig
from bcnet.search.constraints import Constraints
from bcnet.search.predictors.bottleneck import BottleneckModel, costs_of_widening
from bcnet.search.strategies.base import Strategy
from bcnet.space.widths import Floats, Widths

APART = 0.25
"""How far configurations near rules lie from them: a deviation of the logarithms of widths."""
MEANT = 8
"""The best configurations whose mean is asked for."""
REACH, WIDER, NARROWER = (0.5, 0.15, 1.0), 1.3, 0.6
"""How far from the best the model is trusted at first, at the least and at the most, in logarithms of widths; and the
factors after a generation that found a better one, and one that did not."""
AT_RANDOM, DEVIATION, SOME = 4, 0.12, 0.5
"""One in this many is drawn at random; the deviation of the logarithms of the widths that change, and how many do."""
TRIES = 3
FURTHER = (0.25, 0.5, 1.0, 2.0)
"""Deviations of the logarithms of all widths, where nothing new lies nearer."""
HALVINGS = 40


def neighbours(constraints: Constraints, config: SearchConfig, initial: Widths | None = None) -> Strategy:
    """Generations of ``config.population``, the first of them ``initial``, shrunk to the budgets, or near uniform
    widths. It ends where it finds no widths that were not asked for."""
    rng, space = np.random.default_rng([config.seed, 6]), constraints.space
    uniform = space.decode(constraints.uniform_index())[None]
    rows = np.concatenate([uniform, near(constraints, uniform, config.population - 1, rng)])
    rows = rows if initial is None else space.decode(constraints.shrink(space.encode(initial), rng))
    asked, found = np.empty((0, len(space)), dtype=np.int64), np.empty(0)
    share, reach = costs_of_widening(constraints), REACH[0]
    for _ in range(10 * config.evaluations):
        scores = yield rows
        before = _best(found)
        asked, first = np.unique(np.concatenate([asked, rows]), axis=0, return_index=True)
        found = np.concatenate([found, scores])[first]
        unmet, about = _Unmet(asked, config.population), uniform
        if np.isfinite(before):
            reach = float(np.clip(reach * (WIDER if _best(found) > before else NARROWER), *REACH[1:]))
        known = np.isfinite(found)
        if known.any():
            about = _propose(unmet, constraints, (asked[known], found[known]), share, reach, rng)
        for apart in () if unmet.chosen else FURTHER:
            unmet.take(near(constraints, about, config.population, rng, apart))
        if not unmet.chosen:
            return
        rows = np.array(unmet.chosen)


def _best(found: Floats) -> float:
    return float(found[np.isfinite(found)].max(initial=-np.inf))


class _Unmet:
    """At most ``size`` configurations, ``chosen`` in turn, that are different and not among those ``asked`` (n, L)."""

    def __init__(self, asked: Widths, size: int):
        self.size, self.chosen = size, list[Widths]()
        self._met = {tuple(row) for row in asked.tolist()}

    def take(self, rows: Widths) -> None:
        for row in rows:
            if len(self.chosen) < self.size and tuple(row.tolist()) not in self._met:
                self._met.add(tuple(row.tolist()))
                self.chosen.append(row)


def _propose(
    unmet: _Unmet, constraints: Constraints, scored: tuple[Widths, Floats], share: Floats, reach: float,
    rng: np.random.Generator,
) -> Widths:  # fmt: skip
    """Have ``unmet`` take the next generation, after those ``scored`` (widths (n, L), scores (n,)); the configurations
    (k, L) that it lies about."""
    asked, found = scored
    size, ranked = unmet.size, asked[np.argsort(-found, kind="stable")]
    model = BottleneckModel.fit(asked, found, share)
    expected, mean = model.best(constraints, ranked[0], reach)[None], mean_of(constraints, ranked[:MEANT])
    for rows in (expected, model.best(constraints, ranked[0], reach / 2)[None], mean):
        unmet.take(rows)
    for _ in range(TRIES * size):
        if len(unmet.chosen) >= size - size // AT_RANDOM:
            break
        again = BottleneckModel.fit(asked, found, share, rng.exponential(size=len(found)))
        unmet.take(again.best(constraints, ranked[0], reach / rng.integers(1, 3))[None])
    about = np.concatenate([ranked[:2], expected, mean])
    for _ in range(TRIES):
        unmet.take(near(constraints, about, size, rng, DEVIATION, SOME))
    return about


def near(
    constraints: Constraints,
    known: Widths,
    count: int,
    rng: np.random.Generator,
    apart: float = APART,
    some: float = 1.0,
) -> Widths:
    """Configurations (count, L) that fill the budgets, each near one of ``known`` (n, L) in turn: ``apart`` is the
    deviation of the logarithms of those widths that change, about ``some`` of them."""
    logs = np.log(known[np.arange(count) % len(known)])
    step = rng.normal(0, apart, logs.shape)
    return _filled(constraints, logs + (step if some == 1 else step * (rng.random(logs.shape) < some)), rng)


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
