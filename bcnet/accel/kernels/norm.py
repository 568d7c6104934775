"""Batch norm and what surrounds it, in Triton.

Rows lie with channels innermost. Strides and channels are given in units of A, a power of two that divides them all,
so that the compiler knows how wide it may load. Sums over rows are taken in float32 by many programs and added
atomically, so results differ in the last bits from run to run. A grid is (rows, channels, sides).
"""

from __future__ import annotations

import triton
import triton.language as tl

SIZES = (
    "y_side", "a_side", "b_side", "x_side", "out_side", "y_row", "a_row", "b_row", "x_row", "out_row",
    "M", "C", "N", "H", "W", "HO", "WO", "pad_h", "pad_w", "rows_each", "each", "images", "repeat",
    "labels", "rows", "classes", "slot0", "slot1", "paths",
)  # fmt: skip
"""Arguments for which no binaries of their own are made."""


@triton.jit
def activate(u, ACT: tl.constexpr):
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
def descend(g, u, ACT: tl.constexpr):
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
def blocks(C, A: tl.constexpr, BC: tl.constexpr):
    """Where a program of a grid (rows, channels, sides) works: its side, its channels, which of them there are, and
    how many there are in all."""
    C = C * A
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    return tl.program_id(2), c, c < C, C


@triton.jit
def shares(M, each, BR: tl.constexpr, BC: tl.constexpr):
    """The rows from which and up to which a program works, and two sums (rows, channels) that it begins with."""
    begin = tl.program_id(0) * each
    return begin, tl.minimum(begin + each, M), tl.zeros((BR, BC), tl.float32), tl.zeros((BR, BC), tl.float32)


@triton.jit
def _rows(begin, end, inside, WIDE: tl.constexpr, BR: tl.constexpr):
    """The rows of a block, and which of their channels there are."""
    row = begin + tl.arange(0, BR)
    here = (row < end)[:, None] & inside[None, :]
    if WIDE:
        row = row.to(tl.int64)
    return row, here


@triton.jit
def moments(gamma, beta, sums, side, c, inside, M, C, eps):
    """Mean and 1/deviation of channels, and the norm as ``y * scale + shift``."""
    share = 1.0 / M  # once, not for every channel
    mean = tl.load(sums + side * 2 * C + c, mask=inside, other=0.0) * share
    square = tl.load(sums + side * 2 * C + C + c, mask=inside, other=0.0) * share
    rstd = tl.rsqrt(tl.maximum(square - mean * mean, 0.0) + eps)
    scale = rstd * tl.load(gamma + side * C + c, mask=inside, other=0.0)
    return mean, rstd, scale, tl.load(beta + side * C + c, mask=inside, other=0.0) - mean * scale


@triton.jit
def slopes(gamma, beta, sums, found, side, c, inside, M, C, eps):
    """The norm as ``y * scale + shift``, and its gradient as ``g * scale - (y * slope + mean)``."""
    mean, rstd, scale, shift = moments(gamma, beta, sums, side, c, inside, M, C, eps)
    share = 1.0 / M
    g_mean = tl.load(found + side * 2 * C + c, mask=inside, other=0.0) * share
    slope = tl.load(found + side * 2 * C + C + c, mask=inside, other=0.0) * share * rstd * scale
    return scale, shift, slope, g_mean * scale - mean * slope


@triton.jit
def add_up(sums, side, c, inside, C, s, q):
    """Add sums (rows, channels) of two kinds to (sides, 2, C)."""
    tl.atomic_add(sums + side * 2 * C + c, tl.sum(s, 0), mask=inside, sem="relaxed")
    tl.atomic_add(sums + side * 2 * C + C + c, tl.sum(q, 0), mask=inside, sem="relaxed")


