"""The functions of ``reference`` as Triton kernels, for CUDA devices.

Rows lie with channels innermost. Sums over rows are taken in float32 by many programs and added atomically,
so results differ in the last bits from run to run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from bcnet.supernet.fused.pack import Segment
from bcnet.supernet.fused.values import Gradient, Window

Parts = Sequence[Tensor]


@dataclass(frozen=True)
class Tuning:
    """Sizes of blocks: most ``channels`` in one, rows and warps of reductions, of elementwise passes and of
    depthwise convolutions, and how many programs a reduction is cut into."""

    channels: int = 64
    reduce: tuple[int, int] = (32, 4)
    apply: tuple[int, int] = (64, 4)
    depthwise: tuple[int, int] = (64, 4)
    depthwise_back: tuple[int, int] = (32, 4)
    programs: int = 132 * 8


tuning = Tuning()


@triton.jit
def _activate(u, ACT: tl.constexpr):
    if ACT == 1:
        u = tl.maximum(u, 0.0)
    elif ACT == 2:
        u = tl.minimum(tl.maximum(u, 0.0), 6.0)
    elif ACT == 3:
        u = u * tl.minimum(tl.maximum(u + 3.0, 0.0), 6.0) / 6.0
    elif ACT == 4:
        u = u * tl.sigmoid(u)
    return u


@triton.jit
def _descend(g, u, ACT: tl.constexpr):
    """The gradient before the activation at ``u``."""
    if ACT == 1:
        g = tl.where(u > 0.0, g, 0.0)
    elif ACT == 2:
        g = tl.where((u > 0.0) & (u < 6.0), g, 0.0)
    elif ACT == 3:
        g = tl.where(u >= 3.0, g, tl.where(u > -3.0, g * (u / 3.0 + 0.5), 0.0))
    elif ACT == 4:
        s = tl.sigmoid(u)
        g = g * s * (1.0 + u * (1.0 - s))
    return g


@triton.jit
def _moments(y, sums, side, c, inside, M, C, eps):
    """Mean and 1/deviation of channels, from sums of differences to the first row."""
    first = tl.load(y + c, mask=inside, other=0.0).to(tl.float32)
    s = tl.load(sums + side * 2 * C + c, mask=inside, other=0.0) / M
    q = tl.load(sums + side * 2 * C + C + c, mask=inside, other=0.0) / M
    return first + s, tl.rsqrt(tl.maximum(q - s * s, 0.0) + eps)


@triton.jit
def _statistics(y, sums, y_side: tl.int64, y_row, M, C, rows_each, BR: tl.constexpr, BC: tl.constexpr):
    side = tl.program_id(2)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    inside = c < C
    y += side * y_side
    first = tl.load(y + c, mask=inside, other=0.0).to(tl.float32)
    begin = tl.program_id(0) * rows_each
    end = tl.minimum(begin + rows_each, M)
    s = tl.zeros((BR, BC), tl.float32)
    q = tl.zeros((BR, BC), tl.float32)
    for start in range(begin, end, BR):
        row = start + tl.arange(0, BR)
        here = (row < end)[:, None] & inside[None, :]
        v = tl.load(y + row.to(tl.int64)[:, None] * y_row + c[None, :], mask=here, other=0.0).to(tl.float32)
        d = tl.where(here, v - first[None, :], 0.0)
        s += d
        q += d * d
    tl.atomic_add(sums + side * 2 * C + c, tl.sum(s, 0), mask=inside, sem="relaxed")
    tl.atomic_add(sums + side * 2 * C + C + c, tl.sum(q, 0), mask=inside, sem="relaxed")


@triton.jit
def _normalise(
    y, z, residual, gamma, beta, sums, y_side: tl.int64, y_row, M, C, eps,
    ACT: tl.constexpr, ADD: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    side = tl.program_id(2)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    inside = c < C
    y += side * y_side
    mean, scale = _moments(y, sums, side, c, inside, M, C, eps)
    scale *= tl.load(gamma + side * C + c, mask=inside, other=0.0)
    shift = tl.load(beta + side * C + c, mask=inside, other=0.0) - mean * scale
    # The last rows first: they are still in the cache.
    row = (tl.num_programs(0) - 1 - tl.program_id(0)) * BR + tl.arange(0, BR)
    here = (row < M)[:, None] & inside[None, :]
    row = row.to(tl.int64)
    place = (side.to(tl.int64) * M + row)[:, None] * C + c[None, :]
    u = tl.load(y + row[:, None] * y_row + c[None, :], mask=here, other=0.0).to(tl.float32)
    u = u * scale[None, :] + shift[None, :]
    if ADD:
        u += tl.load(residual + place, mask=here, other=0.0).to(tl.float32)
    tl.store(z + place, _activate(u, ACT).to(z.dtype.element_ty), mask=here)


@triton.jit
def _gradient(a, b, row, c, here, a_row, b_row, repeat, TWO: tl.constexpr, REPEAT: tl.constexpr):
    """The sum of the incoming gradients at rows (BR,) and channels (BC,)."""
    if REPEAT:
        g = tl.load(a + (row // repeat)[:, None] * a_row + c[None, :], mask=here, other=0.0).to(tl.float32) / repeat
    else:
        g = tl.load(a + row[:, None] * a_row + c[None, :], mask=here, other=0.0).to(tl.float32)
    if TWO:
        g += tl.load(b + row[:, None] * b_row + c[None, :], mask=here, other=0.0).to(tl.float32)
    return g


@triton.jit
def _norm_sums(
    a, b, y, residual, kept, gamma, beta, sums, found,
    a_side: tl.int64, b_side: tl.int64, y_side: tl.int64, a_row, b_row, y_row, M, C, eps, repeat, rows_each,
    ACT: tl.constexpr, ADD: tl.constexpr, TWO: tl.constexpr, REPEAT: tl.constexpr, KEEP: tl.constexpr,
    BR: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    side = tl.program_id(2)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    inside = c < C
    y += side * y_side
    a += side * a_side
    b += side * b_side
    mean, rstd = _moments(y, sums, side, c, inside, M, C, eps)
    scale = rstd * tl.load(gamma + side * C + c, mask=inside, other=0.0)
    shift = tl.load(beta + side * C + c, mask=inside, other=0.0) - mean * scale
    begin = tl.program_id(0) * rows_each
    end = tl.minimum(begin + rows_each, M)
    s = tl.zeros((BR, BC), tl.float32)
    q = tl.zeros((BR, BC), tl.float32)
    for start in range(begin, end, BR):
        row = start + tl.arange(0, BR)
        here = (row < end)[:, None] & inside[None, :]
        row = row.to(tl.int64)
        place = (side.to(tl.int64) * M + row)[:, None] * C + c[None, :]
        v = tl.load(y + row[:, None] * y_row + c[None, :], mask=here, other=0.0).to(tl.float32)
        g = _gradient(a, b, row, c, here, a_row, b_row, repeat, TWO, REPEAT)
        u = v * scale[None, :] + shift[None, :]
        if ACT and ADD:
            u += tl.load(residual + place, mask=here, other=0.0).to(tl.float32)
        g = _descend(g, u, ACT)
        if KEEP:
            rounded = g.to(kept.dtype.element_ty)
            tl.store(kept + place, rounded, mask=here)
            g = rounded.to(tl.float32)
        s += g
        q += g * (v - mean[None, :])
    tl.atomic_add(found + side * 2 * C + c, tl.sum(s, 0), mask=inside, sem="relaxed")
    tl.atomic_add(found + side * 2 * C + C + c, tl.sum(q, 0) * rstd, mask=inside, sem="relaxed")


@triton.jit
def _norm_gradient(
    a, b, y, dy, gamma, beta, sums, found,
    a_side: tl.int64, b_side: tl.int64, y_side: tl.int64, out_side: tl.int64, a_row, b_row, y_row, out_row,
    M, C, eps, repeat,
    ACT: tl.constexpr, TWO: tl.constexpr, REPEAT: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    side = tl.program_id(2)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    inside = c < C
    y += side * y_side
    a += side * a_side
    b += side * b_side
    mean, rstd = _moments(y, sums, side, c, inside, M, C, eps)
    scale = rstd * tl.load(gamma + side * C + c, mask=inside, other=0.0)
    shift = tl.load(beta + side * C + c, mask=inside, other=0.0) - mean * scale
    g_mean = tl.load(found + side * 2 * C + c, mask=inside, other=0.0) / M
    slope = tl.load(found + side * 2 * C + C + c, mask=inside, other=0.0) / M * rstd
    row = (tl.num_programs(0) - 1 - tl.program_id(0)) * BR + tl.arange(0, BR)
    here = (row < M)[:, None] & inside[None, :]
    row = row.to(tl.int64)
    v = tl.load(y + row[:, None] * y_row + c[None, :], mask=here, other=0.0).to(tl.float32)
    g = _gradient(a, b, row, c, here, a_row, b_row, repeat, TWO, REPEAT)
    g = _descend(g, v * scale[None, :] + shift[None, :], ACT)
    d = scale[None, :] * (g - g_mean[None, :] - (v - mean[None, :]) * slope[None, :])
    tl.store(dy + side * out_side + row[:, None] * out_row + c[None, :], d.to(dy.dtype.element_ty), mask=here)


@triton.jit
def _depthwise(
    x, weight, y, M, C, H, W, HO, WO, pad_h, pad_w,
    STRIDE: tl.constexpr, K: tl.constexpr, BP: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """M output pixels (n, HO, WO) from n images (H, W)."""
    side = tl.program_id(2)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    inside = c < C
    p = tl.program_id(0) * BP + tl.arange(0, BP)
    valid = p < M
    n = p // (HO * WO)
    h = (p // WO) % HO * STRIDE - pad_h
    w = p % WO * STRIDE - pad_w
    images = M // (HO * WO)
    x += side.to(tl.int64) * images * H * W * C
    acc = tl.zeros((BP, BC), tl.float32)
    for i in tl.static_range(K):
        for j in tl.static_range(K):
            hi = h + i
            wj = w + j
            there = valid & (hi >= 0) & (hi < H) & (wj >= 0) & (wj < W)
            at = ((n * H + hi) * W + wj).to(tl.int64)
            v = tl.load(x + at[:, None] * C + c[None, :], mask=there[:, None] & inside[None, :], other=0.0)
            k = tl.load(weight + (side * C + c) * (K * K) + i * K + j, mask=inside, other=0.0)
            acc += v.to(tl.float32) * k.to(tl.float32)[None, :]
    place = (side.to(tl.int64) * M + p)[:, None] * C + c[None, :]
    tl.store(y + place, acc.to(y.dtype.element_ty), mask=valid[:, None] & inside[None, :])


@triton.jit
def _depthwise_back(
    dy, x, weight, dx, found, M, C, H, W, HO, WO, pad_h, pad_w, blocks_each,
    STRIDE: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, BP: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Both gradients from one reading: M input pixels (n, H, W); KP is K·K rounded up to a power of two."""
    side = tl.program_id(2)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    inside = c < C
    images = M // (H * W)
    dy += side.to(tl.int64) * images * HO * WO * C
    tap = tl.arange(0, KP)
    acc = tl.zeros((KP, BC), tl.float32)
    begin = tl.program_id(0) * blocks_each * BP
    end = tl.minimum(begin + blocks_each * BP, M)
    for start in range(begin, end, BP):
        p = start + tl.arange(0, BP)
        valid = p < M
        n = p // (H * W)
        h = (p // W) % H + pad_h
        w = p % W + pad_w
        place = (side.to(tl.int64) * M + p)[:, None] * C + c[None, :]
        here = valid[:, None] & inside[None, :]
        v = tl.load(x + place, mask=here, other=0.0).to(tl.float32)
        total = tl.zeros((BP, BC), tl.float32)
        for i in tl.static_range(K):
            for j in tl.static_range(K):
                hi = h - i
                wj = w - j
                there = valid & (hi >= 0) & (hi < HO * STRIDE) & (wj >= 0) & (wj < WO * STRIDE)
                if STRIDE > 1:
                    there &= (hi % STRIDE == 0) & (wj % STRIDE == 0)
                at = ((n * HO + hi // STRIDE) * WO + wj // STRIDE).to(tl.int64)
                d = tl.load(dy + at[:, None] * C + c[None, :], mask=there[:, None] & inside[None, :], other=0.0)
                d = d.to(tl.float32)
                k = tl.load(weight + (side * C + c) * (K * K) + i * K + j, mask=inside, other=0.0)
                total += d * k.to(tl.float32)[None, :]
                acc += tl.where(tap == i * K + j, 1.0, 0.0)[:, None] * tl.sum(d * v, 0)[None, :]
        tl.store(dx + place, total.to(dx.dtype.element_ty), mask=here)
    at = (side * C + c)[None, :] * (K * K) + tap[:, None]
    tl.atomic_add(found + at, acc, mask=(tap < K * K)[:, None] & inside[None, :], sem="relaxed")


@triton.jit
def _pack(table, out, BLOCK: tl.constexpr):
    """A table row: address, elements, O·K·I decoding (K, I), strides of o, k, i, and place in ``out``."""
    row = table + tl.program_id(1) * 8
    source = tl.load(row).to(tl.pointer_type(tl.float32))
    count = tl.load(row + 1)
    kernel = tl.load(row + 2)
    inputs = tl.load(row + 3)
    stride_o = tl.load(row + 4)
    stride_k = tl.load(row + 5)
    stride_i = tl.load(row + 6)
    out += tl.load(row + 7)
    for start in range(tl.program_id(0) * BLOCK, count, tl.num_programs(0) * BLOCK):
        e = start + tl.arange(0, BLOCK)
        rest = e // inputs
        at = (rest // kernel) * stride_o + (rest % kernel) * stride_k + (e % inputs) * stride_i
        v = tl.load(source + at, mask=e < count, other=0.0)
        tl.store(out + e, v.to(out.dtype.element_ty), mask=e < count)


@triton.jit
def _unpack(table, HALF: tl.constexpr, BLOCK: tl.constexpr):
    """A table row: address of a gradient, then as for packing; then source's address, partial sums, their stride."""
    row = table + tl.program_id(1) * 10
    target = tl.load(row).to(tl.pointer_type(tl.float32))
    count = tl.load(row + 1)
    kernel = tl.load(row + 2)
    inputs = tl.load(row + 3)
    stride_o = tl.load(row + 4)
    stride_k = tl.load(row + 5)
    stride_i = tl.load(row + 6)
    address = tl.load(row + 7)
    parts = tl.load(row + 8)
    apart = tl.load(row + 9)
    if HALF:
        source = address.to(tl.pointer_type(tl.bfloat16))
    else:
        source = address.to(tl.pointer_type(tl.float32))
    for start in range(tl.program_id(0) * BLOCK, count, tl.num_programs(0) * BLOCK):
        e = start + tl.arange(0, BLOCK)
        rest = e // inputs
        at = (rest // kernel) * stride_o + (rest % kernel) * stride_k + (e % inputs) * stride_i
        v = tl.load(target + at, mask=e < count, other=0.0)
        for part in range(parts):
            v += tl.load(source + part * apart + e, mask=e < count, other=0.0).to(tl.float32)
        tl.store(target + at, v, mask=e < count)


def pack(segments: Sequence[Segment], out: Tensor) -> None:
    rows = [
        (s.tensor.data_ptr() + 4 * s.start, s.count, s.shape[1], s.shape[2], *s.stride, s.offset) for s in segments
    ]
    _pack[(64, len(rows))](_upload(rows, out.device), out, BLOCK=1024)


def unpack(segments: Sequence[Segment], sources: Sequence[Tensor]) -> None:
    rows = []
    for s, source in zip(segments, sources, strict=True):
        parts = source.numel() // s.count
        place = (s.tensor.data_ptr() + 4 * s.start, s.count, s.shape[1], s.shape[2], *s.stride)
        rows.append((*place, source.data_ptr(), parts, s.count))
    if rows:
        half = sources[0].dtype == torch.bfloat16
        _unpack[(64, len(rows))](_upload(rows, segments[0].tensor.device), HALF=half, BLOCK=1024)


def _upload(rows: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    table = torch.from_numpy(np.array(rows, dtype=np.int64))
    return table.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else table


def norm_forward(
    y: Parts, gamma: Tensor, beta: Tensor, eps: float, act: int, residual: Tensor | None, sums: Tensor
) -> Tensor:
    rows, channels = y[0].shape
    sides = len(y)
    z = torch.empty((sides, rows, channels), dtype=y[0].dtype, device=y[0].device)
    block, each, grid = _row_chunks(rows, channels, sides)
    apart, along = _apart(y), y[0].stride(0)
    (br, rw), (ba, aw) = tuning.reduce, tuning.apply
    _statistics[grid](y[0], sums, apart, along, rows, channels, each, BR=br, BC=block, num_warps=rw)
    grid = (triton.cdiv(rows, ba), triton.cdiv(channels, block), sides)
    _normalise[grid](
        y[0], z, y[0] if residual is None else residual, gamma, beta, sums, apart, along, rows, channels, eps,
        ACT=act, ADD=residual is not None, BR=ba, BC=block, num_warps=aw,
    )  # fmt: skip
    return z


def norm_backward(
    grads: Sequence[Gradient],
    y: Parts,
    gamma: Tensor,
    beta: Tensor,
    eps: float,
    act: int,
    residual: Tensor | None,
    sums: Tensor,
    out: Parts,
    found: Tensor,
    keep: bool,
) -> Tensor | None:
    rows, channels = y[0].shape
    sides = len(y)
    a, b = grads[0], grads[-1]
    kept = torch.empty((sides, rows, channels), dtype=y[0].dtype, device=y[0].device) if keep else None
    block, each, grid = _row_chunks(rows, channels, sides)
    (br, rw), (ba, aw) = tuning.reduce, tuning.apply
    two, repeats = len(grads) == 2, a.repeat > 1
    y_side, y_row = _apart(y), y[0].stride(0)
    first, second = a.parts[0], b.parts[0]
    a_side, b_side, a_row, b_row = _apart(a.parts), _apart(b.parts), first.stride(0), second.stride(0)
    _norm_sums[grid](
        first, second, y[0], first if residual is None else residual, first if kept is None else kept,
        gamma, beta, sums, found, a_side, b_side, y_side, a_row, b_row, y_row, rows, channels, eps, a.repeat, each,
        ACT=act, ADD=residual is not None, TWO=two, REPEAT=repeats, KEEP=keep, BR=br, BC=block, num_warps=rw,
    )  # fmt: skip
    if kept is not None:
        first = second = kept
        a_side = b_side = rows * channels if sides > 1 else 0
        a_row = b_row = channels
        two = repeats = False
        act = 0
    grid = (triton.cdiv(rows, ba), triton.cdiv(channels, block), sides)
    _norm_gradient[grid](
        first, second, y[0], out[0], gamma, beta, sums, found, a_side, b_side, y_side, _apart(out),
        a_row, b_row, y_row, out[0].stride(0), rows, channels, eps, a.repeat,
        ACT=act, TWO=two, REPEAT=repeats, BR=ba, BC=block, num_warps=aw,
    )  # fmt: skip
    return kept


def depthwise_forward(x: Tensor, weight: Tensor, window: Window) -> Tensor:
    sides, _, channels = x.shape
    high, wide = window.out
    rows = window.n * high * wide
    y = torch.empty((sides, rows, channels), dtype=x.dtype, device=x.device)
    block = _channel_block(channels)
    bp, warps = tuning.depthwise
    grid = (triton.cdiv(rows, bp), triton.cdiv(channels, block), sides)
    _depthwise[grid](
        x, weight, y, rows, channels, window.h, window.w, high, wide, *window.padding,
        STRIDE=window.stride, K=window.kernel, BP=bp, BC=block, num_warps=warps,
    )  # fmt: skip
    return y


def depthwise_backward(dy: Tensor, x: Tensor, weight: Tensor, window: Window, found: Tensor) -> Tensor:
    sides, rows, channels = x.shape
    dx = torch.empty_like(x)
    high, wide = window.out
    block = _channel_block(channels)
    columns = triton.cdiv(channels, block)
    bp, warps = tuning.depthwise_back
    blocks = triton.cdiv(rows, bp)
    each = max(1, blocks * columns * sides // tuning.programs)
    grid = (triton.cdiv(blocks, each), columns, sides)
    taps = triton.next_power_of_2(window.kernel**2)
    _depthwise_back[grid](
        dy, x, weight, dx, found, rows, channels, window.h, window.w, high, wide, *window.padding, each,
        STRIDE=window.stride, K=window.kernel, KP=taps, BP=bp, BC=block, num_warps=warps,
    )  # fmt: skip
    return dx


def _channel_block(channels: int) -> int:
    return min(tuning.channels, triton.next_power_of_2(channels))


def _row_chunks(rows: int, channels: int, sides: int) -> tuple[int, int, tuple[int, int, int]]:
    """Channels of a block, rows of a program (a multiple of a block's), and the grid of a reduction over rows."""
    block = _channel_block(channels)
    columns = triton.cdiv(channels, block)
    programs = max(1, tuning.programs // (columns * sides))
    step = tuning.reduce[0]
    each = max(step, triton.cdiv(triton.cdiv(rows, programs), step) * step)
    return block, each, (triton.cdiv(rows, each), columns, sides)


def _apart(parts: Parts) -> int:
    """Elements from one side to the other, which may be another allocation."""
    if len(parts) == 1:
        return 0
    return (parts[1].data_ptr() - parts[0].data_ptr()) // parts[0].element_size()
