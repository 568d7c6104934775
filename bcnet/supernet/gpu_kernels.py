"""Triton kernels for scoring all widths on a GPU: batch norm with what surrounds it in one pass over memory.

Activations are matrices here: rows are the pixels of all images, columns the channels (channels-last memory).
Statistics are accumulated in float32 for chunks of rows and merged exactly. The kernels also run in Triton's
interpreter on a CPU (``TRITON_INTERPRET=1``), which is how they are tested; on the meta device nothing is run.
"""

# mypy: disable-error-code="no-untyped-def, import-untyped, import-not-found"
from __future__ import annotations

import os
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

MAX_PARTS = 8
PROGRAMS = 1024  # that reduce side by side: several for each multiprocessor


def _configs(name: str, *choices: tuple[int, int]) -> list[triton.Config]:
    """Block sizes ``name`` with their number of warps, to be timed on the GPU; the interpreter takes the first."""
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    return [triton.Config({name: size}, num_warps=warps) for size, warps in (choices[:1] if interpreted else choices)]


@triton.jit
def _part(p0, p1, p2, p3, p4, p5, p6, p7, k: tl.constexpr):
    """The pointer number k."""
    if k == 0:  # noqa: SIM116 (a kernel has no dictionaries)
        return p0
    elif k == 1:
        return p1
    elif k == 2:
        return p2
    elif k == 3:
        return p3
    elif k == 4:
        return p4
    elif k == 5:
        return p5
    elif k == 6:
        return p6
    else:
        return p7


