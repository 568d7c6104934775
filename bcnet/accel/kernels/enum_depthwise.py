"""Triton kernels for depthwise convolutions while all widths are scored: each gathers the statistics of its output.

Images are (n, C, H, W) in channels-last memory. Narrow maps are read once, row by row, with all that a row adds to
the outputs around it in registers; all others pixel by pixel, with their neighbours from the cache.
"""

# mypy: disable-error-code="no-untyped-def, import-untyped, import-not-found, assignment, misc"
# ruff: noqa: RUF005 (kernels cannot unpack tuples)
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from bcnet.accel.kernels.enum_norm import BatchNorm, ScaleShift, affine, block_width, configs

NARROW = 8  # pixels across maps of which rows are held in registers


@triton.jit
def _load_row(source, mask, STRIDE: tl.constexpr, WIDTH: tl.constexpr):
    pixels = ()
    for across in tl.static_range(WIDTH):
        pixels = pixels + (tl.load(source + across * STRIDE, mask=mask, other=0.0),)
    return pixels


@triton.jit
def _convolve_row(pixels, k0, k1, k2, before, WIDTH: tl.constexpr):
    """One row of a kernel, (k0, k1, k2), over a row of pixels: added to ``before``."""
    found = ()
    for across in tl.static_range(WIDTH):
        y = before[across] + pixels[across].to(tl.float32) * k1
        if across > 0:
            y += pixels[across - 1].to(tl.float32) * k0
        if across + 1 < WIDTH:
            y += pixels[across + 1].to(tl.float32) * k2
        found = found + (y,)
    return found


@triton.jit
def _store_row(target, row, mask, sums, squares, COLUMNS: tl.constexpr, WIDTH: tl.constexpr):
    """Stores a row of outputs, and adds them to their statistics."""
    for across in tl.static_range(WIDTH):
        kept = row[across].to(target.dtype.element_ty)
        tl.store(target + across * COLUMNS, kept, mask=mask)
        value = kept.to(tl.float32)  # 0 where there is no image
        sums += value
        squares += value * value
    return sums, squares


