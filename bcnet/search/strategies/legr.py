"""LeGR ("Towards Efficient Model Compression via Learned Global Ranking"), under any scorer.

Channels of all layers are ranked together by ``a * importance + b``, with a scale ``a`` and a shift ``b`` of every
width variable, and those above the threshold that the budgets allow stay. The scales and shifts are found by LeGR's
regularised evolution: the best of a few drawn from the pool is changed in a tenth of its layers, ever less, and takes
the place of the oldest. The first is the plain global ranking.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np

from bcnet.search.config import SearchConfig
from bcnet.search.constraints import Constraints
from bcnet.search.criteria import allot
from bcnet.search.strategies.base import Strategy
from bcnet.space.widths import Floats

CHANGED, DRAWN = 0.1, 0.25
"""The share of layers that a change reaches, and the share of the pool from which a parent is taken."""


def legr(constraints: Constraints, config: SearchConfig, importance: Sequence[Floats]) -> Strategy:
    """One configuration after the other, with a pool of ``config.population`` maps; ``importance`` has an array over
    the units of every variable."""
    rng = np.random.default_rng([config.seed, 6])
    spread = np.array([row.std() for row in importance])
    pool: deque[tuple[float, Floats]] = deque(maxlen=config.population)
    plain = np.stack([np.ones(len(spread)), np.zeros(len(spread))])
    for number in range(100 * config.evaluations):
        pace = max(1 - number / config.evaluations, 0.05)
        if number == 0:
            maps = plain
        elif len(pool) < config.population:
            maps = _changed(plain, spread, 1.0, 1.0, rng)
        else:
            drawn = rng.choice(len(pool), max(2, round(DRAWN * len(pool))), replace=False)
            maps = _changed(max((pool[i] for i in drawn), key=lambda pair: pair[0])[1], spread, CHANGED, pace, rng)
        ranked = [a * row + b for a, b, row in zip(*maps, importance, strict=True)]
        (score,) = yield allot(constraints, ranked)[None]
        if np.isfinite(score):
            pool.append((float(score), maps))


def _changed(maps: Floats, spread: Floats, share: float, pace: float, rng: np.random.Generator) -> Floats:
    """Scales and shifts (2, L) after a change in a ``share`` of the layers."""
    layers = rng.permutation(len(spread))[: max(1, round(share * len(spread)))]
    found = maps.copy()
    found[0, layers] *= np.exp(pace * rng.standard_normal(len(layers)))
    found[1, layers] += pace * spread[layers] * rng.standard_normal(len(layers))
    return found
