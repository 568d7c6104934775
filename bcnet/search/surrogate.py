"""A cheap guess of the score of any widths, learnt from the widths scored so far.

Ridge regression on main effects of every variable (orthogonal polynomials of its candidate's index, up
to cubic) and on products of two variables' polynomials. With four candidates the main effects are
complete: the guess is then exactly an additive plus pairwise model. Sums over the data are kept, so n
scores cost O(n p^2) once and a fit O(p^3), whatever n is.
"""

from __future__ import annotations

from itertools import combinations

import numpy as np
from numpy.typing import NDArray

MOST_FEATURES = 800
DEGREE = 3
PENALTIES = (0.1, 1.0, 10.0, 100.0)


class Surrogate:
    """Scores of candidate indices (n, L), guessed; ``counts`` (L,) are the candidates of each variable."""

    def __init__(self, counts: NDArray[np.int64]):
        self._bases = [_polynomials(int(count)) for count in counts]
        starts = np.cumsum([0, *(basis.shape[1] for basis in self._bases)])
        degrees = np.concatenate([np.arange(1, basis.shape[1] + 1) for basis in self._bases])
        self._left, self._right = _products(starts, MOST_FEATURES - int(starts[-1]) - 1)
        # Rough effects and effects of two variables need more evidence; the constant needs none.
        products = 2 * degrees[self._left] * degrees[self._right]
        self._rough = np.concatenate([[0], degrees, products]).astype(np.float64)
        self._gram = np.zeros((len(self._rough), len(self._rough)))
        self._moment = np.zeros(len(self._rough))
        self._square = 0.0
        self._count = 0
        self._tuned_at = 0
        self._penalty = 1.0
        self._shift: float | None = None
        self._weights = np.zeros(len(self._rough))

    def add(self, index: NDArray[np.int64], scores: NDArray[np.float64]) -> None:
        """Learn scores (n,) of candidate indices (n, L); :meth:`fit` makes them count."""
        if not len(scores):
            return
        if self._shift is None:
            self._shift = float(scores.mean())
        features, y = self._features(index), scores - self._shift
        self._gram += features.T @ features
        self._moment += features.T @ y
        self._square += float(y @ y)
        self._count += len(y)

    def fit(self) -> None:
        """Solve for the weights; the penalty is chosen anew by cross-validation whenever the data has doubled."""
        if self._count >= 2 * self._tuned_at:
            self._tuned_at = self._count
            self._penalty = min(PENALTIES, key=self._cross_validation)
        self._weights = np.linalg.solve(self._regularised(self._penalty), self._moment)

    def predict(self, index: NDArray[np.int64]) -> NDArray[np.float64]:
        """The guessed scores (n,) of candidate indices (n, L)."""
        return self._features(index) @ self._weights + (self._shift or 0.0)

    def _features(self, index: NDArray[np.int64]) -> NDArray[np.float64]:
        main = np.hstack([basis[index[:, i]] for i, basis in enumerate(self._bases)])
        return np.hstack([np.ones((len(index), 1)), main, main[:, self._left] * main[:, self._right]])

    def _regularised(self, penalty: float) -> NDArray[np.float64]:
        # A hair for the constant, so that the matrix is never singular.
        return self._gram + np.diag(penalty * self._rough + 1e-6)

    def _cross_validation(self, penalty: float) -> float:
        """Generalised cross-validation: the squared error of leaving one out, for all at once."""
        solved = np.linalg.solve(self._regularised(penalty), np.column_stack([self._gram, self._moment]))
        weights, freedom = solved[:, -1], float(np.trace(solved[:, :-1]))
        residual = self._square - 2 * weights @ self._moment + weights @ self._gram @ weights
        return float(max(residual, 0.0) / max(self._count - freedom, 1e-3) ** 2)


def _polynomials(count: int) -> NDArray[np.float64]:
    """Orthogonal polynomials of degree 1..3 on ``count`` equidistant points, of mean square one: (count, degree)."""
    powers = np.vander(np.linspace(-1, 1, count), min(DEGREE, count - 1) + 1, increasing=True)
    orthogonal = np.linalg.qr(powers)[0]
    return orthogonal[:, 1:] * np.sqrt(count)


def _products(starts: NDArray[np.int64], most: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Columns of main effects to multiply, (p,) and (p,): of low degree and of near variables first."""
    sizes = np.diff(starts)
    found = [
        (max(a, b), j - i, starts[i] + a, starts[j] + b)
        for i, j in combinations(range(len(sizes)), 2)
        for a in range(sizes[i])
        for b in range(sizes[j])
    ]
    found = sorted(found)[: max(most, 0)]
    left, right = ([int(row[k]) for row in found] for k in (2, 3))
    return np.array(left, dtype=np.int64), np.array(right, dtype=np.int64)