@triton.jit
def _statistics_kernel(
    p0, p1, p2, p3, p4, p5, p6, p7, found, rows, columns, per,
    K: tl.constexpr, KP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Sums and sums of squares of the columns of p0, p0 + p1, ... over ``per`` rows: found (chunks, 2, K, columns)."""
    column = tl.program_id(0) * BN + tl.arange(0, BN)
    chunk = tl.program_id(1)
    inside = column < columns
    number = tl.arange(0, KP)[:, None]
    sums = tl.zeros((KP, BN), tl.float32)
    squares = tl.zeros((KP, BN), tl.float32)
    end = tl.minimum((chunk + 1) * per, rows)
    for start in range(chunk * per, end, BM):
        row = start + tl.arange(0, BM)
        mask = (row < end)[:, None] & inside[None, :]
        place = row.to(tl.int64)[:, None] * columns + column[None, :]
        total = tl.zeros((BM, BN), tl.float32)
        for k in tl.static_range(K):
            pointer = _part(p0, p1, p2, p3, p4, p5, p6, p7, k)
            total += tl.load(pointer + place, mask=mask, other=0.0).to(tl.float32)
            sums += tl.where(number == k, tl.sum(total, 0)[None, :], 0.0)
            squares += tl.where(number == k, tl.sum(total * total, 0)[None, :], 0.0)
    place = found + chunk * 2 * K * columns + number * columns + column[None, :]
    mask = (number < K) & inside[None, :]
    tl.store(place, sums, mask=mask)
    tl.store(place + K * columns, squares, mask=mask)


@triton.jit
def _affine_kernel(
    found, weight, bias, scale, shift, rows, columns, per, chunks, eps,
    K: tl.constexpr, BC: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Batch norm as scale and shift (K, columns) from the sums of chunks (chunks, 2, K, columns)."""
    column = tl.program_id(0) * BN + tl.arange(0, BN)
    k = tl.program_id(1)
    inside = column < columns
    place = found + (k * columns + column)[None, :]
    sums = tl.zeros((BN,), tl.float32)
    for start in range(0, chunks, BC):
        chunk = start + tl.arange(0, BC)[:, None]
        sums += tl.sum(tl.load(place + chunk * 2 * K * columns, mask=(chunk < chunks) & inside[None, :], other=0.0), 0)
    mean = sums / rows
    spread = tl.zeros((BN,), tl.float32)
    for start in range(0, chunks, BC):
        chunk = start + tl.arange(0, BC)[:, None]
        mask = (chunk < chunks) & inside[None, :]
        count = tl.maximum(tl.minimum((chunk + 1) * per, rows) - chunk * per, 1).to(tl.float32)
        total = tl.load(place + chunk * 2 * K * columns, mask=mask, other=0.0)
        squares = tl.load(place + (chunk * 2 * K + K) * columns, mask=mask, other=0.0)
        own = total / count
        away = tl.maximum(squares - total * own, 0.0) + count * (own - mean[None, :]) * (own - mean[None, :])
        spread += tl.sum(tl.where(mask, away, 0.0), 0)
    factor = tl.load(weight + column, mask=inside, other=0.0) / tl.sqrt(spread / rows + eps)
    tl.store(scale + k * columns + column, factor, mask=inside)
    tl.store(shift + k * columns + column, tl.load(bias + column, mask=inside, other=0.0) - mean * factor, mask=inside)


@triton.jit
def _apply_kernel(
    p0, p1, p2, p3, p4, p5, p6, p7, scale, shift, other, out, rows, columns, stride,
    K: tl.constexpr, RELU: tl.constexpr, ADD: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """out[k] = relu((p0 + ... + pk) * scale[k] + shift[k] + other), (K, rows, columns)."""
    row = (tl.program_id(0) * BM + tl.arange(0, BM)).to(tl.int64)[:, None]
    column = tl.program_id(1) * BN + tl.arange(0, BN)
    inside = column < columns
    mask = (row < rows) & inside[None, :]
    place = row * columns + column[None, :]
    target = place
    total = tl.zeros((BM, BN), tl.float32)
    if ADD:
        added = tl.load(other + row * stride + column[None, :], mask=mask, other=0.0).to(tl.float32)
    for k in tl.static_range(K):
        total += tl.load(_part(p0, p1, p2, p3, p4, p5, p6, p7, k) + place, mask=mask, other=0.0).to(tl.float32)
        factor = tl.load(scale + k * columns + column, mask=inside, other=0.0)
        y = total * factor[None, :] + tl.load(shift + k * columns + column, mask=inside, other=0.0)[None, :]
        if ADD:
            y += added
        if RELU:
            y = tl.maximum(y, 0.0)
        tl.store(out + target, y.to(out.dtype.element_ty), mask=mask)
        target += rows * columns


@triton.jit
def _apply_pool_kernel(
    p0, p1, p2, p3, p4, p5, p6, p7, scale, shift, other, out, images, columns, stride, pixels,
    K: tl.constexpr, RELU: tl.constexpr, ADD: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """As _apply_kernel, then the mean over the ``pixels`` of each image: (K, images, columns)."""
    image = tl.program_id(0)
    pixel = tl.arange(0, BM)[:, None]
    row = image.to(tl.int64) * pixels + pixel
    column = tl.program_id(1) * BN + tl.arange(0, BN)
    inside = column < columns
    mask = (pixel < pixels) & inside[None, :]
    place = row * columns + column[None, :]
    total = tl.zeros((BM, BN), tl.float32)
    if ADD:
        added = tl.load(other + row * stride + column[None, :], mask=mask, other=0.0).to(tl.float32)
    for k in tl.static_range(K):
        total += tl.load(_part(p0, p1, p2, p3, p4, p5, p6, p7, k) + place, mask=mask, other=0.0).to(tl.float32)
        factor = tl.load(scale + k * columns + column, mask=inside, other=0.0)
        y = total * factor[None, :] + tl.load(shift + k * columns + column, mask=inside, other=0.0)[None, :]
        if ADD:
            y += added
        if RELU:
            y = tl.maximum(y, 0.0)
        y = tl.where(mask, y, 0.0)
        tl.store(out + (k * images + image) * columns + column, tl.sum(y, 0) / pixels, mask=inside)


@triton.autotune(configs=_configs("BP", (32, 4), (64, 4), (64, 8)), key=["columns", "height"])
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
    sums = tl.zeros((BN,), tl.float32)
    squares = tl.zeros((BN,), tl.float32)
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
            sums += tl.sum(value, 0)
            squares += tl.sum(value * value, 0)
    tl.store(found + chunk * 2 * columns + column, sums, mask=inside)
    tl.store(found + (chunk * 2 + 1) * columns + column, squares, mask=inside)


@triton.jit
def _fold_kernel(product, dense, sums, weight, bias, folded, shift, rows, columns, stride, eps, BN: tl.constexpr):
    """Batch norm after ``dense`` folded into it: product = dense @ gram, one output channel per program."""
    channel = tl.program_id(0)
    column = tl.arange(0, BN)
    inside = column < columns
    own = tl.load(dense + channel * stride + column, mask=inside, other=0.0)
    mean = tl.sum(own * tl.load(sums + column, mask=inside, other=0.0), 0) / rows
    square = tl.sum(own * tl.load(product + channel * columns + column, mask=inside, other=0.0), 0) / rows
    variance = tl.maximum(square - mean * mean, 0.0)
    factor = tl.load(weight + channel) / tl.sqrt(variance + eps)
    tl.store(folded + channel * columns + column, (own * factor).to(folded.dtype.element_ty), mask=inside)
    tl.store(shift + channel, (tl.load(bias + channel) - mean * factor).to(shift.dtype.element_ty))


@triton.autotune(configs=_configs("BN", (128, 4), (128, 8), (256, 8)), key=["depth", "columns"])
@triton.jit
def _dense_pool_kernel(
    x, weight, shift, out, rows, columns, depth, stride,
    PIXELS: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr, RELU: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """The mean over each image's PIXELS rows of relu(x @ weight.T + shift): (rows / PIXELS, columns)."""
    # Programs that share rows of x run side by side, so that x comes from the cache.
    column = tl.program_id(0) * BN + tl.arange(0, BN)
    row = tl.program_id(1).to(tl.int64) * BM + tl.arange(0, BM)
    inside, within = column < columns, row < rows
    total = tl.zeros((BM, BN), tl.float32)
    for start in range(0, depth, BK):
        k = start + tl.arange(0, BK)
        a = tl.load(x + row[:, None] * stride + k[None, :], mask=within[:, None] & (k < depth)[None, :], other=0.0)
        b = tl.load(
            weight + column[None, :] * depth + k[:, None], mask=inside[None, :] & (k < depth)[:, None], other=0.0
        )
        total = tl.dot(a, b, total)
    y = total + tl.load(shift + column, mask=inside, other=0.0).to(tl.float32)[None, :]
    if RELU:
        y = tl.maximum(y, 0.0)
    mean = tl.sum(tl.reshape(y, (BM // PIXELS, PIXELS, BN)), 1) / PIXELS
    image = tl.program_id(1).to(tl.int64) * (BM // PIXELS) + tl.arange(0, BM // PIXELS)
    mask = (image * PIXELS < rows)[:, None] & inside[None, :]
    tl.store(out + image[:, None] * columns + column[None, :], mean, mask=mask)


def matrix(x: Tensor) -> Tensor:
    """(n, C, H, W) in channels-last memory, or a slice of its channels, as rows of pixels (n * H * W, C): a view."""
    return x.permute(0, 2, 3, 1).flatten(0, 2)


def image(rows: Tensor, like: tuple[int, int, int]) -> Tensor:
    """The inverse of :func:`matrix` for n, H, W."""
    return rows.unflatten(0, like).permute(0, 3, 1, 2)


def _pointers(parts: Sequence[Tensor]) -> list[Tensor]:
    return [*parts, *[parts[0]] * (MAX_PARTS - len(parts))]


def _block(columns: int) -> int:
    return min(64, max(16, triton.next_power_of_2(columns)))


class Affine:
    """Batch norm of running sums as a factor and a summand for each sum and channel, (K, columns) each."""

    def __init__(self, found: Tensor, rows: int, per: int, weight: Tensor, bias: Tensor, eps: float):
        chunks, _, count, columns = found.shape
        self.scale = torch.empty(count, columns, device=found.device)
        self.shift = torch.empty_like(self.scale)
        if found.is_meta:
            return
        _affine_kernel[(triton.cdiv(columns, 16), count)](
            found, weight, bias, self.scale, self.shift, rows, columns, per, chunks, eps,
            K=count, BC=64, BN=16, num_warps=4,
        )  # fmt: skip


def statistics(parts: Sequence[Tensor], weight: Tensor, bias: Tensor, eps: float) -> Affine:
    """Batch norm of the sums parts[0], parts[0] + parts[1], ... of matrices (rows, columns), each contiguous."""
    rows, columns = parts[0].shape
    block, width = 32, _block(columns)
    wanted = max(64, min(512, PROGRAMS // triton.cdiv(columns, width)))
    per = triton.cdiv(triton.cdiv(rows, wanted), block) * block
    chunks = triton.cdiv(rows, per)
    found = torch.empty(chunks, 2, len(parts), columns, device=parts[0].device)
    if not found.is_meta:
        _statistics_kernel[(triton.cdiv(columns, width), chunks)](
            *_pointers(parts), found, rows, columns, per,
            K=len(parts), KP=triton.next_power_of_2(len(parts)), BM=block, BN=width, num_warps=4,
        )  # fmt: skip
    return Affine(found, rows, per, weight, bias, eps)


def normalise(
    parts: Sequence[Tensor], affine: Affine, other: Tensor | None, relu: bool, inplace: bool = False
) -> Tensor:
    """relu((parts[0] + ... + parts[k]) * scale[k] + shift[k] + other) for every k: (K, rows, columns)."""
    rows, columns = parts[0].shape
    out = (
        parts[0][None]
        if inplace
        else torch.empty(len(parts), rows, columns, dtype=parts[0].dtype, device=parts[0].device)
    )
    if not out.is_meta:
        width = _block(columns)
        _apply_kernel[(triton.cdiv(rows, 64), triton.cdiv(columns, width))](
            *_pointers(parts), affine.scale, affine.shift, parts[0] if other is None else other, out,
            rows, columns, 0 if other is None else other.stride(0),
            K=len(parts), RELU=relu, ADD=other is not None, BM=64, BN=width, num_warps=4,
        )  # fmt: skip
    return out


def normalise_pool(parts: Sequence[Tensor], affine: Affine, other: Tensor | None, relu: bool, images: int) -> Tensor:
    """As :func:`normalise`, then the mean over the pixels of each image, in float32: (K, images, columns)."""
    rows, columns = parts[0].shape
    out = torch.empty(len(parts), images, columns, device=parts[0].device)
    if not out.is_meta:
        width, pixels = _block(columns), rows // images
        _apply_pool_kernel[(images, triton.cdiv(columns, width))](
            *_pointers(parts), affine.scale, affine.shift, parts[0] if other is None else other, out,
            images, columns, 0 if other is None else other.stride(0), pixels,
            K=len(parts), RELU=relu, ADD=other is not None, BM=triton.next_power_of_2(pixels), BN=width, num_warps=4,
        )  # fmt: skip
    return out


def depthwise(
    x: Tensor, weight: Tensor, stride: int, pad: int, norm: tuple[Tensor, Tensor, float]
) -> tuple[Tensor, Affine]:
    """A depthwise convolution of x (n, C, H, W) by weight (k * k, C), as rows, and the batch norm after it."""
    n, columns, height, width = x.shape
    kernel = round(weight.shape[0] ** 0.5)
    size = [(s + 2 * pad - kernel) // stride + 1 for s in (height, width)]
    pixels = size[0] * size[1]
    out = torch.empty(n * pixels, columns, dtype=x.dtype, device=x.device)
    per = triton.cdiv(n, 128)
    chunks = triton.cdiv(n, per)
    found = torch.empty(chunks, 2, 1, columns, device=x.device)
    if not out.is_meta:
        block = _block(columns)
        _depthwise_kernel[(triton.cdiv(columns, block), chunks)](
            x, weight, out, found, n, columns, x.stride(3), height, width, *size, per,
            KERNEL=kernel, STRIDE=stride, PAD=pad, BN=block,
        )  # fmt: skip
    return out, Affine(found, n * pixels, per * pixels, *norm)


def fold(
    dense: Tensor, sums: Tensor, gram: Tensor, rows: int, norm: tuple[Tensor, Tensor, float], dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """The weight (out, in) and bias of ``dense`` with the batch norm after it, from the sums and the Gram matrix
    of its input: the mean of W x is W mean(x), its mean square w' gram w / rows."""
    folded = torch.empty(dense.shape, dtype=dtype, device=dense.device)
    shift = torch.empty(len(dense), dtype=dtype, device=dense.device)
    if not folded.is_meta:
        weight, bias, eps = norm
        product = dense @ gram
        block = max(16, triton.next_power_of_2(dense.shape[1]))
        _fold_kernel[(len(dense),)](
            product,
            dense,
            sums,
            weight,
            bias,
            folded,
            shift,
            rows,
            dense.shape[1],
            dense.stride(0),
            eps,
            BN=block,
            num_warps=2,
        )
    return folded, shift


def dense_pool(x: Tensor, weight: Tensor, shift: Tensor, relu: bool, pixels: int) -> Tensor:
    """The mean over each image's pixels of relu(x @ weight.T + shift), in float32; ``pixels`` is a power of two
    up to 128: (rows / pixels, columns)."""
    out = torch.empty(len(x) // pixels, len(weight), device=x.device)
    if not out.is_meta:
        block = 128

        def grid(meta: dict[str, int]) -> tuple[int, int]:
            return (triton.cdiv(len(weight), meta["BN"]), triton.cdiv(len(x), block))

        _dense_pool_kernel[grid](
            x,
            weight,
            shift,
            out,
            len(x),
            len(weight),
            x.shape[1],
            x.stride(0),
            PIXELS=pixels,
            BM=block,
            BK=64,
            RELU=relu,
        )
    return out