@triton.jit
def _narrow_kernel(
    x, weight, out, found, images, per, height,
    STRIDE: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr, BI: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """A 3x3 convolution of stride 1 and padding 1, and the sums of ``per`` images of its output."""
    column = tl.program_id(0) * BN + tl.arange(0, BN)
    chunk = tl.program_id(1)
    inside = column < COLUMNS
    taps = ()
    for tap in tl.static_range(9):
        taps = taps + (tl.load(weight + tap * COLUMNS + column, mask=inside, other=0.0)[None, :],)
    sums = tl.zeros((BI, BN), tl.float32)
    squares = tl.zeros((BI, BN), tl.float32)
    empty = ()
    for _ in tl.static_range(WIDTH):
        empty = empty + (tl.zeros((BI, BN), tl.float32),)
    end = tl.minimum((chunk + 1) * per, images)
    for first in range(chunk * per, end, BI):
        image = first + tl.arange(0, BI)
        mask = (image < end)[:, None] & inside[None, :]
        pixel = (image.to(tl.int64) * (height * WIDTH))[:, None]
        source = x + pixel * STRIDE + column[None, :]
        target = out + pixel * COLUMNS + column[None, :]
        above, here = empty, empty  # the output rows of which two thirds and one third are known
        coming = _load_row(source, mask, STRIDE, WIDTH)
        for row in range(height):
            pixels = coming
            if row + 1 < height:
                source += WIDTH * STRIDE
                coming = _load_row(source, mask, STRIDE, WIDTH)
            if row > 0:
                done = _convolve_row(pixels, taps[6], taps[7], taps[8], above, WIDTH)
                sums, squares = _store_row(target, done, mask, sums, squares, COLUMNS, WIDTH)
                target += WIDTH * COLUMNS
            above = _convolve_row(pixels, taps[3], taps[4], taps[5], here, WIDTH)
            here = _convolve_row(pixels, taps[0], taps[1], taps[2], empty, WIDTH)
        sums, squares = _store_row(target, above, mask, sums, squares, COLUMNS, WIDTH)
    tl.store(found + chunk * 2 * COLUMNS + column, tl.sum(sums, 0), mask=inside)
    tl.store(found + (chunk * 2 + 1) * COLUMNS + column, tl.sum(squares, 0), mask=inside)


@triton.autotune(configs=configs("BP", (32, 4), (64, 4), (64, 8)), key=["columns", "height"])
@triton.jit
def _depthwise_kernel(
    x, weight, out, found, images, columns, stride, height, width, out_height, out_width, per,
    KERNEL: tl.constexpr, STRIDE: tl.constexpr, PAD: tl.constexpr, BN: tl.constexpr, BP: tl.constexpr,
):  # fmt: skip
    """A depthwise convolution of (images, height, width, columns), and the sums of ``per`` images of its output."""
    column = tl.program_id(0) * BN + tl.arange(0, BN)
    chunk = tl.program_id(1)
    inside = column < columns
    pixels = out_height * out_width
    sums = tl.zeros((BP, BN), tl.float32)
    squares = tl.zeros((BP, BN), tl.float32)
    for image in range(chunk * per, tl.minimum((chunk + 1) * per, images)):
        place = tl.full((), 0, tl.int64) + image
        source = x + place * (height * width) * stride
        target = out + place * pixels * columns
        for first in range(0, pixels, BP):
            pixel = first + tl.arange(0, BP)
            top = (pixel // out_width) * STRIDE - PAD
            left = (pixel % out_width) * STRIDE - PAD
            y = tl.zeros((BP, BN), tl.float32)
            for i in tl.static_range(KERNEL):
                for j in tl.static_range(KERNEL):
                    row, across = top + i, left + j
                    there = (row >= 0) & (row < height) & (across >= 0) & (across < width) & (pixel < pixels)
                    mask = there[:, None] & inside[None, :]
                    tile = tl.load(
                        source + (row * width + across)[:, None] * stride + column[None, :], mask=mask, other=0.0
                    )
                    factor = tl.load(weight + (i * KERNEL + j) * columns + column, mask=inside, other=0.0)
                    y += tile.to(tl.float32) * factor[None, :]
            kept = y.to(out.dtype.element_ty)
            mask = (pixel < pixels)[:, None] & inside[None, :]
            tl.store(target + pixel[:, None] * columns + column[None, :], kept, mask=mask)
            value = tl.where(mask, kept.to(tl.float32), 0.0)
            sums += value
            squares += value * value
    tl.store(found + chunk * 2 * columns + column, tl.sum(sums, 0), mask=inside)
    tl.store(found + (chunk * 2 + 1) * columns + column, tl.sum(squares, 0), mask=inside)


def depthwise(x: Tensor, weight: Tensor, stride: int, pad: int, norm: BatchNorm) -> tuple[Tensor, ScaleShift]:
    """A depthwise convolution of x (n, C, H, W) by weight (k * k, C), as rows, and the batch norm after it."""
    n, columns, height, width = x.shape
    kernel = round(weight.shape[0] ** 0.5)
    size = [(s + 2 * pad - kernel) // stride + 1 for s in (height, width)]
    pixels = size[0] * size[1]
    out = torch.empty(n * pixels, columns, dtype=x.dtype, device=x.device)
    per = triton.cdiv(n, 128)
    chunks = triton.cdiv(n, per)
    found = torch.empty(chunks, 2, 1, columns, device=x.device)
    narrow = kernel == 3 and stride == pad == 1 and width <= NARROW
    if out.is_meta:
        pass
    elif narrow:
        block = 128
        _narrow_kernel[(triton.cdiv(columns, block), chunks)](
            x, weight, out, found, n, per, height,
            STRIDE=x.stride(3), COLUMNS=columns, WIDTH=width, BI=4, BN=block, num_warps=8,
        )  # fmt: skip
    else:
        block = block_width(columns)
        _depthwise_kernel[(triton.cdiv(columns, block), chunks)](
            x, weight, out, found, n, columns, x.stride(3), height, width, *size, per,
            KERNEL=kernel, STRIDE=stride, PAD=pad, BN=block,
        )  # fmt: skip
    return out, affine(found, n * pixels, per * pixels, norm)
