"""The paper's baselines: random search over feasible widths, and uniform scaling."""

from __future__ import annotations

import numpy as np

from bcnet.search.config import SearchConfig
from bcnet.search.constraints import Constraints
from bcnet.search.strategies.base import Strategy


def random(constraints: Constraints, config: SearchConfig) -> Strategy:
    """Widths drawn uniformly from those that hold every budget, ``config.population`` at a time."""
    rng = np.random.default_rng([config.seed, 2])
    # Draws repeat each other in small spaces, and repetitions are not scored: so more draws than evaluations.
    for _ in range(10 * config.evaluations):
        yield constraints.sample(rng, config.population)[0]


def uniform(constraints: Constraints, config: SearchConfig) -> Strategy:
    """The widest uniform scaling that holds every budget, and the candidates about it.

    The scaling's widths need not be candidates; a scorer that knows candidates alone, such as a table,
    fails on the former and scores the latter.
    """
    yield np.stack([constraints.uniform(), constraints.space.decode(constraints.uniform_index())])
