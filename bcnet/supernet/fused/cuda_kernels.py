"""Kernels in Triton: what ``reference`` computes, on CUDA.

Rows lie with channels innermost. Strides and channels are given in units of A, a power of two that divides them all,
so that the compiler knows how wide it may load. Sums over rows are taken in float32 by many programs and added
atomically, so results differ in the last bits from run to run. A grid is (rows, channels, sides).
"""

from __future__ import annotations

import triton
import triton.language as tl

SIZES = (
    "y_side", "a_side", "b_side", "x_side", "out_side", "y_row", "a_row", "b_row", "x_row", "out_row", "M", "C", "H", "W",
    "HO", "WO", "pad_h", "pad_w", "rows_each", "each", "repeat", "labels", "rows", "classes", "slot0", "slot1", "paths",
)  # fmt: skip
"""Arguments for which no binaries of their own are made."""



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
def _moments(gamma, beta, sums, side, c, inside, M, C, eps):
    """Mean and 1/deviation of channels, and the norm as ``y * scale + shift``."""
    mean = tl.load(sums + side * 2 * C + c, mask=inside, other=0.0) / M
    square = tl.load(sums + side * 2 * C + C + c, mask=inside, other=0.0) / M
    rstd = tl.rsqrt(tl.maximum(square - mean * mean, 0.0) + eps)
    scale = rstd * tl.load(gamma + side * C + c, mask=inside, other=0.0)
    return mean, rstd, scale, tl.load(beta + side * C + c, mask=inside, other=0.0) - mean * scale


@triton.jit
def _add_up(sums, side, c, inside, C, s, q):
    """Add sums (rows, channels) of two kinds to (sides, 2, C)."""
    tl.atomic_add(sums + side * 2 * C + c, tl.sum(s, 0), mask=inside, sem="relaxed")
    tl.atomic_add(sums + side * 2 * C + C + c, tl.sum(q, 0), mask=inside, sem="relaxed")


