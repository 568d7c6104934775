"""Triton kernels for 1x1 convolutions that take their batch norm into their weights while all widths are scored.

The mean and the variance of W x follow from the sums and the Gram matrix of x, so that the product is made once,
with everything that follows it. Several inputs of one shape, ``(k, rows, columns)``, go side by side.
"""

# mypy: disable-error-code="no-untyped-def, import-untyped, import-not-found"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from bcnet.accel.kernels.enum_norm import BatchNorm
from bcnet.accel.kernels.launch import INTERPRETED

PROGRAMS = 512  # that add up products side by side


@triton.jit
def _moments_kernel(
    x, gram, sums, rows, columns, step: tl.int64, stride, per,
    BM: tl.constexpr, BN: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """Of ``per`` rows of each x: gram (k, chunks, columns, columns) and sums (k, chunks, columns)."""
    tiles = tl.cdiv(columns, BN)
    left = tl.program_id(0) // tiles * BN + tl.arange(0, BN)
    right = tl.program_id(0) % tiles * BN + tl.arange(0, BN)
    chunk, number = tl.program_id(1), tl.program_id(2)
    place = (number * tl.num_programs(1) + chunk).to(tl.int64) * columns
    x += number * step
    total = tl.zeros((BN, BN), tl.float32)
    seen = tl.zeros((BM, BN), tl.float32)
    end = tl.minimum((chunk + 1) * per, rows)
    for start in range(chunk * per, end, BM):
        row = start + tl.arange(0, BM)
        source = x + row.to(tl.int64)[:, None] * stride
        a = tl.load(source + left[None, :], mask=(row < end)[:, None] & (left < columns)[None, :], other=0.0)
        b = tl.load(source + right[None, :], mask=(row < end)[:, None] & (right < columns)[None, :], other=0.0)
        if WIDEN:
            a, b = a.to(tl.float32), b.to(tl.float32)
        total = tl.dot(tl.trans(a), b, total, input_precision="ieee")
        seen += b.to(tl.float32)
    mask = (left < columns)[:, None] & (right < columns)[None, :]
    tl.store(gram + place * columns + left[:, None] * columns + right[None, :], total, mask=mask)
    if tl.program_id(0) < tiles:
        tl.store(sums + place + right, tl.sum(seen, 0), mask=right < columns)


@triton.jit
def _fold_kernel(product, dense, sums, weight, bias, folded, shift, rows, columns, stride, eps, BN: tl.constexpr):
    """Batch norm after ``dense`` folded into it: product = dense @ gram, one output channel per program."""
    channel, number, channels = tl.program_id(0), tl.program_id(1), tl.num_programs(0)
    column = tl.arange(0, BN)
    inside = column < columns
    place = (number * channels + channel) * columns + column
    own = tl.load(dense + channel * stride + column, mask=inside, other=0.0)
    mean = tl.sum(own * tl.load(sums + number * columns + column, mask=inside, other=0.0), 0) / rows
    square = tl.sum(own * tl.load(product + place, mask=inside, other=0.0), 0) / rows
    variance = tl.maximum(square - mean * mean, 0.0)
    factor = tl.load(weight + channel) / tl.sqrt(variance + eps)
    tl.store(folded + place, (own * factor).to(folded.dtype.element_ty), mask=inside)
    value = tl.load(bias + channel) - mean * factor
    tl.store(shift + number * channels + channel, value.to(shift.dtype.element_ty))


@triton.jit
def _dense_pool_kernel(
    x, weight, shift, out, rows, columns, depth, step: tl.int64, stride,
    PIXELS: tl.constexpr, RELU: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    WIDEN: tl.constexpr,
):  # fmt: skip
    """The mean over each image's PIXELS rows of relu(x @ weight.T + shift): (k, rows / PIXELS, columns)."""
    # Channels are the rows of the product, so that each thread holds many pixels of a channel and adds them up
    # by itself. Programs that share rows of x run side by side, so that x comes from the cache.
    channel = tl.program_id(0) * BN + tl.arange(0, BN)
    row = tl.program_id(1).to(tl.int64) * BM + tl.arange(0, BM)
    number = tl.program_id(2)
    inside, within = channel < columns, row < rows
    x += number * step
    weight += number * columns * depth
    total = tl.zeros((BN, BM), tl.float32)
    for start in range(0, depth, BK):
        k = start + tl.arange(0, BK)
        a = tl.load(
            weight + channel[:, None] * depth + k[None, :], mask=inside[:, None] & (k < depth)[None, :], other=0.0
        )
        b = tl.load(x + row[None, :] * stride + k[:, None], mask=within[None, :] & (k < depth)[:, None], other=0.0)
        if WIDEN:
            a, b = a.to(tl.float32), b.to(tl.float32)
        total = tl.dot(a, b, total, input_precision="ieee")
    y = total + tl.load(shift + number * columns + channel, mask=inside, other=0.0).to(tl.float32)[:, None]
    if RELU:
        y = tl.maximum(y, 0.0)
    mean = tl.sum(tl.reshape(y, (BN, BM // PIXELS, PIXELS)), 2) / PIXELS
    image = tl.program_id(1).to(tl.int64) * (BM // PIXELS) + tl.arange(0, BM // PIXELS)
    images = rows // PIXELS
    place = (number * images + image)[None, :] * columns + channel[:, None]
    tl.store(out + place, mean, mask=(image < images)[None, :] & inside[:, None])


def moments(x: Tensor) -> tuple[Tensor, Tensor]:
    """Column sums (k, C) and Gram matrices (k, C, C) of x (k, rows, C), in float32."""
    count, rows, columns = x.shape
    block, depth = 64 if 0 < columns % 128 <= 64 else 128, 64
    tiles = triton.cdiv(columns, block)
    wanted = max(1, PROGRAMS // (tiles * tiles * count))
    per = triton.cdiv(triton.cdiv(rows, wanted), depth) * depth
    chunks = triton.cdiv(rows, per)
    gram = torch.empty(count, chunks, columns, columns, device=x.device)
    sums = torch.empty(count, chunks, columns, device=x.device)
    if not x.is_meta:
        _moments_kernel[(tiles * tiles, chunks, count)](
            x, gram, sums, rows, columns, x.stride(0), x.stride(1), per,
            BM=depth, BN=block, WIDEN=INTERPRETED, num_warps=4,
        )  # fmt: skip
    return sums.sum(1), gram.sum(1)


def fold(
    dense: Tensor, sums: Tensor, gram: Tensor, rows: int, norm: BatchNorm, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """The weights (k, out, in) and biases (k, out) of ``dense`` (out, in) with the batch norm after it, for k inputs
    with these :func:`moments`: the mean of W x is W mean(x), its mean square w' gram w / rows."""
    count, (channels, columns) = len(sums), dense.shape
    folded = torch.empty(count, channels, columns, dtype=dtype, device=dense.device)
    shift = torch.empty(count, channels, dtype=dtype, device=dense.device)
    if not folded.is_meta:
        weight, bias, eps = norm
        product = torch.matmul(dense, gram)
        _fold_kernel[(channels, count)](
            product, dense, sums.contiguous(), weight, bias, folded, shift, rows, columns, dense.stride(0), eps,
            BN=max(16, triton.next_power_of_2(columns)), num_warps=2,
        )  # fmt: skip
    return folded, shift


def dense_pool(x: Tensor, weight: Tensor, shift: Tensor, relu: bool, pixels: int) -> Tensor:
    """The mean over each image's pixels of relu(x @ weight.T + shift) for x (k, rows, in), weight (k, out, in) and
    shift (k, out), in float32; ``pixels`` is a power of two up to 128: (k, rows / pixels, out)."""
    (count, rows, depth), channels = x.shape, weight.shape[1]
    out = torch.empty(count, rows // pixels, channels, device=x.device)
    if not out.is_meta:
        _dense_pool_kernel[(triton.cdiv(channels, 128), triton.cdiv(rows, 128), count)](
            x, weight, shift, out, rows, channels, depth, x.stride(0), x.stride(1),
            PIXELS=pixels, RELU=relu, BM=128, BN=128, BK=32, WIDEN=INTERPRETED,
            num_warps=4, num_stages=4,
        )  # fmt: skip
    return out
