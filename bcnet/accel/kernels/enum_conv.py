"""One Triton kernel for a dense convolution that all candidates of its input's width share, and its batch norm.

A program makes one tile of output channels x images at one pixel after the other, so that the taps that fall into the
padding are left out for a whole tile. It goes through the input channels group by group, one for each candidate; at
the end of a group it writes the sum so far and its statistics. Channels are the rows of a tile, so that each thread
holds many images of a channel and adds them up by itself. Input and weight are read through tensor descriptors, which
a GPU with Hopper's tensor memory accelerator copies while it multiplies. Activations are matrices as in
:mod:`bcnet.accel.kernels.enum_norm`; here too the interpreter runs the kernels, and nothing is run on the meta device.
"""

# mypy: disable-error-code="no-untyped-def, import-untyped, import-not-found"
from __future__ import annotations

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

from bcnet.accel.kernels.enum_norm import BatchNorm, ScaleShift, affine
from bcnet.accel.kernels.launch import INTERPRETED

IMAGES, WIDTH, DEPTH = 256, 128, 64  # of a tile: images, output channels, input channels that are read at once
STAGES = 3  # tiles of the input that are on their way at a time
ROOM = 227 << 10  # bytes of shared memory that a program may take


@triton.jit
def _window(position, size, KERNEL: tl.constexpr, STRIDE: tl.constexpr, PAD: tl.constexpr):
    """The taps of an output's position that lie within ``size``: where the first stands, its number, how many."""
    begin = position * STRIDE - PAD
    first = tl.maximum(begin, 0)
    return first, first - begin, tl.minimum(begin + KERNEL, size) - first


@triton.jit
def _jump(go, tile, by, tiles, out_width, out_height):
    """A tile (columns, pixel across, pixel down, images) and, where ``go``, the one ``by`` further, digit by digit."""
    column, across, down, block = tile
    column = tl.where(go, column + by[0], column)
    carry = (column >= tiles).to(tl.int32)
    across = tl.where(go, across + by[1] + carry, across)
    column -= carry * tiles
    carry = (across >= out_width).to(tl.int32)
    down = tl.where(go, down + by[2] + carry, down)
    across -= carry * out_width
    carry = (down >= out_height).to(tl.int32)
    block = tl.where(go, block + by[3] + carry, block)
    return column, across, down - carry * out_height, block


@triton.jit
def _digits(number, tiles, out_width, out_height):
    """A number as a tile (columns, pixel across, pixel down, images)."""
    rest = number // tiles
    return number % tiles, rest % out_width, rest // out_width % out_height, rest // (out_width * out_height)


@triton.jit
def _across(tile, out_width):
    """The pixel across: a row further down begins a pixel further, so that the tiles of a program, which are equally
    far from each other, come to the edges as often as those of any other."""
    turned = tile[1] + tl.minimum(tile[2], out_width - 1)
    return tl.where(turned < out_width, turned, turned - out_width)


