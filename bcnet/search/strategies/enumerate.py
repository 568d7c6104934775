"""Small spaces need no search: every configuration within the budgets is scored."""

from __future__ import annotations

from itertools import islice, product

import numpy as np

from bcnet.search.config import SearchConfig
from bcnet.search.constraints import Constraints
from bcnet.search.strategies.base import Strategy
from bcnet.space.widths import Widths

TOGETHER = 512
"""Configurations asked for at once: neighbours, which a scorer that shares prefixes likes."""
LARGEST = 1_000_000


def enumerate_all(constraints: Constraints, config: SearchConfig) -> Strategy:
    """All configurations that hold every budget, in the order of ``itertools.product``."""
    waiting: list[Widths] = []
    rows = product(*(v.candidates for v in constraints.space.variables))
    for _ in range(-(-constraints.space.size // TOGETHER)):
        some = np.array(list(islice(rows, TOGETHER)), dtype=np.int64)
        waiting.append(some[constraints.feasible(some)])
        if sum(map(len, waiting)) >= TOGETHER:
            yield np.concatenate(waiting)
            waiting = []
    if any(map(len, waiting)):
        yield np.concatenate(waiting)
