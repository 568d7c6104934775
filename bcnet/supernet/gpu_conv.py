"""One Triton kernel for a dense convolution that all candidates of its input's width share, and its batch norm.

A program makes a tile of images x output channels at one pixel, so that the taps that fall into the padding are left
out for the whole tile. It goes through the input channels group by group, one for each candidate; at the end of a
group it writes the sum so far and its statistics. Input and weight are read through tensor descriptors, which a GPU
with Hopper's tensor memory accelerator copies while it multiplies. Activations are matrices as in
:mod:`bcnet.supernet.gpu_kernels`; here too the interpreter runs the kernels, and nothing is run on the meta device.
"""

# mypy: disable-error-code="no-untyped-def, import-untyped, import-not-found"
from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

IMAGES, WIDTH, DEPTH = 256, 128, 64  # of a tile: images, output channels, input channels that are read at once
STAGES = 4  # tiles of the input that are on their way at a time
ROOM = 227 << 10  # bytes of shared memory that a program may take
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


@triton.jit
def _keep(part, out, found, columns, groups, g, image, pixel, column, BM: tl.constexpr, BN: tl.constexpr):
    """Write a sum (BM, BN) and its statistics, which ``found`` points to."""
    out.store([g, image, pixel, column], part.to(out.dtype).reshape(1, BM, 1, BN))
    channel = column + tl.arange(0, BN)
    target = found + g * columns + channel
    tl.store(target, tl.sum(part, 0), mask=channel < columns)
    tl.store(target + groups * columns, tl.sum(part * part, 0), mask=channel < columns)


