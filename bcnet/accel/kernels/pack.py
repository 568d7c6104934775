"""Slices of all parameters, gathered for the paths of a step in one launch, and their gradients added back in one.

A path's weights lie side by side, ``(S, O, K, I)`` each: output channels, kernel positions, input channels. Those of
depthwise convolutions are ``(S, K, O)``, which here is K outputs of one position and O inputs. Kernels like their
channels in eights, so channels may be rounded up: the further ones are zero, with zero weights before and behind them,
and no gradient comes back from them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bcnet.accel.kernels.values import Found
from bcnet.space.axis import Axis

ALIGN = 16
"""Elements to which packed weights are aligned, so that kernels can load 16 bytes at once."""

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Parameter:
    """What is to be sliced: axes say how its first two dimensions vary; ``full`` keeps float32."""

    tensor: Tensor
    axes: Sequence[Axis] | None
    full: bool = False
    depthwise: bool = False


class Packing:
    """Where the slices of a list of parameters begin and end, for all of them at once."""

    def __init__(self, parameters: Sequence[Parameter], total: Sequence[int]):
        dims = np.array([_dims(p) for p in parameters], dtype=np.int64)
        self.variable, self.repeat = dims[:, :, 0].T, dims[:, :, 1].T
        self.kernel = np.array([_kernel(p) for p in parameters], dtype=np.int64)
        self.stride = np.array([_strides(p) for p in parameters], dtype=np.int64).T
        self.full = np.array([p.full for p in parameters])
        self.whole = self.repeat * np.array([*total, 1])[self.variable]

    def places(self, units: Sequence[int], sides: Sequence[str], multiple: int = 1) -> Places:
        """The slices of ``sides`` at ``units``, packed with these rounded up to a ``multiple``."""
        length = self.repeat * np.array([*units, 1])[self.variable]
        wide = self.repeat * np.array([*(-(-np.array(units) // multiple) * multiple), 1])[self.variable]
        spare = self.whole - length
        right = np.array([side == "right" for side in sides])
        count = wide[0] * self.kernel * wide[1]
        room = -(-count * len(sides) // ALIGN) * ALIGN
        begin = [np.where(right[:, None], axis, 0) for axis in spare]
        return Places(self, length, wide[0], wide[1], begin[0], begin[1], count, room)


@dataclass(frozen=True)
class Places:
    """For p parameters: lengths ``own`` (2, p) of slices that begin at ``outers`` and ``inners`` (S, p) of the whole;
    how long they are packed, ``outer`` and ``inner`` (p,), with their ``count`` (p,) of elements; and the ``room`` (p,)
    that all sides take."""

    packing: Packing
    own: Ints
    outer: Ints
    inner: Ints
    outers: Ints
    inners: Ints
    count: Ints
    room: Ints

    @property
    def sides(self) -> int:
        return len(self.outers)

    def pack_table(self, addresses: Ints, offsets: Ints) -> Ints:
        """Rows (S·p, 11) that the pack kernel reads, from addresses and packed offsets (p,) of the parameters."""
        of = self.packing
        start = self.outers * of.stride[0] + self.inners * of.stride[2]
        table = np.empty((self.sides, len(addresses), 11), dtype=np.int64)
        table[:, :, 0] = addresses + 4 * start
        table[:, :, 1], table[:, :, 2], table[:, :, 3] = self.count, of.kernel, self.inner
        table[:, :, 4:7] = of.stride.T
        table[:, :, 7] = offsets + np.arange(self.sides)[:, None] * self.count
        table[:, :, 8] = of.full
        table[:, :, 9], table[:, :, 10] = self.own
        return table.reshape(-1, 11)

    def unpack_table(self, found: Sequence[Found]) -> Ints:
        """Columns (p, S, 9) that the unpack kernel reads: where what was ``found`` for each parameter belongs."""
        table = np.empty((len(found), self.sides, 9), dtype=np.int64)
        size = [f.tensor.element_size() for f in found]
        where = np.array([(f.tensor.data_ptr(), f.first, f.step, f.parts) for f in found], dtype=np.int64)
        apart = where[:, 1, None] + where[:, 2, None] * np.arange(self.sides)
        table[:, :, 0] = where[:, 0, None] + apart * np.array(size)[:, None]
        table[:, :, 1], table[:, :, 2] = self.outers.T, self.own[0][:, None]
        table[:, :, 3], table[:, :, 4] = self.inners.T, self.own[1][:, None]
        table[:, :, 5], table[:, :, 6] = where[:, 3, None], self.count[:, None]
        table[:, :, 7], table[:, :, 8] = np.array(size)[:, None] == 4, self.inner[:, None]
        return table


class Packed:
    """Room for the packed parameters of some groups of paths: halves (``dtype``) and fulls (float32)."""

    def __init__(self, groups: Sequence[Places], dtype: torch.dtype, device: torch.device):
        full = groups[0].packing.full
        rooms = np.stack([g.room for g in groups])
        ends = np.cumsum(np.where(full, 0, rooms)), np.cumsum(np.where(full, rooms, 0))
        offsets = np.where(full, ends[1].reshape(rooms.shape), ends[0].reshape(rooms.shape)) - rooms
        self.offsets: Ints = offsets
        self.half = torch.empty(int(ends[0][-1]), dtype=dtype, device=device)
        self.full = torch.empty(int(ends[1][-1]), dtype=torch.float32, device=device)
        halves, fulls = (rooms[:, chosen].ravel().tolist() for chosen in (~full, full))
        self._parts = self.half.split(halves), self.full.split(fulls)
        self._count = int((~full).sum()), int(full.sum())

    def of(self, group: int) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        """Flat halves and fulls of a group, each in the order of the parameters, with room to spare at their ends."""
        half, full = ((parts[group * n : (group + 1) * n]) for parts, n in zip(self._parts, self._count, strict=True))
        return half, full


def _dims(p: Parameter) -> list[tuple[int, int]]:
    """``(variable, channels per unit)`` of outer and inner; the last variable (-1) is fixed at 1."""
    dims = []
    for d in range(2):
        segment = p.axes[d].segments[0] if p.axes is not None and d < len(p.axes) else None
        if segment is not None and segment.variable is not None:
            dims.append((segment.variable, segment.repeat))
        else:
            dims.append((-1, p.tensor.shape[d] if d < p.tensor.dim() else 1))
    return [(-1, _positions(p.tensor)), dims[0]] if p.depthwise else dims


def _positions(tensor: Tensor) -> int:
    return int(np.prod(tensor.shape[2:]))


def _kernel(p: Parameter) -> int:
    return 1 if p.depthwise else _positions(p.tensor)


def _strides(p: Parameter) -> tuple[int, int, int]:
    """Strides of outer, kernel positions (rows and columns as one) and inner."""
    stride = p.tensor.stride()
    along = stride[3] if p.tensor.dim() == 4 else 0
    if p.depthwise:
        return along, 0, stride[0]
    return stride[0], along, stride[1] if p.tensor.dim() > 1 else 0
