"""Depthwise convolutions of any size and stride in Triton, with the batch norms before and after them.

Layout and grid are those of ``norm``. 3x3 kernels have faster versions in ``depthwise3``.
"""

from __future__ import annotations

import triton
import triton.language as tl

from bcnet.accel.kernels.norm import SIZES, activate, add_up, blocks, descend, moments, shares


@triton.jit(do_not_specialize=SIZES)
def depthwise(
    x, weight, y, gamma, beta, sums, next_sums, x_side: tl.int64, x_row, M, C, H, W, HO, WO, pad_h, pad_w, eps, each,
    PRE: tl.constexpr, ACT: tl.constexpr, STATS: tl.constexpr, STRIDE: tl.constexpr, K: tl.constexpr,
    A: tl.constexpr, WIDE: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """M output pixels (n, HO, WO) from n images (H, W), which with PRE are first normalised and activated."""
    side, c, inside, C = blocks(C, A, BC)
    x_row = x_row * A
    x += side * (x_side * A)
    y += side.to(tl.int64) * M * C
    weight += side * (K * K * C)
    if PRE:
        _, _, scale, shift = moments(gamma, beta, sums, side, c, inside, M // (HO * WO) * H * W, C, eps)
    begin, end, s, q = shares(M, each, BR, BC)
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
                    v = tl.where(there, activate(v * scale[None, :] + shift[None, :], ACT), 0.0)
                k = tl.load(weight + (i * K + j) * C + c, mask=inside, other=0.0)
                acc += v * k.to(tl.float32)[None, :]
        out = acc.to(y.dtype.element_ty)
        tl.store(y + p[:, None] * C + c[None, :], out, mask=valid[:, None] & inside[None, :])
        if STATS:
            v = out.to(tl.float32)
            s += v
            q += v * v
    if STATS:
        add_up(next_sums, side, c, inside, C, s, q)


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


@triton.jit(do_not_specialize=SIZES)
def depthwise_back(
    dy, x, weight, dx, gamma, beta, sums, found, x_side: tl.int64, x_row,
    M, C, H, W, HO, WO, pad_h, pad_w, eps, each,
    PRE: tl.constexpr, ACT: tl.constexpr, STRIDE: tl.constexpr, K: tl.constexpr,
    A: tl.constexpr, WIDE: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """The gradient of M input pixels (n, H, W), with PRE before their activation."""
    side, c, inside, C = blocks(C, A, BC)
    x_row = x_row * A
    x += side * (x_side * A)
    dx += side.to(tl.int64) * M * C
    dy += side.to(tl.int64) * (M // (H * W)) * HO * WO * C
    weight += side * (K * K * C)
    if PRE:
        mean, rstd, scale, shift = moments(gamma, beta, sums, side, c, inside, M, C, eps)
    begin, end, s, q = shares(M, each, BR, BC)
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
        if PRE:
            u = v * scale[None, :] + shift[None, :]
        t = tl.zeros((BR, BC), tl.float32)
        for i in tl.static_range(K):
            for j in tl.static_range(K):
                d = _arriving(dy, valid, n, h, w, c, inside, C, HO, WO, i, j, STRIDE)
                k = tl.load(weight + (i * K + j) * C + c, mask=inside, other=0.0)
                t += d * k.to(tl.float32)[None, :]
        if PRE:
            t = descend(t, u, ACT)
        rounded = t.to(dx.dtype.element_ty)
        tl.store(dx + p[:, None] * C + c[None, :], rounded, mask=here)
        if PRE:
            t = tl.where(here, rounded.to(tl.float32), 0.0)
            s += t
            q += t * (v - mean[None, :])
    if PRE:
        add_up(found, side, c, inside, C, s, q * rstd[None, :])


@triton.jit(do_not_specialize=SIZES)
def depthwise_weight(
    dy, x, gamma, beta, sums, found_weight, x_side: tl.int64, x_row,
    M, C, H, W, HO, WO, pad_h, pad_w, eps, each,
    PRE: tl.constexpr, ACT: tl.constexpr, STRIDE: tl.constexpr, K: tl.constexpr,
    A: tl.constexpr, WIDE: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """The gradient of one position of a kernel of any size; a grid of (rows, channels, sides * K * K)."""
    side, c, inside, C = blocks(C, A, BC)
    x_row = x_row * A
    tap = side % (K * K)
    side = side // (K * K)
    x += side * (x_side * A)
    dy += side.to(tl.int64) * (M // (H * W)) * HO * WO * C
    if PRE:
        _, _, scale, shift = moments(gamma, beta, sums, side, c, inside, M, C, eps)
    begin, end, acc, _ = shares(M, each, BR, BC)
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
            z = activate(z * scale[None, :] + shift[None, :], ACT).to(dy.dtype.element_ty).to(tl.float32)
        acc += z * _arriving(dy, valid, n, h, w, c, inside, C, HO, WO, 0, 0, STRIDE)
    tl.atomic_add(found_weight + (side * K * K + tap) * C + c, tl.sum(acc, 0), mask=inside, sem="relaxed")