@triton.jit(do_not_specialize=["groups", "depth"])
def _convolve_kernel(
    x, weight, out, found, first, step, groups, depth, stride, blocks, columns, channels,
    height, width, out_height, out_width,
    KERNEL: tl.constexpr, STRIDE: tl.constexpr, PAD: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """Sums of a convolution over the first 1, 2, ... groups of depth * BK channels, which begin at first + g * step.

    x (images, height * width * stride), weight (columns, KERNEL ** 2 * channels), out (groups, images, pixels,
    columns); found (blocks, pixels, 2, groups, columns) are sums and sums of squares of the BM images of a block.
    """
    tiles = tl.cdiv(columns, BN)
    pixels = out_height * out_width
    size = depth * BK
    by = _digits(tl.num_programs(0), tiles, out_width, out_height)
    own = _digits(tl.program_id(0), tiles, out_width, out_height)
    taps, tile = 0, own
    for _ in range(tl.cdiv(blocks * pixels * tiles - tl.program_id(0), tl.num_programs(0))):
        across = _window(_across(tile, out_width), width, KERNEL, STRIDE, PAD)[2]
        taps += across * _window(tile[2], height, KERNEL, STRIDE, PAD)[2]
        tile = _jump(True, tile, by, tiles, out_width, out_height)
    tile = own
    left, right, across = _window(_across(tile, out_width), width, KERNEL, STRIDE, PAD)
    top, down, high = _window(tile[2], height, KERNEL, STRIDE, PAD)
    place = (top * width + left) * stride + first
    number = (down * KERNEL + right) * channels
    total = tl.zeros((BN, BM), tl.float32)
    k, over, under, g = 0, 0, 0, 0
    # One loop over tiles, groups, taps and channels, so that the next loads are under way while a sum is written;
    # counted on without divisions or branches, which would hold up the next product or the loads.
    for _ in range(taps * depth * groups):
        a = x.load([tile[3] * BM, place + k])
        b = weight.load([tile[0] * BN, number + k])
        if WIDEN:
            a, b = a.to(tl.float32), b.to(tl.float32)
        total = tl.dot(b, a.T, total)
        here, group = tile, g
        k += BK
        new = k == size
        k = tl.where(new, 0, k)
        over = tl.where(new, over + 1, over)
        place = tl.where(new, place + stride, place)
        number = tl.where(new, number + channels, number)
        new = over == across
        over = tl.where(new, 0, over)
        under = tl.where(new, under + 1, under)
        place = tl.where(new, place + (width - across) * stride, place)
        number = tl.where(new, number + (KERNEL - across) * channels, number)
        summed = under == high
        under = tl.where(summed, 0, under)
        place = tl.where(summed, place + step - high * width * stride, place)
        number = tl.where(summed, number + size - high * KERNEL * channels, number)
        g = tl.where(summed, g + 1, g)
        new = g == groups
        g = tl.where(new, 0, g)
        tile = _jump(new, tile, by, tiles, out_width, out_height)
        left, right, across = _window(_across(tile, out_width), width, KERNEL, STRIDE, PAD)
        top, down, high = _window(tile[2], height, KERNEL, STRIDE, PAD)
        place = tl.where(new, (top * width + left) * stride + first, place)
        number = tl.where(new, (down * KERNEL + right) * channels, number)
        if summed:
            pixel = here[2] * out_width + _across(here, out_width)
            kept = total.to(out.dtype).T.reshape(1, BM, 1, BN)
            out.store([group, here[3] * BM, pixel, here[0] * BN], kept)
            channel = here[0] * BN + tl.arange(0, BN)
            target = found + ((here[3] * pixels + pixel) * 2 * groups + group) * columns + channel
            tl.store(target, tl.sum(total, 1), mask=channel < columns)
            tl.store(target + groups * columns, tl.sum(total * total, 1), mask=channel < columns)
            if group + 1 == groups:
                total = tl.zeros((BN, BM), tl.float32)


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


@cache
def _programs() -> int:
    """One for each multiprocessor; a few for the interpreter."""
    return 3 if INTERPRETED else torch.cuda.get_device_properties().multi_processor_count


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
        _convolve_kernel[(min(_programs(), blocks * pixels * triton.cdiv(columns, WIDTH)),)](
            flat, TensorDescriptor.from_tensor(weight, [WIDTH, DEPTH]),
            TensorDescriptor.from_tensor(out.unflatten(1, (n, pixels)), [1, IMAGES, 1, WIDTH]), found,
            groups.first, groups.step, groups.count, groups.size // DEPTH, apart,
            blocks, columns, weight.shape[1] // kernel**2, height, width, *size,
            KERNEL=kernel, STRIDE=stride, PAD=pad,
            BM=IMAGES, BN=WIDTH, BK=DEPTH, WIDEN=INTERPRETED, num_warps=8, num_stages=STAGES,
        )  # fmt: skip
    return out, found, size


def norm(found: Tensor, images: int, layer: BatchNorm) -> ScaleShift:
    """The batch norm ``layer`` of sums as a factor and a summand, (G, columns) each."""
    return affine(found.flatten(0, 1), images, IMAGES, layer, found.shape[1], tile=(512, 8))


def apply(sums: Tensor, affine: ScaleShift, other: Tensor | None, relu: bool) -> Tensor:
    """relu(sums[g] * scale[g] + shift[g] + other), (G, rows, columns) in place."""
    count, rows, columns = sums.shape
    if not sums.is_meta:
        given, stride = (sums, 0) if other is None else (other, other.stride(0))
        wide = 512 if columns % 512 == 0 else 128
        _apply_kernel[(triton.cdiv(rows, 4096 // wide), triton.cdiv(columns, wide))](
            sums, *affine, given, rows, columns, stride,
            G=count, RELU=relu, ADD=other is not None, BM=4096 // wide, BN=wide, num_warps=4,
        )  # fmt: skip
    return sums


def apply_pool(sums: Tensor, affine: ScaleShift, other: Tensor | None, relu: bool, images: int) -> Tensor:
    """As :func:`apply`, then the mean over the pixels of each image, in float32: (G, images, columns)."""
    count, rows, columns = sums.shape
    out = torch.empty(count, images, columns, device=sums.device)
    if not sums.is_meta:
        given, stride = (sums, 0) if other is None else (other, other.stride(0))
        wide = 256 if columns % 256 == 0 else 128
        _pool_kernel[(images, triton.cdiv(columns, wide))](
            sums, *affine, given, out, images, columns, rows // images, stride,
            G=count, GP=triton.next_power_of_2(count), RELU=relu, ADD=other is not None,
            BM=1024 // wide, BN=wide, num_warps=4,
        )  # fmt: skip
    return out
