"""The program behind the prior population (``eq11`` with ``eq12``), for any quadratic cost.

One distribution over candidates for every variable, drawn independently. The expected error is linear
in them. The expected cost depends on expected widths, and on expected squares where a variable meets
itself: it is linear in each variable's distribution, but bilinear in two of them, so the program is not
convex. Minimising the Lagrangian is then a sum of pairwise terms with its minimum at plain widths, which
elimination finds exactly: a proven lower bound. Sequential linear programs start from there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linprog
from scipy.sparse import csr_array, vstack

from bcnet.errors import BcnetError
from bcnet.search.prior.elimination import Elimination
from bcnet.space.cost import QuadraticCost
from bcnet.space.widths import Floats, WidthSpace

CUTS = 60
STEPS = 40
STARTS = 6
TOLERANCE = 1e-9


@dataclass(frozen=True)
class Solution:
    """Distributions (L, K), zero beyond a variable's candidates, of expected error ``objective``;
    no distributions have less than ``bound``. ``multipliers`` (B,) are the prices of the budgets."""

    distributions: Floats
    objective: float
    bound: float
    multipliers: Floats

    @property
    def gap(self) -> float:
        """How far the objective is above the bound, relative to it."""
        return (self.objective - self.bound) / max(abs(self.bound), 1e-12)


class PriorProblem:
    """Minimise the expected error under expected costs within their constraints.

    ``errors`` has the potential error of every candidate, one array (K_l,) per variable; ``budgets`` are
    quadratic costs with their constraints. Arrays over candidates are padded to (L, K).
    """

    def __init__(self, space: WidthSpace, errors: Sequence[Floats], budgets: Sequence[tuple[QuadraticCost, float]]):
        self.counts = np.array([len(v.candidates) for v in space.variables])
        shape = len(space), int(self.counts.max())
        self.valid = np.arange(shape[1]) < self.counts[:, None]
        self.errors, self.widths = np.zeros(shape), np.zeros(shape)
        self.errors[self.valid] = np.concatenate(errors)
        self.widths[self.valid] = np.concatenate([v.candidates for v in space.variables])
        self._constant = np.array([(cost.q0 - limit) / limit for cost, limit in budgets])
        self._linear = np.stack([cost.q / limit for cost, limit in budgets])
        self._squares = np.stack([np.diag(cost.Q) / limit for cost, limit in budgets])
        self._mixed = np.stack([_symmetric(cost.Q) / limit for cost, limit in budgets])
        if (self.excess(_vertex(np.zeros(len(space), dtype=np.int64), shape)) > 0).any():
            raise BcnetError("not even the smallest network holds the budgets, so no prior can be found")
        self.coupled: NDArray[np.bool_] = np.any(self._mixed != 0, axis=0)
        self._edges = [(int(i), int(j)) for i, j in np.argwhere(np.triu(self.coupled, 1))]
        self._elimination = Elimination(self.counts, self._edges)

    def objective(self, distributions: Floats) -> float:
        """The expected error of distributions (L, K)."""
        return float((distributions * self.errors).sum())

    def excess(self, distributions: Floats) -> Floats:
        """How far the expected costs are above their constraints, relative to them: (B,)."""
        means = (distributions * self.widths).sum(axis=1)
        squares = (distributions * self.widths**2).sum(axis=1)
        return self._constant + self._linear @ means + self._squares @ squares + self._mixed @ means @ means / 2

    def prices(self, means: Floats) -> Floats:
        """The derivative of every relative cost by every probability, at expected widths (L,): (B, L, K)."""
        slopes = self._linear + self._mixed @ means
        return slopes[..., None] * self.widths + self._squares[..., None] * self.widths**2

    def solve(self) -> Solution:
        """The paper's program: distributions of nearly the least expected error, and a bound on it."""
        cuts, bound, multipliers, shares = self._dual()
        shape = self.errors.shape
        starts = [_vertex(cut, shape) for cut in cuts]
        starts = sorted((s for s in starts if (self.excess(s) <= 0).all()), key=self.objective)[:STARTS]
        mixture = np.einsum("t,tlk->lk", shares, np.stack([_vertex(cut, shape) for cut in cuts]))
        starts.append(self._restored(starts[0], mixture))
        found = None
        for start in starts:
            candidate = self._descend(start)
            if found is None or self.objective(candidate) < self.objective(found):
                found = candidate
            if self.objective(found) - bound <= 1e-6 * abs(bound):
                break
        assert found is not None
        return Solution(found, self.objective(found), bound, multipliers)

    def _dual(self) -> tuple[list[NDArray[np.int64]], float, Floats, Floats]:
        """The best Lagrangian bound, by cutting planes: the widths met, the bound, the multipliers (B,), and
        the shares of the widths (T,) in the mixture that attains it."""
        cuts = [np.zeros(len(self.counts), dtype=np.int64)]
        bound, multipliers = -np.inf, np.zeros(len(self._constant))
        trial = multipliers
        shape = self.errors.shape
        # Beyond this price, saving a thousandth of any budget is worth more than all errors together.
        highest = 1e3 * max(float(np.ptp(self.errors[self.valid])) * len(self.counts), 1e-9)
        for _ in range(CUTS):
            widths, value = self._cheapest(trial)
            if value > bound:
                bound, multipliers = value, trial
            cuts.append(widths)
            rows = [np.append(-self.excess(_vertex(cut, shape)), 1.0) for cut in cuts]
            right = [self.objective(_vertex(cut, shape)) for cut in cuts]
            constraints = [(0.0, highest)] * len(trial) + [(None, None)]
            master = linprog([0.0] * len(trial) + [-1.0], np.stack(rows), right, bounds=constraints)
            trial, top = master.x[:-1], master.x[-1]
            shares = -master.ineqlin.marginals
            if top - bound <= TOLERANCE * max(abs(top), 1.0):
                break
        return cuts, float(bound), multipliers, shares / shares.sum()

    def _cheapest(self, multipliers: Floats) -> tuple[NDArray[np.int64], float]:
        """The widths (as candidate indices) of the least Lagrangian, and a lower bound on it."""
        linear, squares = multipliers @ self._linear, multipliers @ self._squares
        terms = self.errors + linear[:, None] * self.widths + squares[:, None] * self.widths**2
        mixed = np.tensordot(multipliers, self._mixed, 1)
        pairs = {
            (i, j): mixed[i, j] * np.outer(self.widths[i, : self.counts[i]], self.widths[j, : self.counts[j]])
            for i, j in self._edges
        }
        unary = [row[:count] for row, count in zip(terms, self.counts, strict=True)]
        widths, value = self._elimination.minimise(unary, pairs)
        return widths, value + float(multipliers @ self._constant)

    def _descend(self, start: Floats) -> Floats:
        """Sequential linear programs from feasible distributions (L, K); each step stays feasible and improves."""
        current, radius = start, 1.0
        for _ in range(STEPS):
            step = self._step(current, radius)
            gain = self.objective(current) - self.objective(step)
            if gain > TOLERANCE * max(abs(self.objective(current)), 1e-12):
                current, radius = step, min(2 * radius, 1.0)
            else:
                radius /= 4
            if radius < 1e-3:
                break
        return current

    def _step(self, current: Floats, radius: float) -> Floats:
        """The best distributions whose expected widths are within ``radius`` of their range, costs linearised.

        Where the true cost is above the linear one, the program is solved once more with that much less
        budget; what still is too costly is moved back towards ``current``.
        """
        reserve = np.zeros(len(self._constant))
        step = current
        for _ in range(3):
            step = self._linear_program(current, radius, reserve)
            over = self.excess(step)
            if (over <= TOLERANCE).all():
                break
            reserve = reserve + np.maximum(over, 0)
        return self._restored(current, step)

    def _linear_program(self, current: Floats, radius: float, reserve: Floats) -> Floats:
        means = (current * self.widths).sum(axis=1)
        prices = self.prices(means)[:, self.valid]
        # Linearised at ``current``: excess(p) ~ excess(current) + prices . (p - current).
        right = prices @ current[self.valid] - self.excess(current) - reserve
        owner = np.repeat(np.arange(len(self.counts)), self.counts)
        ones = csr_array((np.ones(len(owner)), (owner, np.arange(len(owner)))))
        wide = csr_array((self.widths[self.valid], (owner, np.arange(len(owner)))))
        span = radius * (self.widths.max(axis=1) - self.widths[:, 0])
        inequalities = vstack([csr_array(prices), wide, -wide])
        most = np.concatenate([right, means + span, span - means])
        answer = linprog(self.errors[self.valid], inequalities, most, ones, np.ones(len(self.counts)), bounds=(0, 1))
        if answer.x is None:
            return current
        result = np.zeros_like(self.errors)
        result[self.valid] = np.maximum(answer.x, 0)
        return result / result.sum(axis=1, keepdims=True)

    def _restored(self, feasible: Floats, wanted: Floats) -> Floats:
        """The point nearest to ``wanted`` on the way from ``feasible`` that holds all budgets."""
        if (self.excess(wanted) <= 0).all():
            return wanted
        low, high = 0.0, 1.0
        for _ in range(50):
            middle = (low + high) / 2
            holds = (self.excess(feasible + middle * (wanted - feasible)) <= 0).all()
            low, high = (middle, high) if holds else (low, middle)
        return feasible + low * (wanted - feasible)


def _symmetric(Q: Floats) -> Floats:
    """``Q + Q'`` without its diagonal: the coupling of different variables."""
    mixed = Q + Q.T
    np.fill_diagonal(mixed, 0.0)
    return mixed


def _vertex(index: NDArray[np.int64], shape: tuple[int, int]) -> Floats:
    """Candidate indices (L,) as distributions (L, K)."""
    result = np.zeros(shape)
    result[np.arange(shape[0]), index] = 1.0
    return result