@triton.jit(do_not_specialize=["groups", "depth"])
def _convolve_kernel(
    x, weight, out, found, first, step, groups, depth, stride, images, columns, channels,
    height, width, out_height, out_width,
    KERNEL: tl.constexpr, STRIDE: tl.constexpr, PAD: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """Sums of a convolution over the first 1, 2, ... groups of depth * BK channels, which begin at first + g * step.

    x (images, height * width * stride), weight (columns, KERNEL ** 2 * channels), out (groups, images, pixels,
    columns); found (blocks, pixels, 2, groups, columns) are sums and sums of squares of the BM images of a block.
    """
    tiles = tl.cdiv(columns, BN)
    column = (tl.program_id(0) % tiles) * BN
    pixels = out_height * out_width
    pixel = (tl.program_id(0) // tiles + out_width) % pixels  # the first row, with few taps, comes last
    image = tl.program_id(0) // (tiles * pixels) * BM
    down = pixel // out_width * STRIDE - PAD
    right = pixel % out_width * STRIDE - PAD
    left = tl.maximum(right, 0)
    across = tl.minimum(right + KERNEL, width) - left
    top = tl.maximum(down, 0)
    taps = (tl.minimum(down + KERNEL, height) - top) * across
    size = depth * BK
    place = (top * width + left) * stride + first
    number = ((top - down) * KERNEL + left - right) * channels
    back = step - (taps // across * width) * stride
    again = size - (taps // across * KERNEL) * channels
    target = found + (image // BM * pixels + pixel) * 2 * groups * columns
    total = tl.zeros((BM, BN), tl.float32)
    k, over, tap, g, ends = 0, 0, 0, 0, taps * depth
    # One loop over groups, taps and channels, so that the loads of a group are under way while the sum before it is
    # written; counted on without divisions, which would hold up the next product.
    for i in range(taps * depth * groups):
        a = x.load([image, place + k])
        b = weight.load([column, number + k])
        if WIDEN:
            a, b = a.to(tl.float32), b.to(tl.float32)
        total = tl.dot(a, b.T, total)
        k += BK
        new = k == size
        k = tl.where(new, 0, k)
        over = tl.where(new, over + 1, over)
        tap = tl.where(new, tap + 1, tap)
        place = tl.where(new, place + stride, place)
        number = tl.where(new, number + channels, number)
        new = over == across
        over = tl.where(new, 0, over)
        place = tl.where(new, place + (width - across) * stride, place)
        number = tl.where(new, number + (KERNEL - across) * channels, number)
        new = tap == taps
        tap = tl.where(new, 0, tap)
        place = tl.where(new, place + back, place)
        number = tl.where(new, number + again, number)
        if i + 1 == ends:
            # In halves, which take less shared memory.
            near, far = total.reshape(BM, 2, BN // 2).permute(0, 2, 1).split()
            _keep(near, out, target, columns, groups, g, image, pixel, column, BM, BN // 2)
            _keep(far, out, target, columns, groups, g, image, pixel, column + BN // 2, BM, BN // 2)
            g += 1
            ends += taps * depth


@triton.jit(do_not_specialize=["groups", "blocks"])
def _norm_kernel(
    found, weight, bias, scale, shift, images, columns, pixels, blocks, groups, eps,
    PER: tl.constexpr, BC: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Batch norm as scale and shift (groups, columns) from ``found`` (blocks, pixels, 2, groups, columns), in which a
    block is PER images."""
    column = tl.program_id(0) * BN + tl.arange(0, BN)
    g = tl.program_id(1)
    inside = column < columns
    place = found + (g * columns + column)[None, :]
    chunks = blocks * pixels
    rows = images * pixels
    sums = tl.zeros((BN,), tl.float32)
    for start in range(0, chunks, BC):
        chunk = start + tl.arange(0, BC)[:, None]
        mask = (chunk < chunks) & inside[None, :]
        sums += tl.sum(tl.load(place + chunk * 2 * groups * columns, mask=mask, other=0.0), 0)
    mean = sums / rows
    spread = tl.zeros((BN,), tl.float32)
    for start in range(0, chunks, BC):
        chunk = start + tl.arange(0, BC)[:, None]
        mask = (chunk < chunks) & inside[None, :]
        count = tl.maximum(tl.minimum(images - chunk // pixels * PER, PER), 1).to(tl.float32)
        total = tl.load(place + chunk * 2 * groups * columns, mask=mask, other=0.0)
        squares = tl.load(place + (chunk * 2 * groups + groups) * columns, mask=mask, other=0.0)
        own = total / count
        away = tl.maximum(squares - total * own, 0.0) + count * (own - mean[None, :]) * (own - mean[None, :])
        spread += tl.sum(tl.where(mask, away, 0.0), 0)
    factor = tl.load(weight + column, mask=inside, other=0.0) / tl.sqrt(spread / rows + eps)
    tl.store(scale + g * columns + column, factor, mask=inside)
    tl.store(shift + g * columns + column, tl.load(bias + column, mask=inside, other=0.0) - mean * factor, mask=inside)


@triton.jit
def _apply_kernel(
    sums, scale, shift, other, rows, columns, stride,
    G: tl.constexpr, RELU: tl.constexpr, ADD: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """sums[g] = relu(sums[g] * scale[g] + shift[g] + other), (G, rows, columns)."""
    row = (tl.program_id(0) * BM + tl.arange(0, BM)).to(tl.int64)[:, None]
    column = tl.program_id(1) * BN + tl.arange(0, BN)
    inside = column < columns
    mask = (row < rows) & inside[None, :]
    place = sums + row * columns + column[None, :]
    if ADD:
        added = tl.load(other + row * stride + column[None, :], mask=mask, other=0.0).to(tl.float32)
    for g in tl.static_range(G):
        factor = tl.load(scale + g * columns + column, mask=inside, other=0.0)
        y = tl.load(place, mask=mask, other=0.0).to(tl.float32) * factor[None, :]
        y += tl.load(shift + g * columns + column, mask=inside, other=0.0)[None, :]
        if ADD:
            y += added
        if RELU:
            y = tl.maximum(y, 0.0)
        tl.store(place, y.to(sums.dtype.element_ty), mask=mask)
        place += rows.to(tl.int64) * columns


@triton.jit
def _pool_kernel(
    sums, scale, shift, other, out, images, columns, pixels, stride,
    G: tl.constexpr, GP: tl.constexpr, RELU: tl.constexpr, ADD: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """The mean of relu(sums[g] * scale[g] + shift[g] + other) over the pixels of an image: out (G, images, columns)."""
    image = tl.program_id(0)
    column = tl.program_id(1) * BN + tl.arange(0, BN)[None, None, :]
    g = tl.arange(0, GP)[:, None, None]
    inside = (g < G) & (column < columns)
    factor = tl.load(scale + g * columns + column, mask=inside, other=0.0)
    summand = tl.load(shift + g * columns + column, mask=inside, other=0.0)
    total = tl.zeros((GP, BM, BN), tl.float32)
    for start in tl.range(0, pixels, BM, num_stages=4):
        pixel = start + tl.arange(0, BM)[None, :, None]
        row = image.to(tl.int64) * pixels + pixel
        mask = inside & (pixel < pixels)
        place = g.to(tl.int64) * images * pixels * columns + row * columns + column
        y = tl.load(sums + place, mask=mask, other=0.0).to(tl.float32) * factor + summand
        if ADD:
            within = (pixel < pixels) & (column < columns)
            y += tl.load(other + row * stride + column, mask=within, other=0.0).to(tl.float32)
        if RELU:
            y = tl.maximum(y, 0.0)
        total += tl.where(mask, y, 0.0)
    kept = tl.sum(total, 1)[:, None, :] / pixels
    tl.store(out + (g * images + image) * columns + column, kept, mask=inside)


@dataclass(frozen=True)
class Groups:
    """The input channels of each candidate beyond the one before: ``size`` of them at first + g * step."""

    first: int
    step: int
    size: int
    count: int

    @staticmethod
    def of(pieces: Sequence[Sequence[tuple[int, int]]]) -> Groups | None:
        """None where the pieces (start, length) of each candidate are not runs of one size at one distance."""
        starts = [start for rows in pieces for start, _ in rows]
        sizes = {length for rows in pieces for _, length in rows}
        steps = {b - a for a, b in pairwise(starts)} or {0}
        if any(len(rows) != 1 for rows in pieces) or len(sizes) != 1 or len(steps) != 1:
            return None
        return Groups(starts[0], steps.pop(), sizes.pop(), len(starts))


@cache
def _roomy() -> bool:
    """Whether programs get as much shared memory as the kernel takes."""
    if INTERPRETED:
        return True
    properties: Any = torch.cuda.get_device_properties() if torch.cuda.is_available() else None
    return properties is not None and properties.shared_memory_per_block_optin >= ROOM


def fits(x: Tensor, weight: Tensor, groups: Groups) -> bool:
    """Whether the kernel can take x (n, C, H, W) and is the better way: a 1x1 convolution is a matrix product."""
    _, _, height, width = x.shape
    apart = x.stride(3)
    rows = x.stride() == (height * width * apart, 1, width * apart, apart)
    aligned = all(size % 8 == 0 for size in (apart, x.storage_offset(), len(weight))) and groups.size % DEPTH == 0
    return rows and aligned and len(x) >= IMAGES // 2 and weight.shape[2] > 1 and _roomy()


def packed(weights: Sequence[Tensor]) -> Tensor:
    """Weights (out, in, k, k) of the groups as one matrix (out, k * k * in)."""
    return torch.cat(list(weights), 1).permute(0, 2, 3, 1).flatten(1).contiguous()


def convolve(
    x: Tensor, weight: Tensor, groups: Groups, form: tuple[int, int, int]
) -> tuple[Tensor, Tensor, tuple[int, int]]:
    """The sums over the first 1, 2, ... groups, (G, rows, columns), what :func:`norm` needs of them, and the size of
    their maps. x is (n, C, H, W), ``weight`` as of :func:`packed`; ``form`` is kernel size, stride and padding."""
    kernel, stride, pad = form
    n, _, height, width = x.shape
    size = ((height + 2 * pad - kernel) // stride + 1, (width + 2 * pad - kernel) // stride + 1)
    pixels, columns = size[0] * size[1], len(weight)
    blocks = triton.cdiv(n, IMAGES)
    out = torch.empty(groups.count, n * pixels, columns, dtype=x.dtype, device=x.device)
    found = torch.empty(blocks, pixels, 2, groups.count, columns, device=x.device)
    if not x.is_meta:
        apart = x.stride(3)
        flat = TensorDescriptor(
            x, [n, (height * width - 1) * apart + x.shape[1]], [height * width * apart, 1], [IMAGES, DEPTH]
        )
        _convolve_kernel[(blocks * pixels * triton.cdiv(columns, WIDTH),)](
            flat, TensorDescriptor.from_tensor(weight, [WIDTH, DEPTH]),
            TensorDescriptor.from_tensor(out.unflatten(1, (n, pixels)), [1, IMAGES, 1, WIDTH // 2]), found,
            groups.first, groups.step, groups.count, groups.size // DEPTH, apart,
            n, columns, weight.shape[1] // kernel**2, height, width, *size,
            KERNEL=kernel, STRIDE=stride, PAD=pad,
            BM=IMAGES, BN=WIDTH, BK=DEPTH, WIDEN=INTERPRETED, num_warps=8, num_stages=STAGES,
        )  # fmt: skip
    return out, found, size


def norm(found: Tensor, images: int, layer: tuple[Tensor, Tensor, float]) -> tuple[Tensor, Tensor]:
    """The batch norm ``layer`` (weight, bias, eps) of sums as a factor and a summand, (G, columns) each."""
    blocks, pixels, _, count, columns = found.shape
    scale = torch.empty(count, columns, device=found.device)
    shift = torch.empty_like(scale)
    if not found.is_meta:
        weight, bias, eps = layer
        _norm_kernel[(triton.cdiv(columns, 8), count)](
            found, weight, bias, scale, shift, images, columns, pixels, blocks, count, eps,
            PER=IMAGES, BC=512, BN=8, num_warps=8,
        )  # fmt: skip
    return scale, shift


def apply(sums: Tensor, affine: tuple[Tensor, Tensor], other: Tensor | None, relu: bool) -> Tensor:
    """relu(sums[g] * scale[g] + shift[g] + other), (G, rows, columns) in place."""
    count, rows, columns = sums.shape
    if not sums.is_meta:
        given, stride = (sums, 0) if other is None else (other, other.stride(0))
        _apply_kernel[(triton.cdiv(rows, 64), triton.cdiv(columns, 128))](
            sums, *affine, given, rows, columns, stride,
            G=count, RELU=relu, ADD=other is not None, BM=64, BN=128, num_warps=4,
        )  # fmt: skip
    return sums


def apply_pool(sums: Tensor, affine: tuple[Tensor, Tensor], other: Tensor | None, relu: bool, images: int) -> Tensor:
    """As :func:`apply`, then the mean over the pixels of each image, in float32: (G, images, columns)."""
    count, rows, columns = sums.shape
    out = torch.empty(count, images, columns, device=sums.device)
    if not sums.is_meta:
        given, stride = (sums, 0) if other is None else (other, other.stride(0))
        _pool_kernel[(images, triton.cdiv(columns, 128))](
            sums, *affine, given, out, images, columns, rows // images, stride,
            G=count, GP=triton.next_power_of_2(count), RELU=relu, ADD=other is not None, BM=8, BN=128, num_warps=4,
        )  # fmt: skip
    return out
