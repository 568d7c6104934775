"""The paper's baselines: random search over feasible widths, uniform scaling, and samples of the prior alone."""

from __future__ import annotations

import numpy as np

from bcnet.search.config import SearchConfig
from bcnet.search.constraints import Constraints
from bcnet.search.strategies.base import Strategy
from bcnet.space.widths import Widths


def random(constraints: Constraints, config: SearchConfig) -> Strategy:
    """Random widths that fill the budgets, ``config.population`` at a time."""
    rng = np.random.default_rng([config.seed, 2])
    # Draws repeat each other in small spaces, and repetitions are not scored: so more draws than evaluations.
    for _ in range(10 * config.evaluations):
        yield constraints.sample_full(rng, config.population)


def given(widths: Widths, config: SearchConfig) -> Strategy:
    """Configurations (n, L) that are there already, such as samples of the prior, ``config.population`` at a time."""
    for first in range(0, len(widths), config.population):
        yield widths[first : first + config.population]


def uniform(constraints: Constraints, config: SearchConfig) -> Strategy:
    """The widest uniform scaling that holds every budget, channel by channel and in multiples of 8, and the candidates
    about it.

    The scaling's widths need not be candidates; a scorer that knows candidates alone, such as a table,
    fails on the former and scores the latter.
    """
    about = constraints.space.decode(constraints.uniform_index())
    yield np.stack([constraints.uniform(), constraints.uniform(8), about])
