"""What widths cost, for whole populations at once.

FLOPs (multiply-accumulates of convolutions and linear layers) and parameters are exactly a
quadratic form of the widths; peak activation memory is the largest of many linear forms.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray


class Cost(Protocol):
    """Anything that costs a population: widths (n, L) to (n,)."""

    def __call__(self, widths: ArrayLike) -> NDArray[np.int64]: ...


@dataclass(frozen=True)
class QuadraticCost:
    """``q0 + q.c + c'Qc`` with q (L,) and Q (L, L) upper triangular.

    Exact: whole numbers below 2**53 are exact in float64, so one BLAS product and a rounding do.
    """

    q0: float
    q: NDArray[np.float64]
    Q: NDArray[np.float64]

    def __call__(self, widths: ArrayLike) -> NDArray[np.int64]:
        c = np.atleast_2d(np.asarray(widths, dtype=np.float64))
        return np.rint(self.q0 + ((c @ self.Q + self.q) * c).sum(axis=1)).astype(np.int64)


@dataclass(frozen=True)
class PeakCost:
    """``max_m (b_m + A_m.c)`` with A (M, L), b (M,): the peak of M moments of the forward pass."""

    b: NDArray[np.float64]
    A: NDArray[np.float64]

    def __call__(self, widths: ArrayLike) -> NDArray[np.int64]:
        c = np.atleast_2d(np.asarray(widths, dtype=np.float64))
        peak = np.full(len(c), -np.inf)
        # One moment at a time is ten times faster than an (n, M) array: no page faults.
        for slope, constant in zip(self.A, self.b, strict=True):
            np.maximum(peak, c @ slope + constant, out=peak)
        return np.rint(peak).astype(np.int64)
