"""The log-width model: a score grows with the logarithm of every width, each width at a rate of its own.

    score(c) = constant + sum_i gains_i * log2(c_i),   gains_i >= 0

Networks trained alone keep to it: fitted to the released Channel-Bench tables it ranks their networks almost as well as
the noise of their training allows. A supernet does not: its scores carry errors that a search then looks for and finds.
So the law is fitted to the scores of a search, and the widths it holds best are chosen instead of the best score.
Before any score, a width is worth what its layers are: one that many layers share, as the blocks of a stage do their
outputs, counts once for each. ``docs/results/search.md`` has what that gains.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.optimize import nnls

from bcnet.errors import BcnetError
from bcnet.search.constraints import Constraints
from bcnet.space.widths import Widths, WidthSpace

LEAST_SHRINK = 1.0
"""How much gains per layer that differ must prove at least: with widths drawn evenly, half of a difference is taken
back. More data of one supernet do not help against its errors, so there is a least."""
SHRINKS = LEAST_SHRINK * 2.0 ** np.arange(12)
STARTS = 8
MOST_MOVES = 1000
STEPS = 3
ENOUGH = 1e-9  # of all gains; less is rounding
AT_ONCE = 256  # moves whose costs are counted
MANY = 10_000  # moves to choose from

Floats = NDArray[np.float64]
Indices = NDArray[np.int64]


@dataclass(frozen=True)
class LogWidthModel:
    """What doubling each width adds to the score: ``gains`` (L,)."""

    gains: Floats
    constant: float

    @classmethod
    def fit(cls, widths: ArrayLike, scores: ArrayLike, layers: ArrayLike | None = None) -> LogWidthModel:
        """The law nearest to the scores (n,) of widths (n, L), with gains drawn towards the same gain per layer.

        ``layers`` (L,) counts those of each width, one where left out. Found is the least of
        ``|y - X g|^2 + s |X|^2 / L |g - m|^2`` over g >= 0, where X are centred logarithms and m is the multiple of
        ``layers`` nearest to g. Of :data:`SHRINKS`, s is the one under which the scores are likeliest, so a layer gains
        like any other where the scores tell little.
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
        """The law before any score, in which every layer gains alike."""
        return cls(space.layer_counts, 0.0)

    def to_dict(self) -> dict[str, Any]:
        return {"gains": self.gains.tolist(), "constant": self.constant}

    def predict(self, widths: ArrayLike) -> Floats:
        """The scores (n,) that the law holds for widths (n, L)."""
        logs = np.log2(np.asarray(widths, dtype=np.float64))
        return logs @ self.gains + self.constant

    def best(self, constraints: Constraints) -> Widths:
        """The widths (L,) the law holds best within all budgets, among candidates.

        One width is widened and another narrowed as long as that pays, from uniform scaling, the narrowest network and
        some random ones; the law being a sum of concave terms, the best of these ends is close to the best there is.
        """
        space = constraints.space
        drawn = constraints.sample(np.random.default_rng(0), STARTS)[0]
        starts = [constraints.uniform_index(), *space.encode(np.vstack([space.min, drawn]))]
        ends = [
            self._climb(constraints, start) for start in starts if constraints.feasible(space.decode(start)[None])[0]
        ]
        if not ends:
            raise BcnetError(f"no widths hold {' and '.join(b.text for b in constraints.budgets)}: raise a budget")
        widths = space.decode(np.array(ends))
        return widths[int(self.predict(widths).argmax())]

    def _climb(self, constraints: Constraints, index: Indices) -> Indices:
        """The candidate indices (L,) that no move from ``index`` improves."""
        values = [gain * np.log2(v.candidates) for gain, v in zip(self.gains, constraints.space.variables, strict=True)]
        least = ENOUGH * float(self.gains.sum())
        for _ in range(MOST_MOVES):
            better = _better(index, values, constraints, least)
            if better is None:
                break
            index = better
        return index


def _better(index: Indices, values: list[Floats], constraints: Constraints, least: float) -> Indices | None:
    """The best move from ``index`` (L,) that holds all budgets and gains more than ``least``; ``values`` are what the
    law gives for the candidates of each variable.

    Of many moves, one that is expected to hold the budgets comes first: it does, since a wider layer costs less where
    others are narrower, and so nearly all costs are left uncounted.
    """
    wider, narrower = _moves(index, np.array([len(value) for value in values]))
    both = (wider, narrower)
    gains, losses = (sum(v[rows[:, i]] - v[index[i]] for i, v in enumerate(values)) for rows in both)
    above, below = (constraints.excess(constraints.space.decode(rows)) for rows in both)
    gained = np.add.outer(gains, losses)
    apart = (wider != index).argmax(axis=1)[:, None] != (narrower != index).argmax(axis=1)
    apart[:, -1] = True  # where nothing is narrowed
    pays = apart & (gained > least)
    expected = (above[:, None] + below - below[-1]).max(axis=2)
    holds = expected <= (0.0 if pays.sum() > MANY else np.inf)
    for likely in (holds, ~holds):
        up, down = np.nonzero(pays & likely)
        order = np.argsort(-gained[up, down], kind="stable")
        for start in range(0, len(order), AT_ONCE):
            some = order[start : start + AT_ONCE]
            moved: Indices = wider[up[some]] + narrower[down[some]] - index
            allowed = constraints.feasible(constraints.space.decode(moved))
            if allowed.any():
                return moved[int(allowed.argmax())]
    return None


def _moves(index: Indices, counts: Indices) -> tuple[Indices, Indices]:
    """All ways to widen one variable by up to ``STEPS`` candidates, and all ways to narrow one, the last by none:
    candidate indices (u, L) and (d, L)."""
    steps = np.concatenate([step * np.eye(len(index), dtype=np.int64) for step in range(1, STEPS + 1)])
    wider, narrower = index + steps, index - steps
    return wider[(wider < counts).all(axis=1)], np.vstack([narrower[(narrower >= 0).all(axis=1)], index])


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
