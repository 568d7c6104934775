"""Which paths a training step runs: pure arithmetic, testable without training.

Given a seed and a step's number a :class:`PathSampling` yields the paths. The paper's losses:

- ``eq7``: a width is trained on both sides, with the mean of their losses;
- ``eq8``: a width and its complement are trained together;
- ``update_eq7``: sides alternate from batch to batch, which halves the memory. The same widths are trained on the other
  side in the next batch, so that every two steps are as fair as one step of both sides; drawn anew for each, they
  would use a channel one to three times.

The weights of a step's paths add up to 1, so that samplings with more paths are comparable at one
learning rate (``eq8`` as printed is twice that).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np

from bcnet.space.widths import Side, Widths, WidthSpace
from bcnet.supernet.principle import Principle
from bcnet.utils.settings import Count, Share, checked


@dataclass(frozen=True)
class Path:
    """One (widths, side) to train, the weight of its loss, and the path it learns from."""

    widths: tuple[int, ...]
    side: Side
    weight: float
    learns: Literal["labels", "teacher"] = "labels"


@checked
class PathSampling:
    """What a step trains. ``sandwich`` is AutoSlim's. ``extremes`` (one, where there are no complements) are for
    weights between channels of opposite ends, which are in few other paths."""

    draws: Annotated[Count, "widths that are sampled a step, uniformly"] = 1
    complement: Annotated[bool, "whether the complement of each is trained too"] = True
    sides: Annotated[
        Literal["both", "alternate", "left"], "both, alternate from batch to batch with the same widths, or left only"
    ] = "both"
    sandwich: Annotated[bool, "whether the widest network, which teaches the others, and the narrowest are added"] = (
        False
    )
    extremes: Annotated[
        Share, "the share of steps whose first draw is the widest network, and its complement the narrowest"
    ] = 0.0

    def paths(self, step: int, seed: int, space: WidthSpace, principle: Principle) -> list[Path]:
        """The paths of ``step``, the widest first where it is the teacher."""
        rng = step_rng(seed, step - step % 2 if self.sides == "alternate" else step)
        widths = space.sample(rng, self.draws)
        if self.extremes and rng.random() < self.extremes:
            widths[0] = space.max if self.complement or rng.random() < 0.5 else space.min
        if self.complement:
            widths = np.concatenate([widths, complement(space, principle, widths)])
        if self.sandwich:
            widths = np.concatenate([space.max[None], widths, space.min[None]])
        sides = self._sides(step, principle)
        weight = 1 / (len(widths) * len(sides))
        return [
            Path(tuple(row), side, weight, "teacher" if self.sandwich and i else "labels")
            for i, row in enumerate(widths.tolist())
            for side in sides
        ]

    def _sides(self, step: int, principle: Principle) -> tuple[Side, ...]:
        if self.sides == "left" or principle.sides == ("left",):
            return ("left",)
        return principle.sides if self.sides == "both" else (principle.sides[step % 2],)


def complement(space: WidthSpace, principle: Principle, widths: Widths) -> Widths:
    """The complements of ``widths`` (n, L)."""
    rows = [[principle.complement(v, c) for v, c in zip(space.variables, row, strict=True)] for row in widths.tolist()]
    return np.array(rows, dtype=np.int64)


def step_rng(seed: int, step: int) -> np.random.Generator:
    """The random numbers of one step: a resumed run draws what the uninterrupted one would have drawn."""
    return np.random.default_rng([seed, step])


@dataclass(frozen=True)
class Method:
    """A way to train a supernet and to score with it: principle and path sampling."""

    principle: str
    sampling: PathSampling


METHODS: dict[str, Method] = {
    "bcv2": Method("bcv2", PathSampling()),
    "bcv2-alternate": Method("bcv2", PathSampling(sides="alternate")),
    "bcv2-printed": Method("bcv2-printed", PathSampling()),
    "bc": Method("bc", PathSampling()),
    "ua": Method("ua", PathSampling(draws=4, complement=False, sides="left")),
    "autoslim": Method("ua", PathSampling(draws=2, complement=False, sides="left", sandwich=True)),
}
"""Methods that train four paths a step (two where sides alternate)."""
