"""What the fused step is made of, as launches of Triton kernels; ``tests/helpers/reference_kernels.py`` has the same
functions in plain torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
import triton.language as tl
from torch import Tensor

from bcnet.accel.kernels import conv1x1 as cuda_conv1x1
from bcnet.accel.kernels import depthwise as cuda_depthwise
from bcnet.accel.kernels import depthwise3 as cuda_depthwise3
from bcnet.accel.kernels import norm as cuda_norm
from bcnet.accel.kernels import tables as cuda_tables
from bcnet.accel.kernels.launch import Kernel
from bcnet.accel.kernels.pack import Packed, Places
from bcnet.accel.kernels.upload import Uploads
from bcnet.accel.kernels.values import NARROW, Affine, Found, Goal, Rows, Window

Tile = tuple[int, int, int]


@dataclass(frozen=True)
class Tuning:
    """Rows, most channels and warps of blocks: of reductions, of elementwise passes, of depthwise convolutions
    forwards and backwards, of those that go by rows and that halve, of matrix products; and how many programs a
    reduction is cut into. A block that has fewer channels has more rows."""

    reduce: Tile = (32, 64, 4)
    apply: Tile = (16, 128, 4)
    depthwise: Tile = (16, 64, 4)
    depthwise_back: Tile = (16, 64, 4)
    rows: Tile = (8, 64, 4)
    rows_back: Tile = (16, 32, 4)
    half_back: Tile = (16, 32, 4)
    conv1x1: Tile = (128, 64, 4)
    conv1x1_back: Tile = (64, 32, 4)
    programs: int = 132 * 8
    tables: tuple[int, int] = (64, 128)
    """Programs that share the copying of one parameter, and of one gradient."""


tuning = Tuning()

_statistics, _normalise = Kernel(cuda_norm.statistics), Kernel(cuda_norm.normalise)
_norm_sums, _norm_gradient = Kernel(cuda_norm.norm_sums), Kernel(cuda_norm.norm_gradient)
_depthwise, _depthwise_back = Kernel(cuda_depthwise.depthwise), Kernel(cuda_depthwise.depthwise_back)
_depthwise_rows = Kernel(cuda_depthwise3.depthwise_rows)
_depthwise_rows_back = Kernel(cuda_depthwise3.depthwise_rows_back)
_depthwise_half_back = Kernel(cuda_depthwise3.depthwise_half_back)
_depthwise_weight, _entropy = Kernel(cuda_depthwise.depthwise_weight), Kernel(cuda_tables.entropy)
_conv1x1, _conv1x1_back = Kernel(cuda_conv1x1.conv1x1), Kernel(cuda_conv1x1.conv1x1_back)
_pack, _unpack = Kernel(cuda_tables.pack), Kernel(cuda_tables.unpack)
_uploads: dict[torch.device, Uploads] = {}


def pack(groups: Sequence[Places], tensors: Sequence[Tensor], packed: Packed) -> None:
    """Copy slices of parameters into ``packed``, output channels first and input channels last."""
    addresses = np.array([t.data_ptr() for t in tensors], dtype=np.int64)
    rows = [g.pack_table(addresses, offsets) for g, offsets in zip(groups, packed.offsets, strict=True)]
    table = np.concatenate(rows)
    grid = (tuning.tables[0], len(table), 1)
    _pack(grid, (_upload(table, packed.half.device), packed.half, packed.full), (1024,))


def unpack(groups: Sequence[Places], found: Sequence[Sequence[Found]], grads: Sequence[Tensor]) -> None:
    """Add what was found, by group and parameter, to slices of the gradients."""
    packing = groups[0].packing
    table = np.concatenate([g.unpack_table(one) for g, one in zip(groups, found, strict=True)], 1)
    wholes = np.empty((len(grads), 7), dtype=np.int64)
    wholes[:, 0] = [g.data_ptr() for g in grads]
    wholes[:, 2], wholes[:, 3], wholes[:, 4:] = packing.kernel, packing.whole[1], packing.stride.T
    wholes[:, 1] = packing.whole[0] * packing.kernel * packing.whole[1]
    sent = _upload(np.concatenate([wholes.ravel(), table.ravel()]), grads[0].device)
    half = tl.bfloat16 if found[0][0].tensor.dtype == torch.bfloat16 else tl.float32
    _unpack((tuning.tables[1], len(grads), 1), (sent, sent[wholes.size :], table.shape[1]), (half, 512))


def _upload(table: np.ndarray, device: torch.device) -> Tensor:
    if device.type != "cuda":
        return torch.from_numpy(table)
    if device not in _uploads:
        _uploads[device] = Uploads(device)
    return _uploads[device].send(table)


def statistics(y: Rows, norm: Affine) -> None:
    """Put the sums of y and of its squares into ``norm.sums``."""
    a, rows, block, columns, warps = _tiles(y.channels, tuning.reduce)
    each, chunks = _chunks(y.rows, rows, columns * y.sides)
    _statistics(
        (chunks, columns, y.sides),
        (y.base, norm.sums, y.side // a, y.row // a, y.rows, y.channels // a, each),
        (a, _wide(y), rows, block),
        warps,
    )


def normalise(y: Rows, norm: Affine, residual: Rows | None) -> Rows:
    """``act(batch_norm(y) + residual)``."""
    a, rows, block, columns, warps = _tiles(y.channels, tuning.apply)
    z = y.base.new_empty((y.sides, y.rows, y.channels))
    _normalise(
        (-(-y.rows // rows), columns, y.sides),
        (y.base, z, z if residual is None else residual.dense(), norm.gamma, norm.beta, norm.sums,
         y.side // a, y.row // a, y.rows, y.channels // a, norm.eps),
        (norm.act, residual is not None, a, _wide(y), rows, block),
        warps,
    )  # fmt: skip
    return Rows.whole(z)


def norm_sums(grads: Sequence[Rows], y: Rows, norm: Affine, residual: Rows | None, keep: bool) -> Rows | None:
    """Put the gradients of beta and gamma into ``norm.found``.

    Returns the gradient before the activation, which is the residual's, if ``keep``.
    """
    g, h = grads[0], grads[-1]
    kept = y.base.new_empty((y.sides, y.rows, y.channels)) if keep else None
    a, rows, block, columns, warps = _tiles(y.channels, tuning.reduce)
    each, chunks = _chunks(y.rows, rows, columns * y.sides)
    _norm_sums(
        (chunks, columns, y.sides),
        (g.base, h.base, y.base, g.base if residual is None else residual.dense(), g.base if kept is None else kept,
         norm.gamma, norm.beta, norm.sums, norm.found, g.side // a, h.side // a, y.side // a,
         g.row // a, h.row // a, y.row // a, y.rows, y.channels // a, norm.eps, g.repeat, each),
        (norm.act, residual is not None, len(grads) == 2, g.repeat > 1, keep, a, _wide(y), rows, block),
        warps,
    )  # fmt: skip
    return None if kept is None else Rows.whole(kept)


def norm_gradient(grads: Sequence[Rows], y: Rows, norm: Affine) -> Rows:
    """The gradient of y, once ``norm.found`` is known."""
    g, h, out = grads[0], grads[-1], y.empty()
    a, rows, block, columns, warps = _tiles(y.channels, tuning.apply)
    _norm_gradient(
        (-(-y.rows // rows), columns, y.sides),
        (g.base, h.base, y.base, out.base, norm.gamma, norm.beta, norm.sums, norm.found,
         g.side // a, h.side // a, y.side // a, out.side // a, g.row // a, h.row // a, y.row // a, out.row // a,
         y.rows, y.channels // a, norm.eps, g.repeat),
        (norm.act, len(grads) == 2, g.repeat > 1, a, _wide(y), rows, block),
        warps,
    )  # fmt: skip
    return out


def depthwise_forward(x: Rows, weight: Tensor, window: Window, norm: Affine | None, next_norm: Affine | None) -> Rows:
    """x, normalised and activated by ``norm``, convolved with weight (S·K·C, …); the statistics of the result go to
    ``next_norm``."""
    if _by_rows(window):
        return _depthwise_forward_by_rows(x, weight, window, norm, next_norm)
    high, wide = window.out
    count = window.n * high * wide
    y = x.base.new_empty((x.sides, count, x.channels))
    a, rows, block, columns, warps = _tiles(x.channels, tuning.depthwise)
    each, chunks = _chunks(count, rows, columns * x.sides)
    gamma, beta, sums = _affine(norm, weight)
    _depthwise(
        (chunks, columns, x.sides),
        (x.base, weight, y, gamma, beta, sums, weight if next_norm is None else next_norm.sums,
         x.side // a, x.row // a, count, x.channels // a, window.h, window.w, high, wide, *window.padding,
         0.0 if norm is None else norm.eps, each),
        (norm is not None, 0 if norm is None else norm.act, next_norm is not None, window.stride, window.kernel,
         a, _wide(x), rows, block),
        warps,
    )  # fmt: skip
    return Rows.whole(y)


def depthwise_backward(dy: Rows, x: Rows, weight: Tensor, window: Window, norm: Affine | None, found: Tensor) -> Rows:
    """The gradient of x or, with ``norm``, of what it activates (then ``norm.found`` is known too); that of the weight
    goes to the beginning (S, K, C) of ``found``."""
    dx = x.base.new_empty((x.sides, x.rows, x.channels))
    if _by_rows(window) or _halves(window):
        _depthwise_backward_3x3(dy, x, weight, window, norm, found, dx)
        return Rows.whole(dx)
    high, wide = window.out
    a, rows, block, columns, warps = _tiles(x.channels, tuning.depthwise_back)
    each, chunks = _chunks(x.rows, rows, columns * x.sides)
    gamma, beta, sums = _affine(norm, weight)
    eps, act = (0.0, 0) if norm is None else (norm.eps, norm.act)
    sizes = (
        x.side // a, x.row // a, x.rows, x.channels // a, window.h, window.w, high, wide, *window.padding, eps, each
    )  # fmt: skip
    blocks = (a, _wide(x), rows, block)
    d = dy.dense()
    _depthwise_back(
        (chunks, columns, x.sides),
        (d, x.base, weight, dx, gamma, beta, sums, found if norm is None else norm.found, *sizes),
        (norm is not None, act, window.stride, window.kernel, *blocks),
        warps,
    )
    _depthwise_weight(
        (chunks, columns, x.sides * window.kernel**2),
        (d, x.base, gamma, beta, sums, found, *sizes),
        (norm is not None, act, window.stride, window.kernel, *blocks),
        warps,
    )
    return Rows.whole(dx)


def _by_rows(window: Window) -> bool:
    return window.kernel == 3 and window.stride == 1 and window.padding == (1, 1)


def _halves(window: Window) -> bool:
    even = window.h % 2 == 0 and window.w % 2 == 0
    return window.kernel == 3 and window.stride == 2 and window.padding == (1, 1) and even


def _depthwise_forward_by_rows(
    x: Rows, weight: Tensor, window: Window, norm: Affine | None, next_norm: Affine | None
) -> Rows:
    y = x.base.new_empty((x.sides, x.rows, x.channels))
    a, rows, block, columns, warps = _tiles(x.channels, tuning.rows)
    eps, act = (0.0, 0) if norm is None else (norm.eps, norm.act)
    _depthwise_rows(
        (-(-window.n * -(-window.w // 2) // rows), columns, x.sides),
        (x.base, weight, y, *_affine(norm, weight), weight if next_norm is None else next_norm.sums,
         x.side // a, x.row // a, window.n, x.channels // a, window.h, window.w, eps),
        (norm is not None, act, next_norm is not None, a, _wide(x), rows, block),
        warps,
    )  # fmt: skip
    return Rows.whole(y)


def _depthwise_backward_3x3(
    dy: Rows, x: Rows, weight: Tensor, window: Window, norm: Affine | None, found: Tensor, dx: Tensor
) -> None:
    halves = _halves(window)
    a, rows, block, columns, warps = _tiles(x.channels, tuning.half_back if halves else tuning.rows_back)
    eps, act = (0.0, 0) if norm is None else (norm.eps, norm.act)
    kernel, work = (_depthwise_half_back, dy.rows) if halves else (_depthwise_rows_back, window.n * window.w)
    others = columns * x.sides if halves else -(-columns * x.sides // 2)  # twice the programs are faster by rows
    kernel(
        (_chunks(work, rows, others)[1], columns, x.sides),
        (dy.dense(), x.base, weight, dx, *_affine(norm, weight), found if norm is None else norm.found, found,
         x.side // a, x.row // a, window.n, x.channels // a, window.h, window.w, eps),
        (norm is not None, act, a, _wide(x), rows, block),
        warps,
    )  # fmt: skip


def conv1x1_forward(x: Rows, weight: Tensor, outputs: int, norm: Affine | None, next_norm: Affine | None) -> Rows:
    """x, normalised and activated by ``norm``, times weight (S·O·C, …); the statistics of the result go to
    ``next_norm``."""
    if norm is None and min(x.channels, outputs) > NARROW:
        matrix = weight.as_strided((x.sides, outputs, x.channels), (outputs * x.channels, x.channels, 1))
        product = Rows.whole(torch.bmm(x.dense(), matrix.transpose(1, 2)))
        if next_norm is not None:
            statistics(product, next_norm)
        return product
    y = x.base.new_empty((x.sides, x.rows, outputs))
    rows, most, warps = tuning.conv1x1
    block = min(NARROW if norm else most, max(16, _power(outputs)))
    eps, act = (0.0, 0) if norm is None else (norm.eps, norm.act)
    a, ao = _power_in(x.channels), _power_in(outputs)
    _conv1x1(
        (-(-x.rows // rows), -(-outputs // block), x.sides),
        (x.base, weight, y, *_affine(norm, weight), weight if next_norm is None else next_norm.sums,
         x.side // a, x.row // a, x.rows, x.channels // a, outputs // ao, eps),
        (norm is not None, act, next_norm is not None, a, ao, _wide(x), rows, block,
         min(64, max(16, _power(x.channels)))),
        warps if rows * block <= 8192 else 8,
    )  # fmt: skip
    return Rows.whole(y)


def conv1x1_backward(dy: Rows, x: Rows, weight: Tensor, norm: Affine, found: Tensor) -> Rows:
    """The gradient of what ``norm`` activates, with ``norm.found``; that of the weight goes to the beginning (S, O, C)
    of ``found``."""
    dx = x.base.new_empty((x.sides, x.rows, x.channels))
    rows, block, warps = tuning.conv1x1_back
    block = min(block, max(16, _power(x.channels)))
    columns = -(-x.channels // block)
    each, chunks = _chunks(x.rows, rows, 2 * columns * x.sides)
    a, ao = _power_in(x.channels), _power_in(dy.channels)
    _conv1x1_back(
        (chunks, columns, x.sides),
        (dy.dense(), x.base, weight, dx, *_affine(norm, weight), norm.found, found,
         x.side // a, x.row // a, x.rows, x.channels // a, dy.channels // ao, norm.eps, each),
        (norm.act, a, ao, _wide(x), rows, block, max(16, _power(dy.channels))),
        warps if dy.channels <= 64 else 8,
    )  # fmt: skip
    return Rows.whole(dx)


def entropy(logits: Tensor, bias: Tensor | None, y: Tensor, goal: Goal, found: Tensor, losses: Tensor) -> Tensor:
    """The gradient of cross entropy by logits (S, n, classes) + bias; its sum over images goes to the beginning
    (S, classes) of ``found``, the losses to their places."""
    sides, n, classes = logits.shape
    slope = torch.empty_like(logits)
    block = _power(classes)
    rows = max(1, 1024 // block)
    shift, soft = found if bias is None else bias, found if goal.soft is None else goal.soft
    _entropy(
        (-(-n // rows), sides, 1),
        (logits, shift, y, soft, slope, found, losses, n, classes,
         goal.slots[0], goal.slots[-1], float(goal.shares[0]), float(goal.shares[-1]), float(goal.smoothing)),
        (bias is not None, goal.soft is not None, rows, block),
    )  # fmt: skip
    return slope


def _affine(norm: Affine | None, stand_in: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return (stand_in, stand_in, stand_in) if norm is None else (norm.gamma, norm.beta, norm.sums)


@cache
def _tiles(channels: int, tile: Tile) -> tuple[int, int, int, int, int]:
    """The power of two that loads may be wide, rows and channels of a block, blocks side by side, and warps: the widest
    block of which at most an eighth is idle."""
    rows, most, warps = tile
    sizes = [most >> i for i in range(most.bit_length()) if most >> i >= min(16, _power(channels))]
    spare = {size: -(-channels // size) * size for size in sizes}
    block = next((size for size in sizes if spare[size] * 8 <= channels * 9), min(_power(channels), most))
    return _power_in(channels), rows * most // block, block, -(-channels // block), warps


def _power_in(channels: int) -> int:
    """The largest power of two that divides channels, up to eight."""
    return min(8, channels & -channels)


def _chunks(rows: int, block: int, others: int) -> tuple[int, int]:
    """Rows of a program, a multiple of a block's, and programs, so that with ``others`` there are enough."""
    programs = max(1, tuning.programs // others)
    each = -(-rows // (programs * block)) * block
    return each, -(-rows // each)


def _power(n: int) -> int:
    """The power of two that is at least n."""
    return 1 << (n - 1).bit_length()


def _wide(x: Rows) -> bool:
    """Whether places do not fit into 32 bits."""
    return x.rows * x.row >= 2**31
