"""How well scores rank networks: Pearson, Spearman and Kendall correlation, and how high they can get."""

from __future__ import annotations

import math
from typing import TypedDict

import numpy as np
from numpy.typing import ArrayLike

from bcnet.errors import BcnetError
from bcnet.space.widths import Floats

DRAWS = 16
"""How often noise is drawn to find out what a perfect predictor would reach."""


class Correlations(TypedDict):
    """All three coefficients, each in -1..1."""

    pearson: float
    spearman: float
    kendall: float


def pearson(x: ArrayLike, y: ArrayLike) -> float:
    """Linear correlation of x (n,) and y (n,)."""
    return _correlation("pearsonr", x, y)


def spearman(x: ArrayLike, y: ArrayLike) -> float:
    """Pearson correlation of the ranks of x (n,) and y (n,); ties share their mean rank."""
    return _correlation("spearmanr", x, y)


def kendall(x: ArrayLike, y: ArrayLike) -> float:
    """Kendall's tau-b of x (n,) and y (n,), in O(n log n): 3 ms for 16,384 points."""
    return _correlation("kendalltau", x, y)


def correlations(x: ArrayLike, y: ArrayLike) -> Correlations:
    """All three correlations of x (n,) and y (n,)."""
    return {"pearson": pearson(x, y), "spearman": spearman(x, y), "kendall": kendall(x, y)}


def reliability(acc: ArrayLike) -> float:
    """The share of the variance of the means of ``acc`` (n, S) that is not seed noise, in 0..1.

    The variance of the S-seed means is that of the true accuracies plus ``sigma^2 / S``, with sigma^2
    the variance between seeds, pooled over all networks.
    """
    runs = _runs(acc)
    noise = runs.var(axis=1, ddof=1).mean() / runs.shape[1]
    spread = runs.mean(axis=1).var(ddof=1)
    if spread == 0:
        raise BcnetError("all networks have the same mean accuracy, so there is nothing to rank")
    return float(max(0.0, 1 - noise / spread))


def noise_ceiling(acc: ArrayLike) -> Correlations:
    """The correlations a perfect predictor would reach with the means of ``acc`` (n, S), S >= 2 seeds.

    A predictor that knows the true accuracies t still meets means m = t + e with seed noise e of
    variance ``sigma^2 / S``. The means are spread wider than t by just that noise, so they stand in
    for t after they are shrunk to the variance of t (times the root of :func:`reliability`); then fresh
    Gaussian noise is added :data:`DRAWS` times, and the correlations of t and t + e are averaged. Sigma is
    pooled over all networks: the deviation of a few seeds of one network is itself so noisy that using
    it instead would overstate Kendall's tau by 0.01. On simulated tables of known accuracies, as large and
    as noisy as the released ones, this finds the true ceiling to within 0.004.
    """
    runs = _runs(acc)
    share = reliability(runs)
    if share == 0:
        return {"pearson": 0.0, "spearman": 0.0, "kendall": 0.0}
    means = runs.mean(axis=1)
    truth = means.mean() + math.sqrt(share) * (means - means.mean())
    sigma = math.sqrt(runs.var(axis=1, ddof=1).mean() / runs.shape[1])
    rng = np.random.default_rng(0)
    drawn = [correlations(truth, truth + sigma * rng.standard_normal(len(truth))) for _ in range(DRAWS)]
    return {
        "pearson": float(np.mean([d["pearson"] for d in drawn])),
        "spearman": float(np.mean([d["spearman"] for d in drawn])),
        "kendall": float(np.mean([d["kendall"] for d in drawn])),
    }


def _runs(acc: ArrayLike) -> Floats:
    runs = np.asarray(acc, dtype=np.float64)
    if runs.ndim != 2 or runs.shape[0] < 2 or runs.shape[1] < 2:
        raise BcnetError(
            f"seed noise needs at least 2 networks of at least 2 seeds each, got accuracies of shape {runs.shape}"
        )
    return runs


def _correlation(function: str, x: ArrayLike, y: ArrayLike) -> float:
    from scipy import stats  # half a second to import, and a table can be read without it

    a, b = np.asarray(x, dtype=np.float64), np.asarray(y, dtype=np.float64)
    if a.ndim != 1 or a.shape != b.shape or len(a) < 2:
        raise BcnetError(
            f"a correlation needs two equally long rows of at least 2 numbers, got shapes {a.shape} and {b.shape}"
        )
    if not (np.isfinite(a).all() and np.isfinite(b).all()):
        raise BcnetError("a correlation needs finite numbers, but some are NaN or infinite")
    if (a == a[0]).all() or (b == b[0]).all():
        raise BcnetError("a correlation needs numbers that differ, but one row is constant")
    return float(getattr(stats, function)(a, b).statistic)
