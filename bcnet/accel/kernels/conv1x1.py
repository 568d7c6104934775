"""1x1 convolutions in Triton with the batch norms before and after them: matrix products that normalise what they read
and add up the statistics of what they write, so that neither is a pass over memory of its own.

Rows lie with channels innermost; weights are (S, N, C). A grid is (rows, channels, sides).
"""

from __future__ import annotations

import triton
import triton.language as tl

from bcnet.accel.kernels.launch import INTERPRETED
from bcnet.accel.kernels.norm import SIZES, activate, descend, moments, shares

WIDEN = tl.constexpr(INTERPRETED)


@triton.jit
def _product(a, b, total):
    if WIDEN:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, total, input_precision="ieee")


@triton.jit
def _add(out, c, inside, C, s, q):
    tl.atomic_add(out + c, s, mask=inside, sem="relaxed")
    tl.atomic_add(out + C + c, q, mask=inside, sem="relaxed")


@triton.jit(do_not_specialize=SIZES)
def conv1x1(
    x, weight, y, gamma, beta, sums, next_sums, x_side: tl.int64, x_row, M, C, N, eps,
    PRE: tl.constexpr, ACT: tl.constexpr, STATS: tl.constexpr,
    A: tl.constexpr, AO: tl.constexpr, WIDE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """y (M, N) from x (M, C), which with PRE is first normalised and activated."""
    C, N, x_row = C * A, N * AO, x_row * A
    side = tl.program_id(2)
    row = tl.program_id(0) * BM + tl.arange(0, BM)
    o = tl.program_id(1) * BN + tl.arange(0, BN)
    valid, inside = row < M, o < N
    if WIDE:
        row = row.to(tl.int64)
    px = x + side * (x_side * A) + row[:, None] * x_row
    pw = weight + side.to(tl.int64) * N * C + o[None, :] * C
    acc = tl.zeros((BM, BN), tl.float32)
    for start in range(0, C, BK):
        c = start + tl.arange(0, BK)
        given = c < C
        v = tl.load(px + c[None, :], mask=valid[:, None] & given[None, :], other=0.0)
        w = tl.load(pw + c[:, None], mask=given[:, None] & inside[None, :], other=0.0)
        if PRE:
            _, _, scale, shift = moments(gamma, beta, sums, side, c, given, M, C, eps)
            v = activate(v.to(tl.float32) * scale[None, :] + shift[None, :], ACT).to(w.dtype)
        acc = _product(v, w, acc)
    out = acc.to(y.dtype.element_ty)
    here = valid[:, None] & inside[None, :]
    tl.store(y + side.to(tl.int64) * M * N + row[:, None] * N + o[None, :], out, mask=here)
    if STATS:
        f = tl.where(here, out.to(tl.float32), 0.0)
        _add(next_sums + side * 2 * N, o, inside, N, tl.sum(f, 0), tl.sum(f * f, 0))


@triton.jit(do_not_specialize=SIZES)
def conv1x1_back(
    dy, x, weight, dx, gamma, beta, sums, found, found_weight, x_side: tl.int64, x_row, M, C, N, eps, rows_each,
    ACT: tl.constexpr,
    A: tl.constexpr, AO: tl.constexpr, WIDE: tl.constexpr, BM: tl.constexpr, BC: tl.constexpr, BO: tl.constexpr,
):  # fmt: skip
    """The gradient of x (M, C) before its activation with the sums of its norm, and that of the weight, from the
    gradient dy (M, N) of the product; BO is at least N."""
    C, N, x_row = C * A, N * AO, x_row * A
    side = tl.program_id(2)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    o = tl.arange(0, BO)
    inside, there = c < C, o < N
    _, _, scale, shift = moments(gamma, beta, sums, side, c, inside, M, C, eps)
    both = there[:, None] & inside[None, :]
    place = side * (N * C) + o[:, None] * C + c[None, :]
    w = tl.load(weight + place, mask=both, other=0.0)
    x += side * (x_side * A)
    dx += side.to(tl.int64) * M * C
    dy += side.to(tl.int64) * M * N
    begin, end, s, q = shares(M, rows_each, BM, BC)
    dw = tl.zeros((BO, BC), tl.float32)
    for start in range(begin, end, BM):
        row = start + tl.arange(0, BM)
        valid = row < end
        if WIDE:
            row = row.to(tl.int64)
        here = valid[:, None] & inside[None, :]
        d = tl.load(dy + row[:, None] * N + o[None, :], mask=valid[:, None] & there[None, :], other=0.0)
        v = tl.load(x + row[:, None] * x_row + c[None, :], mask=here, other=0.0).to(tl.float32)
        u = v * scale[None, :] + shift[None, :]
        dw = _product(tl.trans(d), activate(u, ACT).to(d.dtype), dw)
        g = descend(_product(d, w, tl.zeros((BM, BC), tl.float32)), u, ACT).to(dx.dtype.element_ty)
        tl.store(dx + row[:, None] * C + c[None, :], g, mask=here)
        g = g.to(tl.float32)
        s += g
        q += g * v
    mean, rstd, _, _ = moments(gamma, beta, sums, side, c, inside, M, C, eps)
    total = tl.sum(s, 0)
    _add(found + side * 2 * C, c, inside, C, total, (tl.sum(q, 0) - total * mean) * rstd)
    tl.atomic_add(found_weight + place, dw, mask=both, sem="relaxed")
