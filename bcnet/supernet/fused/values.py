"""What flows through the tape: activations as rows, gradients of them, and a convolution's geometry."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch.nn.functional as F
from torch import Tensor


class Value(NamedTuple):
    """An activation: ``parts`` (M, C) per side, ``whole`` (S, M, C) where they lie together, (n, h, w)."""

    parts: tuple[Tensor, ...]
    whole: Tensor | None
    space: tuple[int, int, int]


class Gradient(NamedTuple):
    """The gradient of a value; with ``repeat`` > 1 each row stands for that many, scaled by 1/repeat (pooling)."""

    parts: tuple[Tensor, ...]
    whole: Tensor | None
    repeat: int = 1

    def rows(self, side: int) -> Tensor:
        """One side, (M, C) in float32."""
        part = self.parts[side].float()
        return part if self.repeat == 1 else part.repeat_interleave(self.repeat, 0) / self.repeat


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

    def convolve(self, rows: Tensor, weight: Tensor) -> Tensor:
        """rows (M, C), weight (C, K) to (n, C, h', w')."""
        x = rows.view(self.n, self.h, self.w, -1).permute(0, 3, 1, 2)
        kernel = weight.view(-1, 1, self.kernel, self.kernel)
        return F.conv2d(x, kernel, None, self.stride, self.padding, 1, len(kernel))

    @staticmethod
    def rows(y: Tensor) -> Tensor:
        return y.permute(0, 2, 3, 1).reshape(-1, y.shape[1])
