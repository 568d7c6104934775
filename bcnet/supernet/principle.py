"""How a width picks channels of the supernet: pure arithmetic, no torch.

A layer's channels are numbered from 0 here. The *left* side of a width c takes channels [0, c), the
*right* side [total - c, total). The *cardinality* of a channel counts the candidates and sides that
use it; a principle is *fair* to a variable when all its channels have the same.

With l the largest candidate, l_s the smallest and K their number:

============  ===========  =======================================================================
name          total        fair
============  ===========  =======================================================================
ua            l            only for K = 1: channel j (from 1) has #{k: c_k >= j}, one side only
bc            l            where the candidates are d, 2d, ..., l: K + 1 everywhere
bcv2          l + l_s      for every set of candidates closed under c -> l + l_s - c: K
bcv2-printed  l + l_s - d  for d = l_s, where it is bc, and K = 1; else the ends K, the middle K + 1
============  ===========  =======================================================================
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bcnet.errors import BcnetError, did_you_mean
from bcnet.space.widths import Side, WidthVariable

SIDES: tuple[Side, ...] = ("left", "right")


@dataclass(frozen=True)
class Principle:
    """A way to place widths in a supernet.

    ``extra`` is what a variable's total exceeds its largest width by; ``sides`` are the paths that
    differ from each other.
    """

    name: str
    extra: Callable[[WidthVariable], int]
    sides: tuple[Side, ...] = SIDES

    def total(self, variable: WidthVariable) -> int:
        """How many channels the supernet holds for ``variable``."""
        return variable.max + self.extra(variable)

    def channels(self, variable: WidthVariable, width: int, side: Side) -> range:
        """The channels that ``width`` takes on ``side``; a principle of one side takes them there for both."""
        _check(variable, width)
        if side not in SIDES:
            raise BcnetError(f"side is {side!r}, but it must be left or right")
        if side == "left" or side not in self.sides:
            return range(width)
        total = self.total(variable)
        return range(total - width, total)

    def complement(self, variable: WidthVariable, width: int) -> int:
        """``total - width``, kept within the candidates' range, since an empty layer cannot run.

        For bcv2 and any width from l_s to l this is exact, and a candidate where ``width`` is one. For the
        others it is clamped to l_s where ``total - width`` is narrower than that: at the latest for l.
        """
        _check(variable, width)
        return min(max(self.total(variable) - width, variable.base), variable.max)

    def cardinality(self, variable: WidthVariable) -> NDArray[np.int64]:
        """How many candidates and sides use each channel: shape (total,)."""
        channel = np.arange(1, self.total(variable) + 1)
        left = len(variable.candidates) - np.searchsorted(variable.candidates, channel)
        return (left if self.sides == ("left",) else left + left[::-1]).astype(np.int64)

    def fair(self, variable: WidthVariable) -> bool:
        """Whether every channel is used equally often."""
        cardinality = self.cardinality(variable)
        return bool((cardinality == cardinality[0]).all())


def _nothing(variable: WidthVariable) -> int:
    return 0


def _base_width(variable: WidthVariable) -> int:
    return variable.base


def _base_width_less_a_step(variable: WidthVariable) -> int:
    """``l_s - d`` with the step d = (l - l_s)/(K - 1), as the paper prints it.

    Where d is not a whole number of units it is rounded (halves up); it is at most l_s, so that width l
    still fits; and a single candidate has no step, so d is 0.
    """
    steps = len(variable.candidates) - 1
    if steps == 0:
        return variable.base
    span = (variable.max - variable.base) // variable.unit
    step = variable.unit * ((2 * span + steps) // (2 * steps))
    return variable.base - min(step, variable.base)


def _check(variable: WidthVariable, width: int) -> None:
    if not 1 <= width <= variable.max:
        raise BcnetError(f"width {width} of variable {variable.name!r} must lie in 1..{variable.max}")


UA = Principle("ua", _nothing, sides=("left",))
BC = Principle("bc", _nothing)
BCV2 = Principle("bcv2", _base_width)
BCV2_PRINTED = Principle("bcv2-printed", _base_width_less_a_step)

PRINCIPLES: tuple[Principle, ...] = (UA, BC, BCV2, BCV2_PRINTED)


def get_principle(name: str) -> Principle:
    """The principle called ``name``: ua, bc, bcv2 or bcv2-printed."""
    by_name = {principle.name: principle for principle in PRINCIPLES}
    if name in by_name:
        return by_name[name]
    guess = did_you_mean(name, by_name, 2) or f"there are {', '.join(by_name)}"
    raise BcnetError(f"unknown principle {name!r}: {guess}")
