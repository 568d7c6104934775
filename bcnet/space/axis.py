"""How an axis of a tensor is made up of width variables: its size and its channels at any widths.

An axis is a row of segments. A segment holds all units of one variable in order, each repeated
``repeat`` times (a flattened 7x7 map: 49; a group of a grouped convolution: its channels), or a fixed
number of channels. A concatenation is two segments. *Units* are what a variable counts: one unit is
``unit`` channels of its width. Where a buffer of indices puts channels in another order, the units of several segments
are interleaved, and the buffer's own axis says which channels its entries index.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
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
        """Exact division: the caller knows that nothing is left over."""
        return Size(self.constant // divisor, tuple((v, k // divisor) for v, k in self.terms))


@dataclass(frozen=True)
class Segment:
    """All units of ``variable``, each ``repeat`` times; or ``repeat`` fixed channels where it is None."""

    variable: int | None
    repeat: int


@dataclass(frozen=True)
class Numbers:
    """A buffer's entries index channels of ``axis``, which has ``full`` units of every variable in the original."""

    axis: Axis
    full: tuple[int, ...]


@dataclass(frozen=True)
class Axis:
    """One dimension of a parameter.

    ``mixed`` is (segment, unit) of every index in the original, where segments are interleaved; units beyond those come
    last. ``numbers`` says what a buffer along this axis indexes, where its entries are indices of channels.
    """

    segments: tuple[Segment, ...]
    mixed: tuple[tuple[int, int], ...] = ()
    numbers: Numbers | None = None

    @property
    def size(self) -> Size:
        total = Size(0)
        for s in self.segments:
            total += Size(s.repeat) if s.variable is None else Size(0, ((s.variable, s.repeat),))
        return total

    @property
    def variables(self) -> frozenset[int]:
        return frozenset(s.variable for s in self.segments if s.variable is not None)

    def places(self, total: Sequence[int]) -> np.ndarray:
        """Segment and unit of every index of an axis built for ``total`` units, shape (n, 2)."""
        counts = np.array([1 if s.variable is None else int(total[s.variable]) for s in self.segments])
        rows = [
            np.stack([np.full(n * s.repeat, i), np.repeat(np.arange(n), s.repeat)], 1)
            for i, (s, n) in enumerate(zip(self.segments, counts.tolist(), strict=True))
        ]
        whole = np.concatenate(rows)
        if not self.mixed:
            return whole
        known = np.array(self.mixed)
        held = np.zeros(len(counts), dtype=np.int64)
        np.maximum.at(held, known[:, 0], known[:, 1] + 1)
        beyond = whole[whole[:, 1] >= held[whole[:, 0]]]
        return np.concatenate([known[known[:, 1] < counts[known[:, 0]]], beyond])

    def pieces(self, units: Sequence[int], total: Sequence[int], side: str) -> tuple[tuple[int, int], ...]:
        """``(start, length)`` of the slices that ``units`` take of an axis built for ``total`` units."""
        if self.mixed:
            first = [int(t) - int(n) if side == "right" else 0 for n, t in zip(units, total, strict=True)]
            taken = self.indices([np.arange(f, f + int(n)) for f, n in zip(first, units, strict=True)], total)
            runs = np.split(taken, np.flatnonzero(np.diff(taken) != 1) + 1)
            return tuple((int(run[0]), len(run)) for run in runs if len(run))
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
        if self.mixed:
            segment, unit = self.places(total).T
            for i, s in enumerate(self.segments):
                units = np.arange(1) if s.variable is None else kept[s.variable]
                found.append(np.flatnonzero((segment == i) & np.isin(unit, units)))
            return np.sort(np.concatenate(found))
        start = 0
        for s in self.segments:
            units = np.arange(1) if s.variable is None else kept[s.variable]
            found.append((start + units[:, None] * s.repeat + np.arange(s.repeat)).reshape(-1))
            start += s.repeat * (1 if s.variable is None else int(total[s.variable]))
        return np.concatenate(found)


def axis_of(members: np.ndarray, counts: Sequence[int], loose: Collection[int] = ()) -> Axis | int:
    """The segments of an axis, or a variable whose channels do not form any.

    ``members`` (n, 2) holds variable and unit of each index, variable -1 where it is fixed; ``counts``
    are the units of each variable; those in ``loose`` may lie in any order.
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
            return _mixed(members, counts) if variable in loose else variable
        segments.append(Segment(variable, run))
        position += len(expected)
    return Axis(tuple(segments))


def _mixed(members: np.ndarray, counts: Sequence[int]) -> Axis | int:
    """As :func:`axis_of`, for channels in any order; all units of a variable must occur equally often."""
    variables = list(dict.fromkeys(members[:, 0].tolist()))
    segments = []
    for v in variables:
        units = members[members[:, 0] == v, 1]
        if v < 0:
            segments.append(Segment(None, len(units)))
            continue
        times = np.bincount(units, minlength=counts[v])
        if (times != times[0]).any():
            return int(v)
        segments.append(Segment(v, int(times[0])))
    return Axis(tuple(segments), tuple((variables.index(v), max(0, u)) for v, u in members.tolist()))