@triton.jit(do_not_specialize=SIZES)
def statistics(
    y, sums, y_side: tl.int64, y_row, M, C, rows_each,
    A: tl.constexpr, WIDE: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    side, c, inside, C = blocks(C, A, BC)
    y_row = y_row * A
    y += side * (y_side * A)
    begin, end, s, q = shares(M, rows_each, BR, BC)
    for start in range(begin, end, BR):
        row, here = _rows(start, end, inside, WIDE, BR)
        v = tl.load(y + row[:, None] * y_row + c[None, :], mask=here, other=0.0).to(tl.float32)
        s += v
        q += v * v
    add_up(sums, side, c, inside, C, s, q)


@triton.jit(do_not_specialize=SIZES)
def normalise(
    y, z, residual, gamma, beta, sums, y_side: tl.int64, y_row, M, C, eps,
    ACT: tl.constexpr, ADD: tl.constexpr,
    A: tl.constexpr, WIDE: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    side, c, inside, C = blocks(C, A, BC)
    y_row = y_row * A
    y += side * (y_side * A)
    z += side.to(tl.int64) * M * C
    residual += side.to(tl.int64) * M * C
    _, _, scale, shift = moments(gamma, beta, sums, side, c, inside, M, C, eps)
    # The last rows first: they are still in the cache.
    row, here = _rows((tl.num_programs(0) - 1 - tl.program_id(0)) * BR, M, inside, WIDE, BR)
    u = tl.load(y + row[:, None] * y_row + c[None, :], mask=here, other=0.0).to(tl.float32)
    u = u * scale[None, :] + shift[None, :]
    if ADD:
        u += tl.load(residual + row[:, None] * C + c[None, :], mask=here, other=0.0).to(tl.float32)
    tl.store(z + row[:, None] * C + c[None, :], activate(u, ACT).to(z.dtype.element_ty), mask=here)


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


@triton.jit(do_not_specialize=SIZES)
def norm_sums(
    a, b, y, residual, kept, gamma, beta, sums, found,
    a_side: tl.int64, b_side: tl.int64, y_side: tl.int64, a_row, b_row, y_row, M, C, eps, repeat, rows_each,
    ACT: tl.constexpr, ADD: tl.constexpr, TWO: tl.constexpr, REPEAT: tl.constexpr, KEEP: tl.constexpr,
    A: tl.constexpr, WIDE: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    side, c, inside, C = blocks(C, A, BC)
    y_row = y_row * A
    a_row = a_row * A
    b_row = b_row * A
    y += side * (y_side * A)
    a += side * (a_side * A)
    b += side * (b_side * A)
    residual += side.to(tl.int64) * M * C
    kept += side.to(tl.int64) * M * C
    mean, rstd, scale, shift = moments(gamma, beta, sums, side, c, inside, M, C, eps)
    begin, end, s, q = shares(M, rows_each, BR, BC)
    for start in range(begin, end, BR):
        row, here = _rows(start, end, inside, WIDE, BR)
        v = tl.load(y + row[:, None] * y_row + c[None, :], mask=here, other=0.0).to(tl.float32)
        g = _gradient(a, b, row, c, here, a_row, b_row, repeat, TWO, REPEAT)
        u = v * scale[None, :] + shift[None, :]
        if ACT and ADD:
            u += tl.load(residual + row[:, None] * C + c[None, :], mask=here, other=0.0).to(tl.float32)
        g = descend(g, u, ACT)
        if KEEP:
            rounded = g.to(kept.dtype.element_ty)
            tl.store(kept + row[:, None] * C + c[None, :], rounded, mask=here)
            g = rounded.to(tl.float32)
        s += g
        q += g * (v - mean[None, :])
    add_up(found, side, c, inside, C, s, q * rstd[None, :])


@triton.jit(do_not_specialize=SIZES)
def norm_gradient(
    a, b, y, dy, gamma, beta, sums, found,
    a_side: tl.int64, b_side: tl.int64, y_side: tl.int64, out_side: tl.int64, a_row, b_row, y_row, out_row,
    M, C, eps, repeat,
    ACT: tl.constexpr, TWO: tl.constexpr, REPEAT: tl.constexpr,
    A: tl.constexpr, WIDE: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    side, c, inside, C = blocks(C, A, BC)
    y_row = y_row * A
    a_row = a_row * A
    b_row = b_row * A
    out_row = out_row * A
    y += side * (y_side * A)
    a += side * (a_side * A)
    b += side * (b_side * A)
    dy += side * (out_side * A)
    scale, shift, slope, mean = slopes(gamma, beta, sums, found, side, c, inside, M, C, eps)
    row, here = _rows((tl.num_programs(0) - 1 - tl.program_id(0)) * BR, M, inside, WIDE, BR)
    v = tl.load(y + row[:, None] * y_row + c[None, :], mask=here, other=0.0).to(tl.float32)
    g = _gradient(a, b, row, c, here, a_row, b_row, repeat, TWO, REPEAT)
    g = descend(g, v * scale[None, :] + shift[None, :], ACT)
    d = g * scale[None, :] - (v * slope[None, :] + mean[None, :])
    tl.store(dy + row[:, None] * out_row + c[None, :], d.to(dy.dtype.element_ty), mask=here)
