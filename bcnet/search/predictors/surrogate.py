"""A cheap prediction of the score of any widths, learnt from the widths scored so far.

Ridge regression on main effects of every variable (orthogonal polynomials of its candidate's index, up
to cubic) and on products of two variables' polynomials. With four candidates the main effects are
complete: the prediction is then exactly an additive plus pairwise model. Sums over the data are kept, so n
scores cost O(n p^2) once and a fit O(p^3), whatever n is.
"""

from __future__ import annotations

from itertools import combinations

import numpy as np
from scipy.linalg import cholesky, solve_triangular

from bcnet.space.widths import Floats, Indices

MOST_FEATURES = 400
DEGREE = 3
PENALTIES = (0.1, 1.0, 10.0, 100.0)


class Surrogate:
    """Predicts scores of candidate indices (n, L); ``counts`` (L,) are the candidates of each variable."""

    def __init__(self, counts: Indices):
        self._bases = [_polynomials(int(count)) for count in counts]
        starts = np.cumsum([0, *(basis.shape[1] for basis in self._bases)])
        degrees = np.concatenate([np.arange(1, basis.shape[1] + 1) for basis in self._bases])
        self._left, self._right = _products(starts, MOST_FEATURES - len(degrees) - 1)
        # Rough effects and effects of two variables need more evidence; the constant needs next to none.
        products = 2 * degrees[self._left] * degrees[self._right]
        self._rough: Floats = np.concatenate([[1e-6], degrees, products]).astype(np.float64)
        self._gram = np.zeros((len(self._rough), len(self._rough)))
        self._moment = np.zeros(len(self._rough))
        self._square = 0.0
        self._count = self._tuned_at = 0
        self._penalty, self._noise = PENALTIES[0], 0.0
        self._shift = self._constant = 0.0
        self._main: Floats = np.zeros(len(degrees))
        self._mixed: Floats = np.zeros((len(degrees), len(degrees)))

    def add(self, index: Indices, scores: Floats) -> None:
        """Learn scores (n,) of candidate indices (n, L); :meth:`fit` makes them count."""
        if not len(scores):
            return
        if not self._count:
            self._shift = float(scores.mean())
        features, y = self._features(index), scores - self._shift
        self._gram += features.T @ features
        self._moment += features.T @ y
        self._square += float(y @ y)
        self._count += len(y)

    def fit(self, rng: np.random.Generator, explore: float = 1.0) -> None:
        """Draw the weights from their posterior (Thompson sampling), so that widths that may be good get their
        chance. ``explore`` scales its spread; 0 takes the likeliest weights.

        The penalty is chosen anew by cross-validation whenever the data has doubled.
        """
        if self._count >= 2 * self._tuned_at:
            self._tuned_at = max(self._count, 1)
            self._penalty = min(PENALTIES, key=lambda penalty: self._cross_validation(penalty)[0])
            self._noise = self._cross_validation(self._penalty)[1]
        lower = cholesky(self._gram + np.diag(self._penalty * self._rough), lower=True)
        drawn = solve_triangular(lower, self._moment, lower=True)
        drawn += explore * self._noise * rng.standard_normal(len(drawn))
        weights: Floats = solve_triangular(lower, drawn, lower=True, trans="T")
        self._constant = float(weights[0])
        self._main = weights[1 : len(self._main) + 1]
        self._mixed[self._left, self._right] = weights[len(self._main) + 1 :]

    def predict(self, index: Indices) -> Floats:
        """The predicted scores (n,) of candidate indices (n, L)."""
        main = self._effects(index)
        # As a quadratic form: five times faster than writing out the products.
        predicted: Floats = ((main @ self._mixed + self._main) * main).sum(axis=1)
        return predicted + self._constant + self._shift

    def _effects(self, index: Indices) -> Floats:
        return np.hstack([basis[index[:, i]] for i, basis in enumerate(self._bases)])

    def _features(self, index: Indices) -> Floats:
        main = self._effects(index)
        return np.hstack([np.ones((len(index), 1)), main, main[:, self._left] * main[:, self._right]])

    def _cross_validation(self, penalty: float) -> tuple[float, float]:
        """Generalised cross-validation, and the standard deviation of the noise it implies."""
        right = np.column_stack([self._gram, self._moment])
        solved = np.linalg.solve(self._gram + np.diag(penalty * self._rough), right)
        weights, freedom = solved[:, -1], float(np.trace(solved[:, :-1]))
        residual = max(float(self._square - 2 * weights @ self._moment + weights @ self._gram @ weights), 0.0)
        free = max(self._count - freedom, 1e-3)
        return residual / free**2, float(np.sqrt(residual / free))


def _polynomials(count: int) -> Floats:
    """Orthogonal polynomials of degree 1..3 on ``count`` equidistant points, of mean square one: (count, degree)."""
    powers = np.vander(np.linspace(-1, 1, count), min(DEGREE, count - 1) + 1, increasing=True)
    orthogonal: Floats = np.linalg.qr(powers)[0]
    return orthogonal[:, 1:] * np.sqrt(count)


def _products(starts: Indices, most: int) -> tuple[Indices, Indices]:
    """Columns of main effects to multiply, (p,) and (p,): of low degree and of near variables first."""
    sizes = np.diff(starts)
    found = [
        (max(a, b), j - i, int(starts[i]) + a, int(starts[j]) + b)
        for i, j in combinations(range(len(sizes)), 2)
        for a in range(sizes[i])
        for b in range(sizes[j])
    ]
    chosen = np.array(sorted(found)[: max(most, 0)], dtype=np.int64).reshape(-1, 4)
    return chosen[:, 2], chosen[:, 3]
