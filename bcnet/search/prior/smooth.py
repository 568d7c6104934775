"""Distributions worth sampling: the prior program with a reward for entropy.

The program's own optimum is almost a single configuration, so samples of it would all be alike. Minimising
``expected error - tau * entropy`` instead gives every variable a softmax over its candidates; tau is
chosen for a stated effective number of candidates, and tau to zero is the program itself.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bcnet.search.prior.problem import PriorProblem, Solution
from bcnet.space.widths import Floats

BISECTIONS = 24
SWEEPS = 30


@dataclass(frozen=True)
class Smooth:
    """Distributions (L, K) at the temperature ``tau``, with ``effective`` candidates per variable:
    the exponential of the mean entropy."""

    distributions: Floats
    tau: float
    effective: float


def smooth(program: PriorProblem, solution: Solution, effective: float) -> Smooth:
    """Smooth distributions that hold the budgets in expectation, with about ``effective`` candidates per variable.

    Where the budgets leave less room than that, as many as they do.
    """
    softmax = _Softmax(program, solution)
    scale = float(np.ptp(program.errors[program.valid])) or 1.0
    low, high = np.log(1e-4 * scale), np.log(1e2 * scale)
    best = softmax.within_budgets(np.exp(low))
    for _ in range(BISECTIONS // 2):
        middle = (low + high) / 2
        found = softmax.within_budgets(np.exp(middle))
        low, high = (middle, high) if found.effective < effective else (low, middle)
        if abs(found.effective - effective) < abs(best.effective - effective):
            best = found
    return best


class _Softmax:
    """Coordinate-wise minimisation of ``errors + price * costs - tau * entropy``.

    Variables that do not meet each other are updated together, by colours of the coupling graph. The
    budgets' multipliers keep the proportions they have in the program, and are scaled together.
    """

    def __init__(self, program: PriorProblem, solution: Solution):
        self._program, self._start = program, solution.distributions
        multipliers = solution.multipliers
        self._colours = _colours(program.coupled)
        # A trace of every multiplier, so that a price high enough brings down every cost.
        self._direction = multipliers + 1e-3 * max(float(multipliers.sum()), 1e-9)
        self._direction = self._direction / self._direction.sum()

    def within_budgets(self, tau: float) -> Smooth:
        """The distributions of the lowest price at which the expected costs hold the budgets."""
        free = self._at(tau, 0.0)
        if (self._program.excess(free) <= 0).all():
            return _smooth(free, tau)
        low = 0.0
        high = 1e4 * (tau + float(np.ptp(self._program.errors[self._program.valid]))) * len(free)
        held = self._at(tau, high)
        # By ratio, since prices span many orders; the first step leaves zero.
        for _ in range(BISECTIONS):
            middle = np.sqrt(max(low, 1e-9 * high) * high)
            found = self._at(tau, middle)
            if (self._program.excess(found) <= 0).all():
                high, held = middle, found
            else:
                low = middle
        return _smooth(held, tau)

    def _at(self, tau: float, price: float) -> Floats:
        """The distributions (L, K) at one price, descending from those of the program."""
        program, p = self._program, self._start.copy()
        for _ in range(SWEEPS):
            before = p.copy()
            for rows in self._colours:
                means = (p * program.widths).sum(axis=1)
                prices = np.tensordot(price * self._direction, program.prices(means)[:, rows], 1)
                p[rows] = _softmin((program.errors[rows] + prices) / tau, program.valid[rows])
            if np.abs(p - before).max() < 1e-4:
                break
        return p


def _softmin(values: Floats, valid: NDArray[np.bool_]) -> Floats:
    values = np.where(valid, values, np.inf)
    weights = np.exp(values.min(axis=1, keepdims=True) - values)
    return weights / weights.sum(axis=1, keepdims=True)


def _smooth(p: Floats, tau: float) -> Smooth:
    entropy = -(p * np.log(np.where(p > 0, p, 1.0))).sum(axis=1)
    return Smooth(p, float(tau), float(np.exp(entropy.mean())))


def _colours(coupled: NDArray[np.bool_]) -> list[NDArray[np.int64]]:
    """Variables in groups none of which holds two coupled ones, greedily."""
    colour = np.full(len(coupled), -1)
    for i in range(len(coupled)):
        taken = set(colour[coupled[i]])
        colour[i] = next(c for c in range(len(coupled) + 1) if c not in taken)
    return [np.flatnonzero(colour == c) for c in range(colour.max() + 1)]
