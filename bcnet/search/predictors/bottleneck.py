"""The bottleneck model: every layer costs a network some loss, the more the narrower it is.

    log loss(c) = constant + sum_i  u_i (m_i / c_i) + v_i (m_i / c_i)^3,    u_i, v_i >= 0

Here ``m`` is the best configuration known. The model predicts the scores of unseen configurations of a network that
inherits trained weights far better than one that is linear in the logarithms of widths, which cannot say that a single
narrow layer spoils a network (docs/results/bottleneck.md). Before any score, ``u`` is proportional to what the layers
cost, so that uniform scaling is the optimum; scores pull it away from there.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.optimize import nnls

from bcnet.search.constraints import Constraints
from bcnet.search.predictors.climb import climb_sum
from bcnet.space.widths import Floats, Widths

POWERS = (1.0, 3.0)
PULL = 0.005
"""The ridge that draws ``u`` and ``v`` to what they were before any score."""
FADES = 0.6
"""The root mean square distance from ``m``, in logarithms of widths, at which a score counts exp(-1/2) as much."""
SCALED = 1.3
"""The factor by which each width is scaled to see what it costs."""
LARGEST = 1e9
"""What scores are scaled down to where they are larger, so that their squares are numbers."""
ENOUGH = 1e-6


def costs_of_widening(constraints: Constraints) -> Floats:
    """The share (L,) of each variable in the cost of uniform scaling, under the budget in which it weighs most."""
    uniform = constraints.uniform()
    wider = np.maximum(np.round(uniform * SCALED), uniform + 1).astype(np.int64)
    rows = np.where(np.eye(len(uniform), dtype=bool), wider, uniform)
    more = (constraints.excess(rows) - constraints.excess(uniform[None])).max(axis=1)
    share: Floats = np.maximum(more / np.log(wider / uniform), 1e-6)
    return share / share.sum()


def as_losses(scores: Floats) -> Floats:
    """What the model explains, lower is better: the logarithms of losses, where scores (n,) are negative losses."""
    return np.log(-scores) if (scores < 0).all() else -scores


@dataclass(frozen=True)
class BottleneckModel:
    """``weights`` (2, L) are u and v, ``middle`` (L,) the logarithms of m; ``best_score`` is that of m, and ``losses``
    says whether scores are negative losses."""

    weights: Floats
    middle: Floats
    best_score: float
    losses: bool

    @classmethod
    def fit(cls, widths: Widths, scores: Floats, share: Floats, counts: Floats | None = None) -> BottleneckModel:
        """The model nearest to the scores (n,) of configurations (n, L). The best counts most, and each as often as
        ``counts`` (n,) says; ``share`` (L,) is that of :func:`costs_of_widening`."""
        logs, y = np.log(widths), as_losses(scores)
        unit = max(1.0, float(np.abs(y).max()) / LARGEST)
        y = y / unit
        middle, layers = logs[int(y.argmin())], logs.shape[1]
        importance = np.exp(-((logs - middle) ** 2).mean(axis=1) / (2 * FADES**2))
        importance = importance if counts is None else importance * counts
        terms = _terms(logs - middle)
        before = np.concatenate([_scale(terms[:, :layers] @ share, y, importance) * share, np.zeros(layers)])
        root = np.sqrt(importance)[:, None]
        constant = np.concatenate([root, np.zeros((2 * layers, 1))])
        rows = np.concatenate([terms * root, np.sqrt(PULL) * np.eye(2 * layers)])
        asked = np.concatenate([y * root[:, 0], np.sqrt(PULL) * before])
        weights = unit * nnls(np.hstack([rows, constant, -constant]), asked)[0][: 2 * layers]
        return cls(weights.reshape(2, layers), middle, float(np.max(scores)), bool((np.asarray(scores) < 0).all()))

    def predict(self, widths: Widths) -> Floats:
        """What configurations (n, L) are expected to score more than m does (n,), as :func:`as_losses` measures it."""
        found: Floats = self.weights.sum() - _terms(np.log(widths) - self.middle) @ self.weights.ravel()
        return found

    def score(self, widths: Widths) -> float:
        """The score that a configuration (L,) is expected to have."""
        more = float(self.predict(widths[None])[0])
        return self.best_score * float(np.exp(-more)) if self.losses else self.best_score + more

    def best(self, constraints: Constraints, start: Widths, reach: float) -> Widths:
        """The configuration (L,) that no move improves, climbing from the candidates ``start`` (L,); the logarithm of
        no width goes further than ``reach`` from there, or than the candidate next to it."""
        space = constraints.space
        index = space.encode(start[None])[0]
        values = []
        for i, variable in enumerate(space.variables):
            logs = np.log(variable.candidates)
            worth = -sum(self.weights[k, i] * np.exp(-p * (logs - self.middle[i])) for k, p in enumerate(POWERS))
            away = logs - logs[index[i]]
            beyond = (np.abs(away) > reach) & (np.abs(np.arange(len(away)) - np.abs(away).argmin()) > 1)
            values.append(np.where(beyond, -np.inf, worth))
        widths: Widths = space.decode(climb_sum(values, constraints, index, ENOUGH)[None])[0]
        return widths


def _terms(away: Floats) -> Floats:
    """The inverse powers of relative widths, whose logarithms are ``away`` (n, L): (n, 2 L)."""
    return np.concatenate([np.exp(-power * away) for power in POWERS], axis=1)


def _scale(by_cost: Floats, y: Floats, importance: Floats) -> float:
    """By how much y (n,) grows with what the layers' costs say of it (n,): at least a quarter of what would explain all
    that y varies."""
    x, z = (v - np.average(v, weights=importance) for v in (by_cost, y))
    varied, spread = float(importance @ x**2), float(np.sqrt(importance @ z**2))
    if varied <= 0:
        return 1.0
    return max(float(importance @ (x * z)) / varied, spread / np.sqrt(varied) / 4)
