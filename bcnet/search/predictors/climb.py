"""Hill climbing on a prediction, within the budgets, where a step costs next to nothing.

Budgets leave no room for widening alone, so a move widens one variable and narrows another. A surrogate can only be
sampled: :func:`climb` tries random moves from many starts at once. A sum of one term per variable tells the gain of
every move in advance: :func:`climb_sum` always takes the best.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from bcnet.search.constraints import Constraints
from bcnet.search.predictors.surrogate import Surrogate
from bcnet.space.widths import Floats, Indices

ROUNDS = 10
MOVES = 50
KEPT = 5

MOST_MOVES = 1000
STEPS = 3
AT_ONCE = 256  # moves whose costs are counted
MANY = 10_000  # moves to choose from


def climb(
    surrogate: Surrogate, constraints: Constraints, starts: Indices, caps: Floats, rng: np.random.Generator
) -> Indices:
    """Promising configurations met when every start (n, L) climbs: candidate indices (m, L), all feasible.

    A move widens one variable by one or two candidates and narrows another by up to two. Each of ``ROUNDS`` tries
    ``MOVES`` random moves, returns the best ``KEPT`` of them, and takes the best where it improves. ``caps`` (n,)
    bound the relative excess over the first budget: 0 lets a start use all of it.
    """
    counts = np.array([len(v.candidates) for v in constraints.space.variables])
    current, guess = starts, surrogate.predict(starts)
    rows = np.arange(len(starts))
    met = [starts[:0]]
    for _ in range(ROUNDS if len(starts) else 0):
        moved = _random_moves(current, counts, rng)
        flat = moved.reshape(-1, len(counts))
        excess = constraints.excess(constraints.space.decode(flat))
        excess[:, 0] -= np.repeat(caps, MOVES)
        guesses = _predicted(surrogate, flat, np.all(excess <= 0, axis=1)).reshape(-1, MOVES)
        order = np.argpartition(-guesses, KEPT, axis=1)[:, :KEPT]
        met.append(moved[rows[:, None], order][np.isfinite(guesses[rows[:, None], order])])
        best = guesses.argmax(axis=1)
        better = guesses[rows, best] > guess
        current = np.where(better[:, None], moved[rows, best], current)
        guess = np.where(better, guesses[rows, best], guess)
    return np.vstack(met)


def _predicted(surrogate: Surrogate, index: Indices, allowed: NDArray[np.bool_]) -> Floats:
    """The predicted scores (n,) of candidate indices (n, L), minus infinity where they are not allowed."""
    guesses = np.full(len(index), -np.inf)
    guesses[allowed] = surrogate.predict(index[allowed])
    return guesses


def _random_moves(index: Indices, counts: Indices, rng: np.random.Generator) -> Indices:
    """Random moves from candidate indices (n, L): (n, MOVES, L)."""
    n, variables = index.shape
    moved = np.repeat(index[:, None], MOVES, axis=1)
    row, move = np.ogrid[:n, :MOVES]
    moved[row, move, rng.integers(0, variables, (n, MOVES))] += rng.integers(1, 3, (n, MOVES))
    moved[row, move, rng.integers(0, variables, (n, MOVES))] -= rng.integers(0, 3, (n, MOVES))
    return np.clip(moved, 0, counts - 1)


def climb_sum(values: list[Floats], constraints: Constraints, index: Indices, least: float) -> Indices:
    """The candidate indices (L,) that no move from ``index`` improves, where ``values`` has what every candidate of
    each variable (K_l,) adds; ``least`` is the gain below which a move does not count."""
    for _ in range(MOST_MOVES):
        better = _better(index, values, constraints, least)
        if better is None:
            break
        index = better
    return index


def _better(index: Indices, values: list[Floats], constraints: Constraints, least: float) -> Indices | None:
    """The best move from ``index`` (L,) that holds all budgets and gains more than ``least``.

    Of many moves, one that is expected to hold the budgets comes first: it does, since a wider layer costs less where
    others are narrower, and so nearly all costs are left uncounted.
    """
    wider, narrower = _all_moves(index, np.array([len(value) for value in values]))
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


def _all_moves(index: Indices, counts: Indices) -> tuple[Indices, Indices]:
    """All ways to widen one variable by up to ``STEPS`` candidates, and all ways to narrow one, the last by none:
    candidate indices (u, L) and (d, L)."""
    steps = np.concatenate([step * np.eye(len(index), dtype=np.int64) for step in range(1, STEPS + 1)])
    wider, narrower = index + steps, index - steps
    return wider[(wider < counts).all(axis=1)], np.vstack([narrower[(narrower >= 0).all(axis=1)], index])
