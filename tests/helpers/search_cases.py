"""Small spaces, costs and scorers for the tests of the search."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from bcnet.space.cost import PeakCost, QuadraticCost
from bcnet.space.widths import Widths, WidthSpace, WidthVariable, candidates


def chain(length: int = 5, groups: int = 6, width: int = 24) -> tuple[WidthSpace, dict[str, QuadraticCost | PeakCost]]:
    """A chain of convolutions: each width meets the next; the first also meets the last, as a shortcut would."""
    space = WidthSpace([WidthVariable(f"v{i}", candidates(width, groups)) for i in range(length)])
    Q = np.diag(np.full(length - 1, 9.0), 1)
    Q[0, -1] += 1.0
    flops = QuadraticCost(10.0, np.arange(1.0, length + 1), 64 * Q)
    params = QuadraticCost(5.0, np.ones(length), Q)
    memory = PeakCost(np.zeros(length - 1), np.eye(length - 1, length) + np.eye(length - 1, length, 1))
    return space, {"flops": flops, "params": params, "memory": memory}


class Concave:
    """Accuracy that grows ever slower with every width; counts how often each widths is scored."""

    def __init__(self, space: WidthSpace, seed: int = 0):
        self._max = space.max
        self._weights = np.random.default_rng(seed).uniform(0.5, 2.0, len(space))
        self.asked: list[tuple[int, ...]] = []

    def score(self, widths: Widths) -> float:
        return float(self.score_many(widths[None])[0])

    def score_many(self, widths: Widths) -> NDArray[np.float64]:
        self.asked += [tuple(row) for row in widths.tolist()]
        return 90 + np.sqrt(widths / self._max) @ self._weights


def every(space: WidthSpace) -> Widths:
    """All widths of a small space, (n, L)."""
    grids = np.meshgrid(*[v.candidates for v in space.variables], indexing="ij")
    return np.stack([grid.ravel() for grid in grids], axis=1)
