"""What flows through the tape: activations and their gradients as rows, and a convolution's geometry."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


class Rows(NamedTuple):
    """(M, C) of each of S sides: pixels by channels. ``side`` and ``row`` are strides in elements.

    ``base`` begins with the first side. Where every side is an allocation of its own, ``parts`` has them all and
    ``side`` is the distance of their addresses, which kernels can follow. With ``repeat`` > 1, each row of a gradient
    stands for that many pixels and is scaled by 1/repeat (pooling).
    """

    base: Tensor
    sides: int
    rows: int
    channels: int
    side: int
    row: int
    parts: tuple[Tensor, ...] = ()
    repeat: int = 1

    @staticmethod
    def whole(tensor: Tensor) -> Rows:
        """Of (S, M, C)."""
        sides, rows, channels = tensor.shape
        return Rows(tensor, sides, rows, channels, rows * channels, channels)

    @staticmethod
    def beside(image: Tensor, sides: int) -> Rows:
        """Of an image (n, S·C, h, w), channels last, with the channels of all sides next to each other."""
        n, together, h, w = image.shape
        return Rows(image, sides, n * h * w, together // sides, together // sides, together)

    @staticmethod
    def apart(images: Sequence[Tensor]) -> Rows:
        """Of one image (n, C, h, w), channels last, for each side."""
        first = images[0]
        n, channels, h, w = first.shape
        side = distance(images)
        return Rows(first, len(images), n * h * w, channels, side, channels, tuple(images))

    def of(self, side: int) -> Tensor:
        """One side, (M, C)."""
        size, stride = (self.rows, self.channels), (self.row, 1)
        if self.parts:
            return self.parts[side].as_strided(size, stride)
        return self.base.as_strided(size, stride, self.base.storage_offset() + side * self.side)

    def repeated(self, side: int) -> Tensor:
        """One side of a gradient, (M·repeat, C) in float32."""
        part = self.of(side).float()
        return part if self.repeat == 1 else part.repeat_interleave(self.repeat, 0) / self.repeat

    def dense(self) -> Tensor:
        """(S, M, C)."""
        if self.parts or self.row != self.channels:
            return torch.stack([self.of(s) for s in range(self.sides)])
        return self.base

    def together(self) -> Rows:
        """All sides as one, with the channels of all next to each other."""
        if self.sides > 1 and self.side != self.channels:
            rows = torch.cat([self.of(s) for s in range(self.sides)], 1)
            return Rows.whole(rows.unsqueeze(0))
        return self._replace(sides=1, channels=self.row)

    def empty(self) -> Rows:
        """Room for a gradient: the sides one after the other, or next to each other where they were."""
        if self.row == self.channels:
            return Rows.whole(self.base.new_empty((self.sides, self.rows, self.channels)))
        return self._replace(base=torch.empty_like(self.base))

    def image(self, side: int, extent: tuple[int, int, int]) -> Tensor:
        """One side as (n, C, h, w), channels last."""
        n, h, w = extent
        size, stride = (n, self.channels, h, w), (h * w * self.row, 1, w * self.row, self.row)
        if self.parts:
            return self.parts[side]
        return self.base.as_strided(size, stride, self.base.storage_offset() + side * self.side)


class Affine(NamedTuple):
    """A batch norm and its activation. All are flat with room to spare: ``gamma`` and ``beta`` begin with (S, C),
    ``sums`` (S, 2, C) holds the sums of what is normalised and of its squares, ``found`` (S, 2, C) the gradients of
    beta and gamma."""

    gamma: Tensor
    beta: Tensor
    sums: Tensor
    found: Tensor
    eps: float
    act: int


NARROW = 256
"""Outputs up to which the kernel of a 1x1 convolution normalises its input as it reads."""


class Found(NamedTuple):
    """Gradients of a parameter: those of side s begin ``first + s * step`` elements into ``tensor``, ``parts`` sums of
    it one after the other; where ``others`` has the further sides' tensors, ``step`` is the distance of addresses."""

    tensor: Tensor
    first: int
    step: int
    parts: int = 1
    others: tuple[Tensor, ...] = ()


class Goal(NamedTuple):
    """What the sides of a group learn: the places of their losses, their shares in the sum, label smoothing, and
    the probabilities (n, classes) of a teacher, which they learn in place of the labels. A ``loss`` of logits takes the
    place of cross entropy."""

    slots: Sequence[int]
    shares: Sequence[float]
    smoothing: float
    soft: Tensor | None = None
    loss: Callable[[Tensor], Tensor] | None = None


@dataclass(frozen=True)
class Window:
    """A depthwise convolution on n images of (h, w), one ``kernel`` for both directions."""

    n: int
    h: int
    w: int
    kernel: int
    stride: int
    padding: tuple[int, int]

    @property
    def out(self) -> tuple[int, int]:
        high = (self.h + 2 * self.padding[0] - self.kernel) // self.stride + 1
        wide = (self.w + 2 * self.padding[1] - self.kernel) // self.stride + 1
        return high, wide


def distance(tensors: Sequence[Tensor]) -> int:
    """Elements from the first to the last of one or two tensors."""
    return (tensors[-1].data_ptr() - tensors[0].data_ptr()) // tensors[0].element_size()


def at_most_two(grads: list[Rows]) -> list[Rows]:
    """The kernels add two gradients; the one of a pooling comes first."""
    grads = sorted(grads, key=lambda g: -g.repeat)
    if len(grads) < 3:
        return grads
    rest = torch.stack([g.dense() for g in grads[1:]]).sum(0)
    return [grads[0], Rows.whole(rest)]