@triton.jit(do_not_specialize=SIZES)
def statistics(
    y, sums, y_side: tl.int64, y_row, M, C, rows_each,
    A: tl.constexpr, WIDE: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    C = C * A
    y_row = y_row * A
    side = tl.program_id(2)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    inside = c < C
    y += side * (y_side * A)
    begin = tl.program_id(0) * rows_each
    end = tl.minimum(begin + rows_each, M)
    s = tl.zeros((BR, BC), tl.float32)
    q = tl.zeros((BR, BC), tl.float32)
    for start in range(begin, end, BR):
        row = start + tl.arange(0, BR)
        here = (row < end)[:, None] & inside[None, :]
        if WIDE:
            row = row.to(tl.int64)
        v = tl.load(y + row[:, None] * y_row + c[None, :], mask=here, other=0.0).to(tl.float32)
        s += v
        q += v * v
    _add_up(sums, side, c, inside, C, s, q)


@triton.jit(do_not_specialize=SIZES)
def normalise(
    y, z, residual, gamma, beta, sums, y_side: tl.int64, y_row, M, C, eps,
    ACT: tl.constexpr, ADD: tl.constexpr,
    A: tl.constexpr, WIDE: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    C = C * A
    y_row = y_row * A
    side = tl.program_id(2)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    inside = c < C
    y += side * (y_side * A)
    z += side.to(tl.int64) * M * C
    residual += side.to(tl.int64) * M * C
    _, _, scale, shift = _moments(gamma, beta, sums, side, c, inside, M, C, eps)
    # The last rows first: they are still in the cache.
    row = (tl.num_programs(0) - 1 - tl.program_id(0)) * BR + tl.arange(0, BR)
    here = (row < M)[:, None] & inside[None, :]
    if WIDE:
        row = row.to(tl.int64)
    u = tl.load(y + row[:, None] * y_row + c[None, :], mask=here, other=0.0).to(tl.float32)
    u = u * scale[None, :] + shift[None, :]
    if ADD:
        u += tl.load(residual + row[:, None] * C + c[None, :], mask=here, other=0.0).to(tl.float32)
    tl.store(z + row[:, None] * C + c[None, :], _activate(u, ACT).to(z.dtype.element_ty), mask=here)


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
    C = C * A
    y_row = y_row * A
    a_row = a_row * A
    b_row = b_row * A
    side = tl.program_id(2)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    inside = c < C
    y += side * (y_side * A)
    a += side * (a_side * A)
    b += side * (b_side * A)
    residual += side.to(tl.int64) * M * C
    kept += side.to(tl.int64) * M * C
    mean, rstd, scale, shift = _moments(gamma, beta, sums, side, c, inside, M, C, eps)
    begin = tl.program_id(0) * rows_each
    end = tl.minimum(begin + rows_each, M)
    s = tl.zeros((BR, BC), tl.float32)
    q = tl.zeros((BR, BC), tl.float32)
    for start in range(begin, end, BR):
        row = start + tl.arange(0, BR)
        here = (row < end)[:, None] & inside[None, :]
        if WIDE:
            row = row.to(tl.int64)
        v = tl.load(y + row[:, None] * y_row + c[None, :], mask=here, other=0.0).to(tl.float32)
        g = _gradient(a, b, row, c, here, a_row, b_row, repeat, TWO, REPEAT)
        u = v * scale[None, :] + shift[None, :]
        if ACT and ADD:
            u += tl.load(residual + row[:, None] * C + c[None, :], mask=here, other=0.0).to(tl.float32)
        g = _descend(g, u, ACT)
        if KEEP:
            rounded = g.to(kept.dtype.element_ty)
            tl.store(kept + row[:, None] * C + c[None, :], rounded, mask=here)
            g = rounded.to(tl.float32)
        s += g
        q += g * (v - mean[None, :])
    _add_up(found, side, c, inside, C, s, q * rstd[None, :])


@triton.jit(do_not_specialize=SIZES)
def norm_gradient(
    a, b, y, dy, gamma, beta, sums, found,
    a_side: tl.int64, b_side: tl.int64, y_side: tl.int64, out_side: tl.int64, a_row, b_row, y_row, out_row,
    M, C, eps, repeat,
    ACT: tl.constexpr, TWO: tl.constexpr, REPEAT: tl.constexpr,
    A: tl.constexpr, WIDE: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    C = C * A
    y_row = y_row * A
    a_row = a_row * A
    b_row = b_row * A
    out_row = out_row * A
    side = tl.program_id(2)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    inside = c < C
    y += side * (y_side * A)
    a += side * (a_side * A)
    b += side * (b_side * A)
    dy += side * (out_side * A)
    mean, rstd, scale, shift = _moments(gamma, beta, sums, side, c, inside, M, C, eps)
    g_mean = tl.load(found + side * 2 * C + c, mask=inside, other=0.0) / M
    slope = tl.load(found + side * 2 * C + C + c, mask=inside, other=0.0) / M * rstd
    row = (tl.num_programs(0) - 1 - tl.program_id(0)) * BR + tl.arange(0, BR)
    here = (row < M)[:, None] & inside[None, :]
    if WIDE:
        row = row.to(tl.int64)
    v = tl.load(y + row[:, None] * y_row + c[None, :], mask=here, other=0.0).to(tl.float32)
    g = _gradient(a, b, row, c, here, a_row, b_row, repeat, TWO, REPEAT)
    g = _descend(g, v * scale[None, :] + shift[None, :], ACT)
    d = scale[None, :] * (g - g_mean[None, :] - (v - mean[None, :]) * slope[None, :])
    tl.store(dy + row[:, None] * out_row + c[None, :], d.to(dy.dtype.element_ty), mask=here)


@triton.jit(do_not_specialize=SIZES)
def depthwise(
    x, weight, y, gamma, beta, sums, next_sums, x_side: tl.int64, x_row, M, C, H, W, HO, WO, pad_h, pad_w, eps, each,
    PRE: tl.constexpr, ACT: tl.constexpr, STATS: tl.constexpr, STRIDE: tl.constexpr, K: tl.constexpr,
    A: tl.constexpr, WIDE: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """M output pixels (n, HO, WO) from n images (H, W), which with PRE are first normalised and activated."""
    C = C * A
    x_row = x_row * A
    side = tl.program_id(2)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    inside = c < C
    x += side * (x_side * A)
    y += side.to(tl.int64) * M * C
    weight += side * (K * K * C)
    if PRE:
        _, _, scale, shift = _moments(gamma, beta, sums, side, c, inside, M // (HO * WO) * H * W, C, eps)
    s = tl.zeros((BR, BC), tl.float32)
    q = tl.zeros((BR, BC), tl.float32)
    begin = tl.program_id(0) * each
    end = tl.minimum(begin + each, M)
    for start in range(begin, end, BR):
        p = start + tl.arange(0, BR)
        valid = p < end
        n = p // (HO * WO)
        h = (p // WO) % HO * STRIDE - pad_h
        w = p % WO * STRIDE - pad_w
        if WIDE:
            n = n.to(tl.int64)
            p = p.to(tl.int64)
        first = (n * H + h) * W + w
        acc = tl.zeros((BR, BC), tl.float32)
        for i in tl.static_range(K):
            for j in tl.static_range(K):
                there = valid & (h + i >= 0) & (h + i < H) & (w + j >= 0) & (w + j < W)
                there = there[:, None] & inside[None, :]
                at = (first + (i * W + j))[:, None] * x_row + c[None, :]
                v = tl.load(x + at, mask=there, other=0.0).to(tl.float32)
                if PRE:
                    v = tl.where(there, _activate(v * scale[None, :] + shift[None, :], ACT), 0.0)
                k = tl.load(weight + (i * K + j) * C + c, mask=inside, other=0.0)
                acc += v * k.to(tl.float32)[None, :]
        out = acc.to(y.dtype.element_ty)
        tl.store(y + p[:, None] * C + c[None, :], out, mask=valid[:, None] & inside[None, :])
        if STATS:
            v = out.to(tl.float32)
            s += v
            q += v * v
    if STATS:
        _add_up(next_sums, side, c, inside, C, s, q)


@triton.jit
def _arriving(
    dy, valid, n, h, w, c, inside, C, HO, WO, ROW: tl.constexpr, COLUMN: tl.constexpr, STRIDE: tl.constexpr,
):  # fmt: skip
    """The gradient of the outputs that pixels (h, w) reach through the kernel's position (ROW, COLUMN)."""
    hi = h - ROW
    wj = w - COLUMN
    there = valid & (hi >= 0) & (hi < HO * STRIDE) & (wj >= 0) & (wj < WO * STRIDE)
    if STRIDE > 1:
        there &= (hi % STRIDE == 0) & (wj % STRIDE == 0)
    at = (n * HO + hi // STRIDE) * WO + wj // STRIDE
    return tl.load(dy + at[:, None] * C + c[None, :], mask=there[:, None] & inside[None, :], other=0.0).to(tl.float32)


@triton.jit
def _tap(
    total, acc, z, dy, weight, valid, n, h, w, c, inside, C, HO, WO,
    ROW: tl.constexpr, COLUMN: tl.constexpr, STRIDE: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    d = _arriving(dy, valid, n, h, w, c, inside, C, HO, WO, ROW, COLUMN, STRIDE)
    k = tl.load(weight + (ROW * K + COLUMN) * C + c, mask=inside, other=0.0)
    return total + d * k.to(tl.float32)[None, :], acc + d * z


@triton.jit(do_not_specialize=SIZES)
def depthwise_back(
    dy, x, weight, dx, gamma, beta, sums, found, found_weight, x_side: tl.int64, x_row,
    M, C, H, W, HO, WO, pad_h, pad_w, eps, each,
    PRE: tl.constexpr, ACT: tl.constexpr, TAPS: tl.constexpr, STRIDE: tl.constexpr, K: tl.constexpr,
    A: tl.constexpr, WIDE: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """The gradient of M input pixels (n, H, W), with PRE before their activation; with TAPS (K is 3) that of the
    weights as well, of which every position is summed in registers."""
    C = C * A
    x_row = x_row * A
    side = tl.program_id(2)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    inside = c < C
    x += side * (x_side * A)
    dx += side.to(tl.int64) * M * C
    dy += side.to(tl.int64) * (M // (H * W)) * HO * WO * C
    weight += side * (K * K * C)
    if PRE:
        mean, rstd, scale, shift = _moments(gamma, beta, sums, side, c, inside, M, C, eps)
    s = tl.zeros((BR, BC), tl.float32)
    q = tl.zeros((BR, BC), tl.float32)
    a0 = tl.zeros((BR, BC), tl.float32)
    a1 = tl.zeros((BR, BC), tl.float32)
    a2 = tl.zeros((BR, BC), tl.float32)
    a3 = tl.zeros((BR, BC), tl.float32)
    a4 = tl.zeros((BR, BC), tl.float32)
    a5 = tl.zeros((BR, BC), tl.float32)
    a6 = tl.zeros((BR, BC), tl.float32)
    a7 = tl.zeros((BR, BC), tl.float32)
    a8 = tl.zeros((BR, BC), tl.float32)
    begin = tl.program_id(0) * each
    end = tl.minimum(begin + each, M)
    for start in range(begin, end, BR):
        p = start + tl.arange(0, BR)
        valid = p < end
        n = p // (H * W)
        h = (p // W) % H + pad_h
        w = p % W + pad_w
        if WIDE:
            n = n.to(tl.int64)
            p = p.to(tl.int64)
        here = valid[:, None] & inside[None, :]
        v = tl.load(x + p[:, None] * x_row + c[None, :], mask=here, other=0.0).to(tl.float32)
        z = v
        if PRE:
            u = v * scale[None, :] + shift[None, :]
            z = _activate(u, ACT).to(dx.dtype.element_ty).to(tl.float32)
        t = tl.zeros((BR, BC), tl.float32)
        if TAPS:
            t, a0 = _tap(t, a0, z, dy, weight, valid, n, h, w, c, inside, C, HO, WO, 0, 0, STRIDE, K)
            t, a1 = _tap(t, a1, z, dy, weight, valid, n, h, w, c, inside, C, HO, WO, 0, 1, STRIDE, K)
            t, a2 = _tap(t, a2, z, dy, weight, valid, n, h, w, c, inside, C, HO, WO, 0, 2, STRIDE, K)
            t, a3 = _tap(t, a3, z, dy, weight, valid, n, h, w, c, inside, C, HO, WO, 1, 0, STRIDE, K)
            t, a4 = _tap(t, a4, z, dy, weight, valid, n, h, w, c, inside, C, HO, WO, 1, 1, STRIDE, K)
            t, a5 = _tap(t, a5, z, dy, weight, valid, n, h, w, c, inside, C, HO, WO, 1, 2, STRIDE, K)
            t, a6 = _tap(t, a6, z, dy, weight, valid, n, h, w, c, inside, C, HO, WO, 2, 0, STRIDE, K)
            t, a7 = _tap(t, a7, z, dy, weight, valid, n, h, w, c, inside, C, HO, WO, 2, 1, STRIDE, K)
            t, a8 = _tap(t, a8, z, dy, weight, valid, n, h, w, c, inside, C, HO, WO, 2, 2, STRIDE, K)
        else:
            for i in tl.static_range(K):
                for j in tl.static_range(K):
                    d = _arriving(dy, valid, n, h, w, c, inside, C, HO, WO, i, j, STRIDE)
                    k = tl.load(weight + (i * K + j) * C + c, mask=inside, other=0.0)
                    t += d * k.to(tl.float32)[None, :]
        if PRE:
            t = _descend(t, u, ACT)
        rounded = t.to(dx.dtype.element_ty)
        tl.store(dx + p[:, None] * C + c[None, :], rounded, mask=here)
        if PRE:
            t = tl.where(here, rounded.to(tl.float32), 0.0)
            s += t
            q += t * (v - mean[None, :])
    if PRE:
        _add_up(found, side, c, inside, C, s, q * rstd[None, :])
    if TAPS:
        out = found_weight + side * (K * K * C) + c
        tl.atomic_add(out, tl.sum(a0, 0), mask=inside, sem="relaxed")
        tl.atomic_add(out + C, tl.sum(a1, 0), mask=inside, sem="relaxed")
        tl.atomic_add(out + 2 * C, tl.sum(a2, 0), mask=inside, sem="relaxed")
        tl.atomic_add(out + 3 * C, tl.sum(a3, 0), mask=inside, sem="relaxed")
        tl.atomic_add(out + 4 * C, tl.sum(a4, 0), mask=inside, sem="relaxed")
        tl.atomic_add(out + 5 * C, tl.sum(a5, 0), mask=inside, sem="relaxed")
        tl.atomic_add(out + 6 * C, tl.sum(a6, 0), mask=inside, sem="relaxed")
        tl.atomic_add(out + 7 * C, tl.sum(a7, 0), mask=inside, sem="relaxed")
        tl.atomic_add(out + 8 * C, tl.sum(a8, 0), mask=inside, sem="relaxed")


@triton.jit(do_not_specialize=SIZES)
def depthwise_weight(
    dy, x, gamma, beta, sums, found_weight, x_side: tl.int64, x_row,
    M, C, H, W, HO, WO, pad_h, pad_w, eps, each,
    PRE: tl.constexpr, ACT: tl.constexpr, STRIDE: tl.constexpr, K: tl.constexpr,
    A: tl.constexpr, WIDE: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """The gradient of one position of a kernel of any size; a grid of (rows, channels, sides * K * K)."""
    C = C * A
    x_row = x_row * A
    tap = tl.program_id(2) % (K * K)
    side = tl.program_id(2) // (K * K)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    inside = c < C
    x += side * (x_side * A)
    dy += side.to(tl.int64) * (M // (H * W)) * HO * WO * C
    if PRE:
        _, _, scale, shift = _moments(gamma, beta, sums, side, c, inside, M, C, eps)
    acc = tl.zeros((BR, BC), tl.float32)
    begin = tl.program_id(0) * each
    end = tl.minimum(begin + each, M)
    for start in range(begin, end, BR):
        p = start + tl.arange(0, BR)
        valid = p < end
        n = p // (H * W)
        h = (p // W) % H + pad_h - tap // K
        w = p % W + pad_w - tap % K
        if WIDE:
            n = n.to(tl.int64)
            p = p.to(tl.int64)
        here = valid[:, None] & inside[None, :]
        z = tl.load(x + p[:, None] * x_row + c[None, :], mask=here, other=0.0).to(tl.float32)
        if PRE:
            z = _activate(z * scale[None, :] + shift[None, :], ACT).to(dy.dtype.element_ty).to(tl.float32)
        acc += z * _arriving(dy, valid, n, h, w, c, inside, C, HO, WO, 0, 0, STRIDE)
    tl.atomic_add(found_weight + (side * K * K + tap) * C + c, tl.sum(acc, 0), mask=inside, sem="relaxed")


@triton.jit(do_not_specialize=SIZES)
def entropy(
    logits, bias, labels, slope, found, losses, rows, classes, slot0, slot1, share0, share1, smoothing,
    BIAS: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Cross entropy of rows (sides, rows, classes) and its slope; a grid of (rows, sides)."""
    side = tl.program_id(1)
    row = tl.program_id(0) * BR + tl.arange(0, BR)
    c = tl.arange(0, BC)
    inside = c < classes
    here = (row < rows)[:, None] & inside[None, :]
    at = (side * rows + row)[:, None] * classes + c[None, :]
    v = tl.load(logits + at, mask=here, other=0.0).to(tl.float32)
    if BIAS:
        v += tl.load(bias + side * classes + c, mask=inside, other=0.0)[None, :]
    v = tl.where(inside[None, :], v, float("-inf"))
    v -= tl.max(v, 1)[:, None]
    e = tl.exp(v)
    total = tl.sum(e, 1)
    log = tl.where(inside[None, :], v - tl.log(total)[:, None], 0.0)
    label = tl.load(labels + row, mask=row < rows, other=0)
    target = tl.where(c[None, :] == label[:, None], 1.0 - smoothing, 0.0) + smoothing / classes
    loss = tl.where(here, -target * log, 0.0) / rows
    tl.atomic_add(losses + tl.where(side == 0, slot0, slot1), tl.sum(tl.sum(loss, 1), 0), sem="relaxed")
    d = (e / total[:, None] - target) * (tl.where(side == 0, share0, share1) / rows)
    d = tl.where(here, d, 0.0)
    tl.store(slope + at, d.to(slope.dtype.element_ty), mask=here)
    if BIAS:
        tl.atomic_add(found + side * classes + c, tl.sum(d, 0), mask=inside, sem="relaxed")


@triton.jit(do_not_specialize=SIZES)
def pack(table, half, full, BLOCK: tl.constexpr):
    """A table row: address, elements, O·K·I decoding (K, I), strides of o, k, i, place, whether it stays float32."""
    row = table + tl.program_id(1) * 9
    source = tl.load(row).to(tl.pointer_type(tl.float32))
    count = tl.load(row + 1).to(tl.int32)
    kernel = tl.load(row + 2).to(tl.int32)
    inputs = tl.load(row + 3).to(tl.int32)
    stride_o = tl.load(row + 4)
    stride_k = tl.load(row + 5)
    stride_i = tl.load(row + 6)
    place = tl.load(row + 7)
    for start in range(tl.program_id(0) * BLOCK, count, tl.num_programs(0) * BLOCK):
        e = start + tl.arange(0, BLOCK)
        rest = e // inputs
        at = (rest // kernel) * stride_o + (rest % kernel) * stride_k + (e % inputs) * stride_i
        v = tl.load(source + at, mask=e < count, other=0.0)
        if tl.load(row + 8) != 0:
            tl.store(full + place + e, v, mask=e < count)
        else:
            tl.store(half + place + e, v.to(half.dtype.element_ty), mask=e < count)


@triton.jit(do_not_specialize=SIZES)
def unpack(wholes, table, paths, HALF: tl.constexpr, BLOCK: tl.constexpr):
    """Adds to every element of a gradient what the paths found for it.

    A row of ``wholes``: address, elements, K, I, strides of o, k, i. For each there are ``paths`` rows of ``table``:
    address, first o and their number, first i and their number, partial sums, their stride, whether they are float32.
    """
    row = wholes + tl.program_id(1) * 7
    target = tl.load(row).to(tl.pointer_type(tl.float32))
    count = tl.load(row + 1).to(tl.int32)
    kernel = tl.load(row + 2).to(tl.int32)
    inputs = tl.load(row + 3).to(tl.int32)
    stride_o = tl.load(row + 4)
    stride_k = tl.load(row + 5)
    stride_i = tl.load(row + 6)
    for start in range(tl.program_id(0) * BLOCK, count, tl.num_programs(0) * BLOCK):
        e = start + tl.arange(0, BLOCK)
        valid = e < count
        i = e % inputs
        k = e // inputs % kernel
        o = e // inputs // kernel
        at = o * stride_o + k * stride_k + i * stride_i
        v = tl.load(target + at, mask=valid, other=0.0)
        for path in range(paths):
            one = table + (tl.program_id(1) * paths + path) * 8
            address = tl.load(one)
            po = o - tl.load(one + 1).to(tl.int32)
            pi = i - tl.load(one + 3).to(tl.int32)
            wide = tl.load(one + 4).to(tl.int32)
            mine = valid & (po >= 0) & (po < tl.load(one + 2)) & (pi >= 0) & (pi < wide)
            place = (po * kernel + k) * wide + pi
            apart = tl.load(one + 6)
            for part in range(tl.load(one + 5).to(tl.int32)):
                if tl.load(one + 7) != 0:
                    v += tl.load(address.to(tl.pointer_type(tl.float32)) + part * apart + place, mask=mine, other=0.0)
                else:
                    half = address.to(tl.pointer_type(HALF))
                    v += tl.load(half + part * apart + place, mask=mine, other=0.0).to(tl.float32)
        tl.store(target + at, v, mask=valid)
