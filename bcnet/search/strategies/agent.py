"""An agent that sets the ratio of every layer, after AMC ("AutoML for Model Compression"), under any scorer.

The agent draws a ratio of channels for each variable from a normal distribution about its policy, which sees what
AMC's agent does of a layer: its place, its width, its share of the cost, and the ratio before it. The reward is the
score. AMC learns by DDPG; here the policy is linear in these and in the layer itself, and follows the plain policy
gradient, with the noise getting smaller as AMC's does. Ratios above the budget are lowered, the rest of it is filled.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from bcnet.search.config import SearchConfig
from bcnet.search.constraints import Constraints
from bcnet.search.strategies.base import Strategy
from bcnet.space.widths import Floats, WidthSpace

START, NOISE, DECAY, RATE = 0.7, 0.3, 0.97, 0.5
"""The first ratio, the noise about it and how it shrinks by generation, and the step of the policy gradient."""


def agent(constraints: Constraints, config: SearchConfig) -> Strategy:
    """Generations of ``config.population`` episodes each."""
    space, rng = constraints.space, np.random.default_rng([config.seed, 5])
    layers = _features(constraints)
    weights = np.zeros(layers.shape[1] + 1)  # the last is for the ratio before
    own = np.full(len(space), START)
    for generation in range(10 * config.evaluations):
        noise = max(NOISE * DECAY**generation, 0.02)
        seen, actions = _episodes(layers, weights, own, noise, config.population, rng)
        index = constraints.shrink(_nearest(space, actions), rng)
        widths = constraints.fill(space.decode(index), rng)
        scores = yield widths
        known = np.isfinite(scores)
        spread = scores[known].std() if known.any() else 0.0
        if not spread:
            continue
        merit = np.where(known, (scores - scores[known].mean()) / spread, 0.0)
        taken = widths / space.max  # what became of the actions
        push = merit[:, None] * (taken - own - np.einsum("nlf,f->nl", seen, weights))
        own = (own + RATE * push.mean(axis=0)).clip(0.05, 1)
        weights = weights + RATE * np.einsum("nl,nlf->f", push, seen) / push.size


def _features(constraints: Constraints) -> Floats:
    """Of every variable: place, width and share of the first cost, each about 0 to 1 and centred, (L, 3)."""
    space, cost = constraints.space, constraints.costs[constraints.budgets[0].name]
    whole = float(cost(space.max)[0])
    least = np.tile(space.max, (len(space), 1))
    np.fill_diagonal(least, space.min)
    saved = 1 - cost(least) / whole
    columns = [np.arange(len(space)) / max(len(space) - 1, 1), np.log2(space.max) / np.log2(space.max.max()), saved]
    table = np.column_stack(columns)
    return table - table.mean(axis=0)


def _episodes(
    layers: Floats,
    weights: Floats,
    own: Floats,
    noise: float,
    n: int,
    rng: np.random.Generator,
) -> tuple[Floats, Floats]:
    """What the agent saw (n, L, features) and the ratios it drew (n, L), one layer after the other."""
    count, features = layers.shape
    seen = np.zeros((n, count, features + 1))
    actions = np.zeros((n, count))
    before = np.zeros(n)
    for layer in range(count):
        seen[:, layer, :-1], seen[:, layer, -1] = layers[layer], before
        actions[:, layer] = (own[layer] + seen[:, layer] @ weights + noise * rng.standard_normal(n)).clip(0, 1)
        before = actions[:, layer] - own[layer]
    return seen, actions


def _nearest(space: WidthSpace, ratios: Floats) -> NDArray[np.int64]:
    """The candidates nearest to ratios (n, L) of the full widths, as indices (n, L)."""
    wanted = ratios * space.max
    columns = [np.abs(np.array(v.candidates) - wanted[:, [i]]).argmin(axis=1) for i, v in enumerate(space.variables)]
    return np.stack(columns, axis=1)
