"""Widths allotted by the importance of channels, as pruning does it: rivals of a search, and a start for one.

``local`` keeps the same share of every layer. ``global`` keeps whatever lies above one threshold in the whole network;
the threshold is the lowest that all budgets allow, and what room is left goes to the next channels that still fit.
"""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from bcnet.errors import BcnetError
from bcnet.search.constraints import Constraints
from bcnet.space.importance import CRITERIA
from bcnet.space.widths import Widths, WidthSpace

Scope = Literal["local", "global"]


class Method(NamedTuple):
    """How a rival cuts a network: by which criterion, and in which scope it allots widths."""

    criterion: str
    scope: Scope


METHODS: dict[str, Method] = {"uniform": Method("l2", "local")} | {f"{c}-global": Method(c, "global") for c in CRITERIA}


def find_method(name: str) -> Method:
    """The method a recipe calls ``name``, or a :class:`BcnetError` that lists them."""
    if name not in METHODS:
        close = get_close_matches(name, METHODS, 1)
        hint = f" (did you mean {close[0]!r}?)" if close else ""
        raise BcnetError(f"unknown method {name!r:.40}{hint}: there are {', '.join(METHODS)}")
    return METHODS[name]


def allot(constraints: Constraints, scores: Sequence[ArrayLike], scope: Scope = "global") -> Widths:
    """Widths (L,) within all budgets. ``scores`` has an array for each variable over its units, comparable between
    variables (:func:`bcnet.space.importance.importance`); ``local`` needs none of them.

    No variable falls below its smallest candidate, and widths keep the steps of the space. Impossible budgets are a
    :class:`BcnetError`.
    """
    constraints.check()
    if scope == "local":
        return constraints.uniform()
    if scope != "global":
        raise BcnetError(f"the scope is {scope!r:.40}, but it must be local or global")
    space = constraints.space
    variables, sizes = _blocks(space, scores)
    low, high = 0, len(variables)  # the first `low` blocks fit together
    while low < high:
        middle = (low + high + 1) // 2
        if _fits(constraints, _widths(space, variables[:middle], sizes[:middle])):
            low = middle
        else:
            high = middle - 1
    return _filled(constraints, _widths(space, variables[:low], sizes[:low]), variables[low:], sizes[low:])


def _blocks(space: WidthSpace, scores: Sequence[ArrayLike]) -> tuple[Widths, Widths]:
    """Steps of width above the smallest network, the most important first: their variables (n,) and channels (n,).

    A step is as important as its units on average; units of a variable come in the order of their importance, so
    its steps do too. Equal ones go to the variable that has the smaller share of its width.
    """
    if len(scores) != len(space):
        raise BcnetError(f"scores has {len(scores)} arrays, but this space has {len(space)} width variables")
    rows: list[tuple[float, float, int, int]] = []
    for number, (v, step, given) in enumerate(zip(space.variables, space.steps.tolist(), scores, strict=True)):
        row = np.asarray(given, dtype=np.float64)
        if row.shape != (v.max // v.unit,) or not np.isfinite(row).all():
            wanted = f"{v.max // v.unit} finite numbers, one for each of its units"
            raise BcnetError(f"the scores of variable {v.name!r} must be {wanted}")
        ranked = np.sort(row)[::-1]
        starts = range(v.base // v.unit, len(ranked), step // v.unit)
        blocks = [ranked[start : start + step // v.unit] for start in starts]
        rows += [(-float(block.mean()), i / len(blocks), number, len(block) * v.unit) for i, block in enumerate(blocks)]
    rows.sort()
    table = np.array([(number, size) for _, _, number, size in rows], dtype=np.int64).reshape(-1, 2)
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
