"""Kernels on whole networks, in Triton: weights packed, gradients unpacked, and the loss."""

from __future__ import annotations

import triton
import triton.language as tl

from bcnet.accel.kernels.norm import SIZES


@triton.jit(do_not_specialize=SIZES)
def entropy(
    logits, bias, labels, soft, slope, found, losses, rows, classes, slot0, slot1, share0, share1, smoothing,
    BIAS: tl.constexpr, SOFT: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Cross entropy of rows (sides, rows, classes) with labels, and its slope, or with SOFT the slope of that with
    a teacher's probabilities ``soft`` (rows, classes); a grid of (rows, sides)."""
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
    if SOFT:
        target = tl.load(soft + row[:, None] * classes + c[None, :], mask=here, other=0.0)
    d = (e / total[:, None] - target) * (tl.where(side == 0, share0, share1) / rows)
    d = tl.where(here, d, 0.0)
    tl.store(slope + at, d.to(slope.dtype.element_ty), mask=here)
    if BIAS:
        tl.atomic_add(found + side * classes + c, tl.sum(d, 0), mask=inside, sem="relaxed")


@triton.jit
def _tensor(row):
    """What a row of a table begins with: address, elements, K, I, strides of o, k, i."""
    address = tl.load(row).to(tl.pointer_type(tl.float32))
    count, kernel, inputs = tl.load(row + 1).to(tl.int32), tl.load(row + 2).to(tl.int32), tl.load(row + 3).to(tl.int32)
    return address, count, kernel, inputs, tl.load(row + 4), tl.load(row + 5), tl.load(row + 6)


@triton.jit(do_not_specialize=SIZES)
def pack(table, half, full, BLOCK: tl.constexpr):
    """A table row: address, elements, O·K·I decoding (K, I), strides of o, k, i, place, whether it stays float32,
    and how many o and i there are: those beyond are zero."""
    row = table + tl.program_id(1) * 11
    source, count, kernel, inputs, stride_o, stride_k, stride_i = _tensor(row)
    place = tl.load(row + 7)
    own_o = tl.load(row + 9).to(tl.int32)
    own_i = tl.load(row + 10).to(tl.int32)
    for start in range(tl.program_id(0) * BLOCK, count, tl.num_programs(0) * BLOCK):
        e = start + tl.arange(0, BLOCK)
        i = e % inputs
        k = e // inputs % kernel
        o = e // inputs // kernel
        at = o * stride_o + k * stride_k + i * stride_i
        v = tl.load(source + at, mask=(e < count) & (o < own_o) & (i < own_i), other=0.0)
        if tl.load(row + 8) != 0:
            tl.store(full + place + e, v, mask=e < count)
        else:
            tl.store(half + place + e, v.to(half.dtype.element_ty), mask=e < count)


@triton.jit(do_not_specialize=SIZES)
def unpack(wholes, table, paths, HALF: tl.constexpr, BLOCK: tl.constexpr):
    """Adds to every element of a gradient what the paths found for it.

    A row of ``wholes``: address, elements, K, I, strides of o, k, i. For each there are ``paths`` rows of ``table``:
    address, first o and their number, first i and their number, partial sums, their stride, whether they are float32
    (then it is one sum), and from one o to the next.
    """
    row = wholes + tl.program_id(1) * 7
    target, count, kernel, inputs, stride_o, stride_k, stride_i = _tensor(row)
    for start in range(tl.program_id(0) * BLOCK, count, tl.num_programs(0) * BLOCK):
        e = start + tl.arange(0, BLOCK)
        valid = e < count
        i = e % inputs
        k = e // inputs % kernel
        o = e // inputs // kernel
        at = o * stride_o + k * stride_k + i * stride_i
        v = tl.load(target + at, mask=valid, other=0.0)
        for path in range(paths):
            one = table + (tl.program_id(1) * paths + path) * 9
            address = tl.load(one)
            po = o - tl.load(one + 1).to(tl.int32)
            pi = i - tl.load(one + 3).to(tl.int32)
            mine = valid & (po >= 0) & (po < tl.load(one + 2)) & (pi >= 0) & (pi < tl.load(one + 4))
            place = (po * kernel + k) * tl.load(one + 8).to(tl.int32) + pi
            apart = tl.load(one + 6)
            parts = tl.load(one + 5).to(tl.int32)
            half = address.to(tl.pointer_type(HALF)) + place
            if tl.load(one + 7) != 0:
                v += tl.load(address.to(tl.pointer_type(tl.float32)) + place, mask=mine, other=0.0)
            elif parts % 4 == 0:
                for part in range(0, parts, 4):
                    v0 = tl.load(half + part * apart, mask=mine, other=0.0).to(tl.float32)
                    v1 = tl.load(half + (part + 1) * apart, mask=mine, other=0.0).to(tl.float32)
                    v2 = tl.load(half + (part + 2) * apart, mask=mine, other=0.0).to(tl.float32)
                    v3 = tl.load(half + (part + 3) * apart, mask=mine, other=0.0).to(tl.float32)
                    v += (v0 + v1) + (v2 + v3)
            else:
                for part in range(parts):
                    v += tl.load(half + part * apart, mask=mine, other=0.0).to(tl.float32)
        tl.store(target + at, v, mask=valid)
