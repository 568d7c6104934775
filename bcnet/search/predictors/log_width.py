"""The log-width model (experimental): a score grows with the logarithm of every width, each at a rate of its own.

    score(c) = constant + sum_i gains_i * log2(c_i),   gains_i >= 0

Networks trained alone keep to it: fitted to the released Channel-Bench tables it ranks their networks almost as well as
the noise of their training allows. A supernet does not: its scores carry errors that a search then looks for and finds.
So the model is fitted to all scores of a search, and its favourite is chosen instead of the best score. Before any
score, a width is worth as much as it has layers: one that the blocks of a stage share counts once for each of them.
``docs/results/search.md`` has what that gains on the tables the model was made with, and
``docs/results/log-width-trial.md`` a trial in two new spaces, in which it did not win: so it is called experimental.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike
from scipy.optimize import nnls

from bcnet.errors import BcnetError
from bcnet.search.constraints import Constraints
from bcnet.search.predictors.climb import climb_sum
from bcnet.space.widths import Floats, Widths, WidthSpace

LEAST_SHRINK = 1.0
"""The weakest pull towards equal gains per layer: with widths drawn evenly it takes back half of a difference. More
scores of one supernet do not average out its errors, so there is a minimum."""
SHRINKS = LEAST_SHRINK * 2.0 ** np.arange(12)
STARTS = 8
ENOUGH = 1e-9  # of all gains; less is rounding


@dataclass(frozen=True)
class LogWidthModel:
    """What doubling each width adds to the score: ``gains`` (L,)."""

    gains: Floats
    constant: float

    @classmethod
    def fit(cls, widths: ArrayLike, scores: ArrayLike, layers: ArrayLike | None = None) -> LogWidthModel:
        """The model nearest to the scores (n,) of configurations (n, L), gains shrunk towards equal ones per layer.

        ``layers`` (L,) counts the layers of each width, one where left out. The fit minimises
        ``|y - X g|^2 + s |X|^2 / L |g - m|^2`` over g >= 0, where X holds centred logarithms and m is the multiple of
        ``layers`` nearest to g. Of :data:`SHRINKS`, s is the one under which the scores are likeliest: where they say
        little, all layers gain alike.
        """
        logs, given = np.log2(np.asarray(widths, dtype=np.float64)), np.asarray(scores, dtype=np.float64)
        middle = logs.mean(axis=0)
        x, y = logs - middle, given - given.mean()
        count = x.shape[1]
        along = np.ones(count) if layers is None else np.asarray(layers, dtype=np.float64)
        apart = np.sqrt(float((x**2).sum()) / count) * (np.eye(count) - np.outer(along, along) / (along @ along))
        alike = np.sqrt(_likeliest(x, y, apart)) * apart
        gains: Floats = nnls(np.vstack([x, alike]), np.concatenate([y, np.zeros(count)]))[0]
        return cls(gains, float(given.mean() - middle @ gains))

    @classmethod
    def balanced(cls, space: WidthSpace) -> LogWidthModel:
        """The model before any score, in which every layer gains alike."""
        return cls(space.layer_counts, 0.0)

    def to_dict(self) -> dict[str, Any]:
        return {"gains": self.gains.tolist(), "constant": self.constant}

    def predict(self, widths: ArrayLike) -> Floats:
        """The scores (n,) that the model predicts for configurations (n, L)."""
        logs = np.log2(np.asarray(widths, dtype=np.float64))
        return logs @ self.gains + self.constant

    def best(self, constraints: Constraints) -> Widths:
        """The configuration (L,) with the highest prediction within all budgets, by hill climbing.

        It climbs from uniform scaling, the narrowest network and some random ones; the model being a sum of concave
        terms, the best of these ends is close to the best there is.
        """
        space = constraints.space
        drawn = constraints.sample(np.random.default_rng(0), STARTS)[0]
        starts = [constraints.uniform_index(), *space.encode(np.vstack([space.min, drawn]))]
        values = [gain * np.log2(v.candidates) for gain, v in zip(self.gains, space.variables, strict=True)]
        least = ENOUGH * float(self.gains.sum())
        feasible = constraints.feasible(space.decode(np.array(starts)))
        ends = [climb_sum(values, constraints, starts[i], least) for i in np.flatnonzero(feasible)]
        if not ends:
            raise BcnetError(
                f"no configuration holds {' and '.join(b.text for b in constraints.budgets)}: raise a budget"
            )
        widths = space.decode(np.array(ends))
        return widths[int(self.predict(widths).argmax())]


def _likeliest(x: Floats, y: Floats, apart: Floats) -> float:
    """The factor s of ``SHRINKS`` under which y (n,) is likeliest (REML), where y = x g + noise and
    ``apart @ g`` (L,) is normal with the variance of the noise over s."""
    free = len(y) - 2  # less the constant and the gain per layer
    if free <= 0 or not y.any():
        return float(SHRINKS[-1])
    gram, moment, penalty = x.T @ x, x.T @ y, apart.T @ apart
    exact = 1e-9 * float(y @ y)

    def likelihood(s: float) -> float:
        whole = gram + s * penalty
        missed = max(float(y @ y - moment @ np.linalg.lstsq(whole, moment, rcond=None)[0]), exact)
        return float((x.shape[1] - 1) * np.log(s) - free * np.log(missed) - np.linalg.slogdet(whole)[1])

    return float(max(SHRINKS, key=likelihood))
