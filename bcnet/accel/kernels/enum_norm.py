"""Triton kernels for scoring all widths on a GPU: batch norm with what surrounds it in one pass over memory.

Activations are matrices here: rows are the pixels of all images, columns the channels (channels-last memory).
Statistics are accumulated in float32 for chunks of rows and merged exactly. The kernels also run in Triton's
interpreter on a CPU (``TRITON_INTERPRET=1``), which is how they are tested; on the meta device nothing is run.
"""

# mypy: disable-error-code="no-untyped-def, import-untyped, import-not-found, assignment, misc"
# ruff: noqa: RUF005 (kernels cannot unpack tuples)
from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from bcnet.accel.kernels.launch import INTERPRETED

MAX_PARTS = 8
PROGRAMS = 1024  # that reduce side by side: several for each multiprocessor


BatchNorm = tuple[Tensor, Tensor, float]  # weight, bias and eps


def configs(name: str, *choices: tuple[int, int]) -> list[triton.Config]:
    """Block sizes ``name`` with their number of warps, to be timed on the GPU; the interpreter takes the first."""
    return [triton.Config({name: size}, num_warps=warps) for size, warps in (choices[:1] if INTERPRETED else choices)]


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
    K: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Sums and sums of squares of the columns of p0, p0 + p1, ... over ``per`` rows: found (chunks, 2, K, columns)."""
    column = tl.program_id(0) * BN + tl.arange(0, BN)
    chunk = tl.program_id(1)
    inside = column < columns
    sums, squares = (), ()
    for _ in tl.static_range(K):
        sums = sums + (tl.zeros((BM, BN), tl.float32),)
        squares = squares + (tl.zeros((BM, BN), tl.float32),)
    end = tl.minimum((chunk + 1) * per, rows)
    for start in range(chunk * per, end, BM):
        row = start + tl.arange(0, BM)
        mask = (row < end)[:, None] & inside[None, :]
        place = row.to(tl.int64)[:, None] * columns + column[None, :]
        total = tl.zeros((BM, BN), tl.float32)
        new_sums, new_squares = (), ()
        for k in tl.static_range(K):
            pointer = _part(p0, p1, p2, p3, p4, p5, p6, p7, k)
            total += tl.load(pointer + place, mask=mask, other=0.0).to(tl.float32)
            new_sums = new_sums + (sums[k] + total,)
            new_squares = new_squares + (squares[k] + total * total,)
        sums, squares = new_sums, new_squares
    place = found + chunk * 2 * K * columns + column
    for k in tl.static_range(K):
        tl.store(place + k * columns, tl.sum(sums[k], 0), mask=inside)
        tl.store(place + (K + k) * columns, tl.sum(squares[k], 0), mask=inside)


@triton.jit(do_not_specialize=["chunks", "groups"])
def _affine_kernel(
    found, weight, bias, scale, shift, images, columns, pixels, chunks, groups, per, eps,
    BC: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Batch norm as scale and shift (groups, columns) from the sums of chunks (chunks, 2, groups, columns).

    A chunk is one of the ``pixels`` of ``per`` images, the next chunk the next pixel of the same images.
    """
    column = tl.program_id(0) * BN + tl.arange(0, BN)
    g = tl.program_id(1)
    inside = column < columns
    place = found + (g * columns + column)[None, :]
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
        count = tl.maximum(tl.minimum(images - chunk // pixels * per, per), 1).to(tl.float32)
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
    p0, p1, p2, p3, p4, p5, p6, p7, scale, shift, other, out, rows, columns, stride, pixels,
    K: tl.constexpr, RELU: tl.constexpr, ADD: tl.constexpr, POOL: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """out[k] = relu((p0 + ... + pk) * scale[k] + shift[k] + other), (K, rows, columns); with POOL its mean over the
    ``pixels`` of each image, (K, images, columns), by a program for each image."""
    if POOL:
        image = tl.program_id(0)
        pixel = tl.arange(0, BM)[:, None]
        row = image.to(tl.int64) * pixels + pixel
        column = tl.program_id(1) * BN + tl.arange(0, BN)
        present = pixel < pixels
    else:
        # Programs side by side share rows, so that whole rows are read and written at a time.
        blocks = tl.cdiv(columns, BN)
        row = (tl.program_id(0) // blocks * BM + tl.arange(0, BM)).to(tl.int64)[:, None]
        column = tl.program_id(0) % blocks * BN + tl.arange(0, BN)
        present = row < rows
    inside = column < columns
    mask = present & inside[None, :]
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
        if POOL:
            mean = tl.sum(tl.where(mask, y, 0.0), 0) / pixels
            tl.store(out + (k * tl.num_programs(0) + image) * columns + column, mean, mask=inside)
        else:
            tl.store(out + target, y.to(out.dtype.element_ty), mask=mask)
            target += rows * columns


def matrix(x: Tensor) -> Tensor:
    """(n, C, H, W) in channels-last memory, or a slice of its channels, as rows of pixels (n * H * W, C): a view."""
    return x.permute(0, 2, 3, 1).flatten(0, 2)


def image(rows: Tensor, like: tuple[int, int, int]) -> Tensor:
    """The inverse of :func:`matrix` for n, H, W."""
    return rows.unflatten(0, like).permute(0, 3, 1, 2)


def _pointers(parts: Sequence[Tensor]) -> list[Tensor]:
    return [*parts, *[parts[0]] * (MAX_PARTS - len(parts))]


def block_width(columns: int) -> int:
    return min(64, max(16, triton.next_power_of_2(columns)))


class ScaleShift(NamedTuple):
    """Batch norm of running sums as a factor and a summand for each sum and channel, (G, columns) each."""

    scale: Tensor
    shift: Tensor


def affine(
    found: Tensor, images: int, per: int, norm: BatchNorm, pixels: int = 1, tile: tuple[int, int] = (64, 16)
) -> ScaleShift:
    """From the sums and sums of squares of chunks (chunks, 2, G, columns), each of one pixel of ``per`` images (or of
    ``per`` rows, where these count as images); ``tile`` has the chunks and columns that a program reads at once."""
    chunks, _, count, columns = found.shape
    scale = torch.empty(count, columns, device=found.device)
    made = ScaleShift(scale, torch.empty_like(scale))
    if not found.is_meta:
        weight, bias, eps = norm
        _affine_kernel[(triton.cdiv(columns, tile[1]), count)](
            found, weight, bias, *made, images, columns, pixels, chunks, count, per, eps,
            BC=tile[0], BN=tile[1], num_warps=8 if tile[0] > 64 else 4,
        )  # fmt: skip
    return made


def statistics(parts: Sequence[Tensor], norm: BatchNorm) -> ScaleShift:
    """Batch norm of the sums parts[0], parts[0] + parts[1], ... of matrices (rows, columns), each contiguous."""
    rows, columns = parts[0].shape
    block, width = 16, block_width(columns)
    wanted = max(64, min(512, PROGRAMS // triton.cdiv(columns, width)))
    per = triton.cdiv(triton.cdiv(rows, wanted), block) * block
    chunks = triton.cdiv(rows, per)
    found = torch.empty(chunks, 2, len(parts), columns, device=parts[0].device)
    if not found.is_meta:
        _statistics_kernel[(triton.cdiv(columns, width), chunks)](
            *_pointers(parts), found, rows, columns, per,
            K=len(parts), BM=block, BN=width, num_warps=4,
        )  # fmt: skip
    return affine(found, rows, per, norm)


def normalise(
    parts: Sequence[Tensor], affine: ScaleShift, other: Tensor | None, relu: bool, inplace: bool = False
) -> Tensor:
    """relu((parts[0] + ... + parts[k]) * scale[k] + shift[k] + other) for every k: (K, rows, columns)."""
    rows, columns = parts[0].shape
    out = (
        parts[0][None]
        if inplace
        else torch.empty(len(parts), rows, columns, dtype=parts[0].dtype, device=parts[0].device)
    )
    if not out.is_meta:
        width = block_width(columns)
        _apply_kernel[(triton.cdiv(rows, 64) * triton.cdiv(columns, width),)](
            *_pointers(parts), *affine, parts[0] if other is None else other, out,
            rows, columns, 0 if other is None else other.stride(0), 0,
            K=len(parts), RELU=relu, ADD=other is not None, POOL=False, BM=64, BN=width, num_warps=4,
        )  # fmt: skip
    return out


def normalise_pool(
    parts: Sequence[Tensor], affine: ScaleShift, other: Tensor | None, relu: bool, images: int
) -> Tensor:
    """As :func:`normalise`, then the mean over the pixels of each image, in float32: (K, images, columns)."""
    rows, columns = parts[0].shape
    out = torch.empty(len(parts), images, columns, device=parts[0].device)
    if not out.is_meta:
        width, pixels = block_width(columns), rows // images
        _apply_kernel[(images, triton.cdiv(columns, width))](
            *_pointers(parts), *affine, parts[0] if other is None else other, out,
            rows, columns, 0 if other is None else other.stride(0), pixels,
            K=len(parts), RELU=relu, ADD=other is not None, POOL=True,
            BM=triton.next_power_of_2(pixels), BN=width, num_warps=4,
        )  # fmt: skip
    return out
