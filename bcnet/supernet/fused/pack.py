"""Slices of all parameters, gathered for a path in one launch, and its gradients added back in one.

A path's weights lie side by side, ``(S, O, K, I)`` each: output channels, kernel positions, input channels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from bcnet.space.axis import Axis

ALIGN = 16
"""Elements to which packed weights are aligned, so that kernels can load 16 bytes at once."""


@dataclass(frozen=True)
class Segment:
    """One side's slice of one parameter (or of its gradient), and its place among the packed ones."""

    tensor: Tensor
    start: int
    shape: tuple[int, int, int]
    stride: tuple[int, int, int]
    offset: int

    @property
    def count(self) -> int:
        return self.shape[0] * self.shape[1] * self.shape[2]

    def view(self, tensor: Tensor) -> Tensor:
        """The slice of ``tensor`` as (O, K, I)."""
        return tensor.as_strided(self.shape, self.stride, tensor.storage_offset() + self.start)


class Packing:
    """Where the slices of a list of parameters begin and end, for all of them at once."""

    def __init__(self, tensors: Sequence[Tensor], axes: Sequence[Sequence[Axis] | None], total: Sequence[int]):
        self._total = np.array([*total, 1])
        dims = [_dims(t, a) for t, a in zip(tensors, axes, strict=True)]
        self._variable = np.array([[d[0] for d in pair] for pair in dims]).reshape(-1, 2).T
        self._repeat = np.array([[d[1] for d in pair] for pair in dims]).reshape(-1, 2).T
        self._kernel = np.array([int(np.prod(t.shape[2:])) for t in tensors], dtype=np.int64)
        self._stride = np.array([_strides(t) for t in tensors], dtype=np.int64).reshape(-1, 3).T

    def places(self, units: Sequence[int], sides: Sequence[str]) -> Places:
        """The slices of ``sides`` at ``units``."""
        chosen = np.array([*units, 1])
        length = self._repeat * chosen[self._variable]
        spare = self._repeat * self._total[self._variable] - length
        outer, inner = self._stride[0], self._stride[2]
        right = spare[0] * outer + spare[1] * inner
        count = length[0] * self._kernel * length[1]
        room = -(-count * len(sides) // ALIGN) * ALIGN
        offset = np.concatenate([[0], np.cumsum(room)])
        starts = np.stack([right if side == "right" else np.zeros_like(right) for side in sides])
        return Places(length[0], self._kernel, length[1], self._stride, starts, count, offset)


@dataclass(frozen=True)
class Places:
    """For p parameters: ``outputs``, ``kernel``, ``inputs``, ``count`` (p,), ``stride`` (3, p) in that order,
    ``starts`` (S, p) in elements, ``offset`` (p + 1,) of the packed ones."""

    outputs: NDArray[np.int64]
    kernel: NDArray[np.int64]
    inputs: NDArray[np.int64]
    stride: NDArray[np.int64]
    starts: NDArray[np.int64]
    count: NDArray[np.int64]
    offset: NDArray[np.int64]

    def views(self, flat: Tensor, sides: int) -> list[Tensor]:
        """The packed parameters (S, O, K, I), views of ``flat``."""
        rows = zip(*(a.tolist() for a in (self.offset, self.outputs, self.kernel, self.inputs)), strict=False)
        return [flat[at : at + sides * o * k * i].view(sides, o, k, i) for at, o, k, i in rows]

    def segments(self, tensors: Sequence[Tensor], side: int) -> list[Segment]:
        """The slices of one side, of ``tensors``."""
        rows = zip(
            tensors,
            self.starts[side].tolist(),
            zip(self.outputs.tolist(), self.kernel.tolist(), self.inputs.tolist(), strict=True),
            zip(*self.stride.tolist(), strict=True),
            (self.offset[:-1] + side * self.count).tolist(),
            strict=True,
        )
        return [Segment(*row) for row in rows]


def _dims(tensor: Tensor, axes: Sequence[Axis] | None) -> list[tuple[int, int]]:
    """``(variable, channels per unit)`` of the first two dimensions; the last variable (-1) is fixed at 1."""
    dims = []
    for d in range(2):
        segment = axes[d].segments[0] if axes is not None and d < len(axes) else None
        if segment is not None and segment.variable is not None:
            dims.append((segment.variable, segment.repeat))
        else:
            dims.append((-1, tensor.shape[d] if d < tensor.dim() else 1))
    return dims


def _strides(tensor: Tensor) -> tuple[int, int, int]:
    """Strides of output channels, kernel positions (rows and columns as one) and input channels."""
    stride = tensor.stride()
    return stride[0], stride[3] if tensor.dim() == 4 else 0, stride[1] if tensor.dim() > 1 else 0
