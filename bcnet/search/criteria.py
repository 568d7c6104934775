"""Widths allotted by the importance of channels, as pruning does it: rivals of a search, and a start for one.

``local`` keeps the same share of every layer. ``global`` keeps whatever lies above one threshold in the whole network.
``isomorphic`` compares channels only among layers of a kind, and keeps the same share of every kind: layers that do
different things have weights of different sizes for reasons other than their worth. Thresholds are the lowest that all
budgets allow, and what room is left goes to the next channels that still fit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from bcnet.errors import BcnetError, did_you_mean
from bcnet.search.constraints import Constraints
from bcnet.space.importance import CRITERIA
from bcnet.space.widths import Widths, WidthSpace

Scope = Literal["local", "global", "isomorphic"]


class Allotment(NamedTuple):
    """How widths are allotted: by which criterion, compared in which scope."""

    criterion: str
    scope: Scope


_SHARED: tuple[Scope, ...] = ("global", "isomorphic")
ALLOTMENTS: dict[str, Allotment] = {"uniform": Allotment("l2", "local")} | {
    f"{criterion}-{scope}": Allotment(criterion, scope) for scope in _SHARED for criterion in CRITERIA
}


def find_allotment(name: str) -> Allotment:
    """The method a recipe calls ``name``, or a :class:`BcnetError` that lists them."""
    if name not in ALLOTMENTS:
        guess = did_you_mean(name, ALLOTMENTS) or f"there are {', '.join(ALLOTMENTS)}"
        raise BcnetError(f"unknown method {name!r:.40}: {guess}")
    return ALLOTMENTS[name]


def allot(
    constraints: Constraints, scores: Sequence[ArrayLike], scope: Scope = "global", kinds: Sequence[int] | None = None
) -> Widths:
    """Widths (L,) within all budgets. ``scores`` has an array for each variable over its units, comparable between
    variables (:func:`bcnet.space.importance.importance`); ``local`` needs none of them. ``kinds`` has a number for
    each variable, equal for those that ``isomorphic`` compares (:func:`bcnet.space.importance.kinds`).

    No variable falls below its smallest candidate, and widths keep the steps of the space. Impossible budgets are a
    :class:`BcnetError`.
    """
    constraints.check()
    if scope == "local":
        return constraints.uniform()
    if scope not in _SHARED:
        raise BcnetError(f"the scope is {scope!r:.40}, but it must be local, {' or '.join(_SHARED)}")
    space = constraints.space
    compared = [0] * len(space) if scope == "global" else list(kinds or ())
    if len(compared) != len(space):
        raise BcnetError(f"kinds has {len(compared)} numbers, but this space has {len(space)} width variables")
    variables, sizes = _blocks(space, scores, compared)
    low, high = 0, len(variables)  # the first `low` blocks fit together
    while low < high:
        middle = (low + high + 1) // 2
        if _fits(constraints, _widths(space, variables[:middle], sizes[:middle])):
            low = middle
        else:
            high = middle - 1
    return _filled(constraints, _widths(space, variables[:low], sizes[:low]), variables[low:], sizes[low:])


def _blocks(space: WidthSpace, scores: Sequence[ArrayLike], kinds: Sequence[int]) -> tuple[Widths, Widths]:
    """Steps of width above the smallest network, the first to stay first: their variables (n,) and channels (n,).

    A step is as important as its units on average; units of a variable come in the order of their importance, so
    its steps do too. Equal ones go to the variable that has the smaller share of its width. Steps of different kinds
    are in the order of the share of its channels that each kind has once it has them.
    """
    if len(scores) != len(space):
        raise BcnetError(f"scores has {len(scores)} arrays, but this space has {len(space)} width variables")
    rows: dict[int, list[tuple[float, float, int, int]]] = {kind: [] for kind in kinds}
    for number, (v, step, given) in enumerate(zip(space.variables, space.steps.tolist(), scores, strict=True)):
        row = np.asarray(given, dtype=np.float64)
        if row.shape != (v.max // v.unit,) or not np.isfinite(row).all():
            wanted = f"{v.max // v.unit} finite numbers, one for each of its units"
            raise BcnetError(f"the scores of variable {v.name!r} must be {wanted}")
        ranked = np.sort(row)[::-1]
        starts = range(v.base // v.unit, len(ranked), step // v.unit)
        blocks = [ranked[start : start + step // v.unit] for start in starts]
        rows[kinds[number]] += [
            (-float(block.mean()), i / len(blocks), number, len(block) * v.unit) for i, block in enumerate(blocks)
        ]
    ordered: list[tuple[float, int, int]] = []
    for kind, of_kind in rows.items():
        members = [v for v, own in zip(space.variables, kinds, strict=True) if own == kind]
        kept, whole = sum(v.base for v in members), sum(v.max for v in members)
        for _, _, number, size in sorted(of_kind):
            kept += size
            ordered.append((kept / whole, number, size))
    ordered.sort(key=lambda block: block[0])
    table = np.array([(number, size) for _, number, size in ordered], dtype=np.int64).reshape(-1, 2)
    return table[:, 0], table[:, 1]


def _widths(space: WidthSpace, variables: Widths, sizes: Widths) -> Widths:
    return space.min + np.bincount(variables, sizes, len(space)).astype(np.int64)


def _fits(constraints: Constraints, widths: Widths) -> bool:
    return bool(constraints.feasible(widths[None])[0])


def _filled(constraints: Constraints, widths: Widths, variables: Widths, sizes: Widths) -> Widths:
    """Widths with those of the further blocks that still fit, in their order; once one does not, no later one of its
    variable would."""
    full: set[int] = set()
    for variable, size in zip(variables.tolist(), sizes.tolist(), strict=True):
        if variable in full:
            continue
        wider = widths.copy()
        wider[variable] += size
        if _fits(constraints, wider):
            widths = wider
        else:
            full.add(variable)
        if len(full) == len(widths):
            break
    return widths
