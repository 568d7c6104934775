"""Hill climbing on a guess: widths are improved step by step where a step costs next to nothing."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from bcnet.search.constraints import Constraints
from bcnet.search.predictors.surrogate import Surrogate

ROUNDS = 10
MOVES = 50
KEPT = 5

Indices = NDArray[np.int64]


def climb(
    surrogate: Surrogate, constraints: Constraints, starts: Indices, caps: NDArray[np.float64], rng: np.random.Generator
) -> Indices:
    """Promising widths met when every start (n, L) climbs to higher guesses: candidate indices (m, L), all feasible.

    A move widens one variable by one or two candidates and narrows another by up to two, as budgets
    leave no room for widening alone. Each of ``ROUNDS`` tries ``MOVES`` random moves, returns the best
    ``KEPT`` of them, and takes the best where it improves. ``caps`` (n,) bound the relative excess over
    the first budget: 0 lets a start use all of it.
    """
    counts = np.array([len(v.candidates) for v in constraints.space.variables])
    current, guess = starts, surrogate.predict(starts)
    rows = np.arange(len(starts))
    met = [starts[:0]]
    for _ in range(ROUNDS if len(starts) else 0):
        moved = _moves(current, counts, rng)
        flat = moved.reshape(-1, len(counts))
        excess = constraints.excess(constraints.space.decode(flat))
        excess[:, 0] -= np.repeat(caps, MOVES)
        guesses = _guesses(surrogate, flat, np.all(excess <= 0, axis=1)).reshape(-1, MOVES)
        order = np.argpartition(-guesses, KEPT, axis=1)[:, :KEPT]
        met.append(moved[rows[:, None], order][np.isfinite(guesses[rows[:, None], order])])
        best = guesses.argmax(axis=1)
        better = guesses[rows, best] > guess
        current = np.where(better[:, None], moved[rows, best], current)
        guess = np.where(better, guesses[rows, best], guess)
    return np.vstack(met)


def _guesses(surrogate: Surrogate, index: Indices, allowed: NDArray[np.bool_]) -> NDArray[np.float64]:
    """The guessed scores (n,) of candidate indices (n, L), minus infinity where they are not allowed."""
    guesses = np.full(len(index), -np.inf)
    guesses[allowed] = surrogate.predict(index[allowed])
    return guesses


def _moves(index: Indices, counts: Indices, rng: np.random.Generator) -> Indices:
    """Random moves from candidate indices (n, L): (n, MOVES, L)."""
    n, variables = index.shape
    moved = np.repeat(index[:, None], MOVES, axis=1)
    row, move = np.ogrid[:n, :MOVES]
    moved[row, move, rng.integers(0, variables, (n, MOVES))] += rng.integers(1, 3, (n, MOVES))
    moved[row, move, rng.integers(0, variables, (n, MOVES))] -= rng.integers(0, 3, (n, MOVES))
    return np.clip(moved, 0, counts - 1)
