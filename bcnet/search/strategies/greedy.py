"""Greedy slimming, as AutoSlim does it."""

from __future__ import annotations

import numpy as np

from bcnet.search.config import SearchConfig
from bcnet.search.constraints import Constraints
from bcnet.search.strategies.base import Strategy


def greedy(constraints: Constraints, config: SearchConfig) -> Strategy:
    """From full width, drop one candidate of the variable that hurts least, until every budget holds.

    All networks on the way are scored, the smaller ones it did not choose included.
    """
    space = constraints.space
    current = space.encode(space.max)
    yield space.decode(current)[None]
    for _ in range(int(current.sum())):
        if constraints.feasible(space.decode(current)[None])[0]:
            return
        variables = np.flatnonzero(current > 0)
        smaller = np.tile(current, (len(variables), 1))
        smaller[np.arange(len(variables)), variables] -= 1
        scores = yield space.decode(smaller)
        current = smaller[np.argmax(np.where(np.isfinite(scores), scores, -np.inf))]
