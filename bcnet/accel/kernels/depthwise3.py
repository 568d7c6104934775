"""Depthwise convolutions of 3x3 in Triton, with the batch norms before and after them; see ``depthwise``.

Every position of the kernel has its sum in registers, and pixels are read as rarely as can be. Where images keep their
size, programs own columns and go down the rows; forwards they own pairs of columns, so that four are read for two, and
the next row is on its way while one is computed.
"""

from __future__ import annotations

import triton
import triton.language as tl

from bcnet.accel.kernels.norm import SIZES, activate, add_up, blocks, descend, moments


@triton.jit
def _weights(weight, c, inside, C, K: tl.constexpr):
    return tl.load(weight + K * C + c, mask=inside, other=0.0).to(tl.float32)[None, :]


@triton.jit
def _pairs(start, images, H, W, inside, WIDE: tl.constexpr, BR: tl.constexpr):
    """Of pairs of columns: the pixel where each begins, and which of the columns -1, 0, 1 and 2 there are."""
    pair = start + tl.arange(0, BR)
    each = (W + 1) // 2
    valid = pair < images * each
    w = pair % each * 2
    n = pair // each
    if WIDE:
        n = n.to(tl.int64)
    here = valid[:, None] & inside[None, :]
    beside = here & (w + 1 < W)[:, None]
    return n * H * W + w, here & (w > 0)[:, None], here, beside, beside & (w + 2 < W)[:, None]


@triton.jit
def _four(p, step, m0, m1, m2, m3):
    """The columns -1, 0, 1 and 2 of a row."""
    return (
        tl.load(p - step, mask=m0, other=0.0),
        tl.load(p, mask=m1, other=0.0),
        tl.load(p + step, mask=m2, other=0.0),
        tl.load(p + 2 * step, mask=m3, other=0.0),
    )


@triton.jit
def _seen(v, there, scale, shift, PRE: tl.constexpr, ACT: tl.constexpr):
    """Pixels as the convolution sees them, zero outside; with PRE normalised and activated."""
    v = v.to(tl.float32)
    if PRE:
        v = tl.where(there, activate(v * scale[None, :] + shift[None, :], ACT), 0.0)
    return v


@triton.jit
def _finished(p, here, value, s, q, STATS: tl.constexpr):
    """Store outputs, and add them to their statistics."""
    out = value.to(p.dtype.element_ty)
    tl.store(p, out, mask=here)
    if STATS:
        v = tl.where(here, out.to(tl.float32), 0.0)
        s += v
        q += v * v
    return s, q


