"""How an axis of a tensor is made up of width variables: its size and its channels at any widths.

An axis is a row of segments. A segment holds all units of one variable in order, each repeated
``repeat`` times (a flattened 7x7 map: 49; a group of a grouped convolution: its channels), or a fixed
number of channels. A concatenation is two segments. *Units* are what a variable counts: one unit is
``unit`` channels of its width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Size:
    """``constant + sum(coefficient * units[variable])``."""

    constant: int
    terms: tuple[tuple[int, int], ...] = ()

    def at(self, units: Sequence[int] | np.ndarray) -> int:
        return self.constant + sum(k * int(units[v]) for v, k in self.terms)

    def __add__(self, other: Size) -> Size:
        merged = dict(self.terms)
        for variable, k in other.terms:
            merged[variable] = merged.get(variable, 0) + k
        return Size(self.constant + other.constant, tuple(sorted((v, k) for v, k in merged.items() if k)))

    def __sub__(self, other: Size) -> Size:
        return self + Size(-other.constant, tuple((v, -k) for v, k in other.terms))

    def __floordiv__(self, divisor: int) -> Size:
        """Exact division: the caller knows that every part divides."""
        return Size(self.constant // divisor, tuple((v, k // divisor) for v, k in self.terms))


@dataclass(frozen=True)
class Segment:
    """All units of ``variable``, each ``repeat`` times; or ``repeat`` fixed channels where it is None."""

    variable: int | None
    repeat: int


@dataclass(frozen=True)
class Axis:
    """One dimension of a parameter."""

    segments: tuple[Segment, ...]

    @property
    def size(self) -> Size:
        total = Size(0)
        for s in self.segments:
            total += Size(s.repeat) if s.variable is None else Size(0, ((s.variable, s.repeat),))
        return total

    @property
    def variables(self) -> frozenset[int]:
        return frozenset(s.variable for s in self.segments if s.variable is not None)

    def pieces(self, units: Sequence[int], total: Sequence[int], side: str) -> tuple[tuple[int, int], ...]:
        """``(start, length)`` of the slices that ``units`` take of an axis built for ``total`` units."""
        found: list[tuple[int, int]] = []
        start = 0
        for s in self.segments:
            whole = 1 if s.variable is None else int(total[s.variable])
            kept = 1 if s.variable is None else int(units[s.variable])
            skipped = whole - kept if side == "right" else 0
            begin, length = start + skipped * s.repeat, kept * s.repeat
            if found and sum(found[-1]) == begin:
                found[-1] = (found[-1][0], found[-1][1] + length)
            else:
                found.append((begin, length))
            start += whole * s.repeat
        return tuple(found)

    def indices(self, kept: Sequence[np.ndarray], total: Sequence[int]) -> np.ndarray:
        """The indices that the units ``kept`` of every variable take of an axis built for ``total`` units."""
        found: list[np.ndarray] = []
        start = 0
        for s in self.segments:
            units = np.arange(1) if s.variable is None else kept[s.variable]
            found.append((start + units[:, None] * s.repeat + np.arange(s.repeat)).reshape(-1))
            start += s.repeat * (1 if s.variable is None else int(total[s.variable]))
        return np.concatenate(found)


def parse(members: np.ndarray, counts: Sequence[int]) -> Axis | int:
    """The segments of an axis, or the variable that spoils it.

    ``members`` (n, 2) holds variable and unit of each index, variable -1 where it is fixed; ``counts``
    are the units of each variable.
    """
    segments: list[Segment] = []
    position, n = 0, len(members)
    ends = np.append(np.flatnonzero((members[1:] != members[:-1]).any(axis=1)) + 1, n)
    while position < n:
        variable = int(members[position, 0])
        run = int(ends[np.searchsorted(ends, position, side="right")]) - position
        if variable < 0:
            segments.append(Segment(None, run))
            position += run
            continue
        expected = np.repeat(np.arange(counts[variable]), run)
        found = members[position : position + len(expected)]
        if len(found) < len(expected) or (found[:, 0] != variable).any() or (found[:, 1] != expected).any():
            return variable
        segments.append(Segment(variable, run))
        position += len(expected)
    return Axis(tuple(segments))