@triton.jit(do_not_specialize=SIZES)
def depthwise_rows(
    x, weight, y, gamma, beta, sums, next_sums, x_side: tl.int64, x_row, images, C, H, W, eps,
    PRE: tl.constexpr, ACT: tl.constexpr, STATS: tl.constexpr,
    A: tl.constexpr, WIDE: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """``depthwise`` for 3x3 kernels that keep the size."""
    side, c, inside, C = blocks(C, A, BC)
    x_row = x_row * A
    scale, shift = tl.zeros((BC,), tl.float32), tl.zeros((BC,), tl.float32)
    if PRE:
        _, _, scale, shift = moments(gamma, beta, sums, side, c, inside, images * H * W, C, eps)
    weight += side * (9 * C)
    k0 = _weights(weight, c, inside, C, 0)
    k1 = _weights(weight, c, inside, C, 1)
    k2 = _weights(weight, c, inside, C, 2)
    k3 = _weights(weight, c, inside, C, 3)
    k4 = _weights(weight, c, inside, C, 4)
    k5 = _weights(weight, c, inside, C, 5)
    k6 = _weights(weight, c, inside, C, 6)
    k7 = _weights(weight, c, inside, C, 7)
    k8 = _weights(weight, c, inside, C, 8)
    zero = tl.zeros((BR, 1), tl.int32)  # masks are tensors, but r is a plain number when interpreted
    first, m0, m1, m2, m3 = _pairs(tl.program_id(0) * BR, images, H, W, inside, WIDE, BR)
    px = x + side * (x_side * A) + first[:, None] * x_row + c[None, :]
    py = y + side.to(tl.int64) * images * H * W * C + first[:, None] * C + c[None, :]
    s = tl.zeros((BR, BC), tl.float32)
    q = tl.zeros((BR, BC), tl.float32)
    e_above = tl.zeros((BR, BC), tl.float32)
    e_now = tl.zeros((BR, BC), tl.float32)
    o_above = tl.zeros((BR, BC), tl.float32)
    o_now = tl.zeros((BR, BC), tl.float32)
    x0, x1, x2, x3 = _four(px, x_row, m0, m1, m2, m3)
    for r in range(H):
        more = m1 & (zero + (r + 1) < H)
        n0, n1, n2, n3 = _four(px + (r + 1) * (W * x_row), x_row, m0 & more, more, m2 & more, m3 & more)
        z0 = _seen(x0, m0, scale, shift, PRE, ACT)
        z1 = _seen(x1, m1, scale, shift, PRE, ACT)
        z2 = _seen(x2, m2, scale, shift, PRE, ACT)
        z3 = _seen(x3, m3, scale, shift, PRE, ACT)
        e_above = e_above + z0 * k6 + z1 * k7 + z2 * k8
        o_above = o_above + z1 * k6 + z2 * k7 + z3 * k8
        if r > 0:
            s, q = _finished(py + (r - 1) * (W * C), m1, e_above, s, q, STATS)
            s, q = _finished(py + ((r - 1) * W + 1) * C, m2, o_above, s, q, STATS)
        e_above = e_now + z0 * k3 + z1 * k4 + z2 * k5
        o_above = o_now + z1 * k3 + z2 * k4 + z3 * k5
        e_now = z0 * k0 + z1 * k1 + z2 * k2
        o_now = z1 * k0 + z2 * k1 + z3 * k2
        x0, x1, x2, x3 = n0, n1, n2, n3
    s, q = _finished(py + (H - 1) * (W * C), m1, e_above, s, q, STATS)
    s, q = _finished(py + ((H - 1) * W + 1) * C, m2, o_above, s, q, STATS)
    if STATS:
        add_up(next_sums, side, c, inside, C, s, q)


@triton.jit
def _output(p, here, t, v, scale, shift, s, q, PRE: tl.constexpr, ACT: tl.constexpr):
    """Store a gradient t, with PRE before the activation at v, and add it to the sums of the norm."""
    v = v.to(tl.float32)
    if PRE:
        t = descend(t, v * scale[None, :] + shift[None, :], ACT)
    rounded = t.to(p.dtype.element_ty)
    tl.store(p, rounded, mask=here)
    if PRE:
        g = tl.where(here, rounded.to(tl.float32), 0.0)
        s += g
        q += g * v
    return s, q


@triton.jit
def _row(dy, first, r, W, w, c, valid, inside, C, J: tl.constexpr):
    """Row r of the outputs' gradient, J columns to the right, zero outside."""
    there = valid
    if J != 0:
        there = valid & (w + J >= 0) & (w + J < W)
    there = there[:, None] & inside[None, :]
    return tl.load(dy + (first + (r * W + J))[:, None] * C + c[None, :], mask=there, other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=SIZES)
def depthwise_rows_back(
    dy, x, weight, dx, gamma, beta, sums, found, found_weight, x_side: tl.int64, x_row, images, C, H, W, eps,
    PRE: tl.constexpr, ACT: tl.constexpr,
    A: tl.constexpr, WIDE: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """``depthwise_back`` for 3x3 kernels that keep the size, down the rows as ``depthwise_rows``: row r of the
    outputs' gradient meets the inputs of rows r - 1 (``old``), r and r + 1 (``new``)."""
    side, c, inside, C = blocks(C, A, BC)
    x_row = x_row * A
    x += side * (x_side * A)
    dx += side.to(tl.int64) * images * H * W * C
    dy += side.to(tl.int64) * images * H * W * C
    weight += side * (9 * C)
    scale = tl.zeros((BC,), tl.float32)
    shift = tl.zeros((BC,), tl.float32)
    if PRE:
        _, _, scale, shift = moments(gamma, beta, sums, side, c, inside, images * H * W, C, eps)
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
    for start in range(tl.program_id(0) * BR, images * W, tl.num_programs(0) * BR):
        column = start + tl.arange(0, BR)
        valid = column < images * W
        w = column % W
        first = column // W * H * W + w
        if WIDE:
            first = (column // W).to(tl.int64) * H * W + w
        here = valid[:, None] & inside[None, :]
        above = tl.zeros((BR, BC), tl.float32)
        now = tl.zeros((BR, BC), tl.float32)
        old = tl.zeros((BR, BC), tl.float32)
        v_old = tl.zeros((BR, BC), tl.float32)
        v = tl.load(x + first[:, None] * x_row + c[None, :], mask=here, other=0.0).to(tl.float32)
        z = v
        if PRE:
            z = tl.where(here, activate(v * scale[None, :] + shift[None, :], ACT), 0.0)
        for r in range(H + 1):
            reached = valid & (tl.zeros_like(w) + r < H)  # a tensor, as r is a plain number in the interpreter
            right = _row(dy, first, r, W, w, c, reached, inside, C, 1)
            middle = _row(dy, first, r, W, w, c, reached, inside, C, 0)
            left = _row(dy, first, r, W, w, c, reached, inside, C, -1)
            follows = (valid & (tl.zeros_like(w) + r + 1 < H))[:, None] & inside[None, :]
            v_new = tl.load(x + (first + (r + 1) * W)[:, None] * x_row + c[None, :], mask=follows, other=0.0)
            v_new = v_new.to(tl.float32)
            new = v_new
            if PRE:
                new = tl.where(follows, activate(v_new * scale[None, :] + shift[None, :], ACT), 0.0)
            a0 += right * old
            a1 += middle * old
            a2 += left * old
            a3 += right * z
            a4 += middle * z
            a5 += left * z
            a6 += right * new
            a7 += middle * new
            a8 += left * new
            out = above + right * _weights(weight, c, inside, C, 0) + middle * _weights(weight, c, inside, C, 1)
            out += left * _weights(weight, c, inside, C, 2)
            above = now + right * _weights(weight, c, inside, C, 3) + middle * _weights(weight, c, inside, C, 4)
            above += left * _weights(weight, c, inside, C, 5)
            now = right * _weights(weight, c, inside, C, 6) + middle * _weights(weight, c, inside, C, 7)
            now += left * _weights(weight, c, inside, C, 8)
            if r > 0:
                if PRE:
                    out = descend(out, v_old * scale[None, :] + shift[None, :], ACT)
                rounded = out.to(dx.dtype.element_ty)
                tl.store(dx + (first + (r - 1) * W)[:, None] * C + c[None, :], rounded, mask=here)
                if PRE:
                    g = tl.where(here, rounded.to(tl.float32), 0.0)
                    s += g
                    q += g * v_old
            old = z
            z = new
            v_old = v
            v = v_new
    if PRE:
        mean, rstd, _, _ = moments(gamma, beta, sums, side, c, inside, images * H * W, C, eps)
        add_up(found, side, c, inside, C, s, (q - s * mean[None, :]) * rstd[None, :])
    _add_taps(found_weight + side * (9 * C) + c, inside, C, a0, a1, a2, a3, a4, a5, a6, a7, a8)


@triton.jit
def _input(x, at, c, here, x_row, scale, shift, PRE: tl.constexpr, ACT: tl.constexpr):
    """Pixels as they were, and as the convolution saw them."""
    v = tl.load(x + at[:, None] * x_row + c[None, :], mask=here, other=0.0).to(tl.float32)
    z = v
    if PRE:
        z = activate(v * scale[None, :] + shift[None, :], ACT)
    return v, tl.where(here, z, 0.0)


@triton.jit(do_not_specialize=SIZES)
def depthwise_half_back(
    dy, x, weight, dx, gamma, beta, sums, found, found_weight, x_side: tl.int64, x_row, images, C, H, W, eps,
    PRE: tl.constexpr, ACT: tl.constexpr,
    A: tl.constexpr, WIDE: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """``depthwise_back`` for 3x3 kernels that halve images of even size: of the gradients of four neighbouring
    outputs, to the right (``e``), below (``s``) and both (``se``), come those of four inputs."""
    side, c, inside, C = blocks(C, A, BC)
    x_row = x_row * A
    HO = H // 2
    WO = W // 2
    M = images * HO * WO
    x += side * (x_side * A)
    dx += side.to(tl.int64) * images * H * W * C
    dy += side.to(tl.int64) * M * C
    weight += side * (9 * C)
    scale = tl.zeros((BC,), tl.float32)
    shift = tl.zeros((BC,), tl.float32)
    if PRE:
        _, _, scale, shift = moments(gamma, beta, sums, side, c, inside, images * H * W, C, eps)
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
    for start in range(tl.program_id(0) * BR, M, tl.num_programs(0) * BR):
        p = start + tl.arange(0, BR)
        valid = p < M
        h = p // WO % HO
        w = p % WO
        n = p // WO // HO
        if WIDE:
            n = n.to(tl.int64)
            p = p.to(tl.int64)
        here = valid[:, None] & inside[None, :]
        more_e = (valid & (w + 1 < WO))[:, None] & inside[None, :]
        more_s = (valid & (h + 1 < HO))[:, None] & inside[None, :]
        place = dy + p[:, None] * C + c[None, :]
        d = tl.load(place, mask=here, other=0.0).to(tl.float32)
        d_e = tl.load(place + C, mask=more_e, other=0.0).to(tl.float32)
        d_s = tl.load(place + WO * C, mask=more_s, other=0.0).to(tl.float32)
        d_se = tl.load(place + (WO + 1) * C, mask=more_e & more_s, other=0.0).to(tl.float32)
        at = (n * H + 2 * h) * W + 2 * w
        v, z = _input(x, at, c, here, x_row, scale, shift, PRE, ACT)
        a4 += d * z
        t = d * _weights(weight, c, inside, C, 4)
        s, q = _output(dx + at[:, None] * C + c[None, :], here, t, v, scale, shift, s, q, PRE, ACT)
        v, z = _input(x, at + 1, c, here, x_row, scale, shift, PRE, ACT)
        a3 += d_e * z
        a5 += d * z
        t = d_e * _weights(weight, c, inside, C, 3) + d * _weights(weight, c, inside, C, 5)
        s, q = _output(dx + (at + 1)[:, None] * C + c[None, :], here, t, v, scale, shift, s, q, PRE, ACT)
        v, z = _input(x, at + W, c, here, x_row, scale, shift, PRE, ACT)
        a1 += d_s * z
        a7 += d * z
        t = d_s * _weights(weight, c, inside, C, 1) + d * _weights(weight, c, inside, C, 7)
        s, q = _output(dx + (at + W)[:, None] * C + c[None, :], here, t, v, scale, shift, s, q, PRE, ACT)
        v, z = _input(x, at + (W + 1), c, here, x_row, scale, shift, PRE, ACT)
        a0 += d_se * z
        a2 += d_s * z
        a6 += d_e * z
        a8 += d * z
        t = d_se * _weights(weight, c, inside, C, 0) + d_s * _weights(weight, c, inside, C, 2)
        t += d_e * _weights(weight, c, inside, C, 6) + d * _weights(weight, c, inside, C, 8)
        s, q = _output(dx + (at + (W + 1))[:, None] * C + c[None, :], here, t, v, scale, shift, s, q, PRE, ACT)
    if PRE:
        mean, rstd, _, _ = moments(gamma, beta, sums, side, c, inside, images * H * W, C, eps)
        add_up(found, side, c, inside, C, s, (q - s * mean[None, :]) * rstd[None, :])
    _add_taps(found_weight + side * (9 * C) + c, inside, C, a0, a1, a2, a3, a4, a5, a6, a7, a8)


@triton.jit
def _add_taps(out, inside, C, a0, a1, a2, a3, a4, a5, a6, a7, a8):
    tl.atomic_add(out, tl.sum(a0, 0), mask=inside, sem="relaxed")
    tl.atomic_add(out + C, tl.sum(a1, 0), mask=inside, sem="relaxed")
    tl.atomic_add(out + 2 * C, tl.sum(a2, 0), mask=inside, sem="relaxed")
    tl.atomic_add(out + 3 * C, tl.sum(a3, 0), mask=inside, sem="relaxed")
    tl.atomic_add(out + 4 * C, tl.sum(a4, 0), mask=inside, sem="relaxed")
    tl.atomic_add(out + 5 * C, tl.sum(a5, 0), mask=inside, sem="relaxed")
    tl.atomic_add(out + 6 * C, tl.sum(a6, 0), mask=inside, sem="relaxed")
    tl.atomic_add(out + 7 * C, tl.sum(a7, 0), mask=inside, sem="relaxed")
    tl.atomic_add(out + 8 * C, tl.sum(a8, 0), mask=inside, sem="relaxed")
