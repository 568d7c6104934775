"""Batch norm and the activation after it in one, for training on a GPU with channels-last memory.

PyTorch's own batch norm, and the activation as a pass of its own, take over half of a training step of MobileNetV2.
Activations are matrices here: rows are the pixels of all images, columns the channels. A way forward reads them twice
and writes once, a way back reads twice what it needs and writes once. Evaluation, and everything on a CPU, is
PyTorch's own.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor, nn

TILE = 2048
NARROW = 64
PROGRAMS = 2048
"""How many reduce side by side: several for each multiprocessor."""
BOUNDS = {nn.ReLU: (0.0, math.inf), nn.ReLU6: (0.0, 6.0)}


@triton.jit(do_not_specialize=["rows", "per"])
def _sums_kernel(x, found, rows, columns, per, BM: tl.constexpr, BC: tl.constexpr):
    """Sums and sums of squares of the columns over ``per`` rows: found (chunks, 2, columns)."""
    column = tl.program_id(0) * BC + tl.arange(0, BC)
    chunk = tl.program_id(1)
    inside = column < columns
    total = tl.zeros((BM, BC), tl.float32)
    square = tl.zeros((BM, BC), tl.float32)
    end = tl.minimum((chunk + 1) * per, rows)
    for start in range(chunk * per, end, BM):
        row = start + tl.arange(0, BM)
        mask = (row < end)[:, None] & inside[None, :]
        value = tl.load(x + row.to(tl.int64)[:, None] * columns + column[None, :], mask=mask, other=0.0).to(tl.float32)
        total += value
        square += value * value
    place = found + chunk * 2 * columns + column
    tl.store(place, tl.sum(total, 0), mask=inside)
    tl.store(place + columns, tl.sum(square, 0), mask=inside)


@triton.jit(do_not_specialize=["rows", "chunks"])
def _norm_kernel(
    found, weight, bias, running_mean, running_var, affine, rows, columns, chunks, momentum, eps,
    BP: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """What the sums say: affine (4, columns) of scale, shift, mean and 1 / deviation, and the running statistics."""
    column = tl.program_id(0) * BC + tl.arange(0, BC)
    inside = column < columns
    total = tl.zeros((BP, BC), tl.float32)
    square = tl.zeros((BP, BC), tl.float32)
    for start in range(0, chunks, BP):
        chunk = start + tl.arange(0, BP)
        mask = (chunk < chunks)[:, None] & inside[None, :]
        place = found + chunk[:, None] * 2 * columns + column[None, :]
        total += tl.load(place, mask=mask, other=0.0)
        square += tl.load(place + columns, mask=mask, other=0.0)
    mean = tl.sum(total, 0) / rows
    var = tl.maximum(tl.sum(square, 0) / rows - mean * mean, 0.0)
    inverse = 1.0 / tl.sqrt(var + eps)
    scale = tl.load(weight + column, mask=inside, other=0.0) * inverse
    tl.store(affine + column, scale, mask=inside)
    tl.store(affine + columns + column, tl.load(bias + column, mask=inside, other=0.0) - mean * scale, mask=inside)
    tl.store(affine + 2 * columns + column, mean, mask=inside)
    tl.store(affine + 3 * columns + column, inverse, mask=inside)
    old = tl.load(running_mean + column, mask=inside, other=0.0)
    tl.store(running_mean + column, old + momentum * (mean - old), mask=inside)
    old = tl.load(running_var + column, mask=inside, other=0.0)
    tl.store(running_var + column, old + momentum * (var * (rows / (rows - 1.0)) - old), mask=inside)


@triton.jit(do_not_specialize=["rows"])
def _apply_kernel(x, y, affine, rows, columns, low, high, BM: tl.constexpr, BC: tl.constexpr):
    """y = x * scale + shift, kept within low and high."""
    column = tl.program_id(1) * BC + tl.arange(0, BC)
    row = tl.program_id(0) * BM + tl.arange(0, BM)
    inside = column < columns
    mask = (row < rows)[:, None] & inside[None, :]
    place = row.to(tl.int64)[:, None] * columns + column[None, :]
    scale = tl.load(affine + column, mask=inside, other=0.0)
    shift = tl.load(affine + columns + column, mask=inside, other=0.0)
    value = tl.load(x + place, mask=mask, other=0.0).to(tl.float32) * scale[None, :] + shift[None, :]
    tl.store(y + place, tl.minimum(tl.maximum(value, low), high).to(y.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["rows", "per"])
def _back_sums_kernel(
    x, dy, affine, found, rows, columns, per, low, high, BM: tl.constexpr, BC: tl.constexpr
):  # fmt: skip
    """Sums of g and of g * normalised x over ``per`` rows, g being dy where the activation let x pass."""
    column = tl.program_id(0) * BC + tl.arange(0, BC)
    chunk = tl.program_id(1)
    inside = column < columns
    scale = tl.load(affine + column, mask=inside, other=0.0)[None, :]
    shift = tl.load(affine + columns + column, mask=inside, other=0.0)[None, :]
    mean = tl.load(affine + 2 * columns + column, mask=inside, other=0.0)[None, :]
    inverse = tl.load(affine + 3 * columns + column, mask=inside, other=0.0)[None, :]
    total = tl.zeros((BM, BC), tl.float32)
    along = tl.zeros((BM, BC), tl.float32)
    end = tl.minimum((chunk + 1) * per, rows)
    for start in range(chunk * per, end, BM):
        row = start + tl.arange(0, BM)
        mask = (row < end)[:, None] & inside[None, :]
        place = row.to(tl.int64)[:, None] * columns + column[None, :]
        value = tl.load(x + place, mask=mask, other=0.0).to(tl.float32)
        given = tl.load(dy + place, mask=mask, other=0.0).to(tl.float32)
        before = value * scale + shift
        given = tl.where((before > low) & (before < high), given, 0.0)
        total += given
        along += given * (value - mean) * inverse
    place = found + chunk * 2 * columns + column
    tl.store(place, tl.sum(total, 0), mask=inside)
    tl.store(place + columns, tl.sum(along, 0), mask=inside)


@triton.jit(do_not_specialize=["chunks"])
def _gather_kernel(found, sums, columns, chunks, BP: tl.constexpr, BC: tl.constexpr):
    """Sums over chunks: (2, columns), which are the gradients of bias and weight."""
    column = tl.program_id(0) * BC + tl.arange(0, BC)
    inside = column < columns
    total = tl.zeros((BP, BC), tl.float32)
    along = tl.zeros((BP, BC), tl.float32)
    for start in range(0, chunks, BP):
        chunk = start + tl.arange(0, BP)
        mask = (chunk < chunks)[:, None] & inside[None, :]
        place = found + chunk[:, None] * 2 * columns + column[None, :]
        total += tl.load(place, mask=mask, other=0.0)
        along += tl.load(place + columns, mask=mask, other=0.0)
    tl.store(sums + column, tl.sum(total, 0), mask=inside)
    tl.store(sums + columns + column, tl.sum(along, 0), mask=inside)


@triton.jit(do_not_specialize=["rows"])
def _back_kernel(x, dy, dx, affine, sums, rows, columns, low, high, BM: tl.constexpr, BC: tl.constexpr):
    """dx = scale * (g - mean of g - normalised x * mean of g * normalised x)."""
    column = tl.program_id(1) * BC + tl.arange(0, BC)
    row = tl.program_id(0) * BM + tl.arange(0, BM)
    inside = column < columns
    mask = (row < rows)[:, None] & inside[None, :]
    place = row.to(tl.int64)[:, None] * columns + column[None, :]
    scale = tl.load(affine + column, mask=inside, other=0.0)[None, :]
    shift = tl.load(affine + columns + column, mask=inside, other=0.0)[None, :]
    mean = tl.load(affine + 2 * columns + column, mask=inside, other=0.0)[None, :]
    inverse = tl.load(affine + 3 * columns + column, mask=inside, other=0.0)[None, :]
    total = (tl.load(sums + column, mask=inside, other=0.0) / rows)[None, :]
    along = (tl.load(sums + columns + column, mask=inside, other=0.0) / rows)[None, :]
    value = tl.load(x + place, mask=mask, other=0.0).to(tl.float32)
    given = tl.load(dy + place, mask=mask, other=0.0).to(tl.float32)
    before = value * scale + shift
    given = tl.where((before > low) & (before < high), given, 0.0)
    result = scale * (given - total - (value - mean) * inverse * along)
    tl.store(dx + place, result.to(dx.dtype.element_ty), mask=mask)


class _Plan:
    """How the kernels cover a matrix of some rows and columns."""

    def __init__(self, x: Tensor):
        self.columns = x.shape[1]
        self.rows = x.numel() // self.columns
        self.bc = max(8, triton.next_power_of_2(self.columns))
        if self.bc > NARROW:  # the size that leaves fewest columns idle
            self.bc = min((2 * NARROW, NARROW), key=lambda size: triton.cdiv(self.columns, size) * size)
        self.bm = TILE // self.bc
        across = triton.cdiv(self.columns, self.bc)
        chunks = max(1, min(PROGRAMS // across, triton.cdiv(self.rows, 2 * self.bm)))
        self.per = triton.cdiv(triton.cdiv(self.rows, chunks), self.bm) * self.bm
        self.chunks = triton.cdiv(self.rows, self.per)
        self.reduce = (across, self.chunks)
        self.cover = (triton.cdiv(self.rows, self.bm), across)
        self.gather = (triton.cdiv(self.columns, 16),)
        self.tile: dict[str, Any] = {"BM": self.bm, "BC": self.bc}
        self.found = torch.empty(self.chunks, 2, self.columns, device=x.device)


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, norm: nn.BatchNorm2d, bounds: Any) -> Tensor:
        x = x.contiguous(memory_format=torch.channels_last)
        plan = _Plan(x)
        affine = torch.empty(4, plan.columns, device=x.device)
        y = torch.empty_like(x)
        _sums_kernel[plan.reduce](x, plan.found, plan.rows, plan.columns, plan.per, **plan.tile)
        _norm_kernel[plan.gather](
            plan.found, weight, bias, norm.running_mean, norm.running_var, affine, plan.rows, plan.columns,
            plan.chunks, norm.momentum, norm.eps, BP=64, BC=16,
        )  # fmt: skip
        _apply_kernel[plan.cover](x, y, affine, plan.rows, plan.columns, *bounds, **plan.tile)
        ctx.save_for_backward(x, affine)
        ctx.bounds = bounds
        return y

    @staticmethod
    def backward(ctx: Any, *given: Tensor) -> tuple[Tensor | None, ...]:
        x, affine = ctx.saved_tensors
        dy = given[0].to(x.dtype).contiguous(memory_format=torch.channels_last)
        plan = _Plan(x)
        sums = torch.empty(2, plan.columns, device=x.device)
        dx = torch.empty_like(x)
        _back_sums_kernel[plan.reduce](
            x, dy, affine, plan.found, plan.rows, plan.columns, plan.per, *ctx.bounds, **plan.tile
        )
        _gather_kernel[plan.gather](plan.found, sums, plan.columns, plan.chunks, BP=64, BC=16)
        _back_kernel[plan.cover](x, dy, dx, affine, sums, plan.rows, plan.columns, *ctx.bounds, **plan.tile)
        return dx, sums[1], sums[0], None, None


class FastNorm(nn.BatchNorm2d):
    """Batch norm with the bounds of the activation after it."""

    bounds: tuple[float, float]

    def forward(self, input: Tensor) -> Tensor:
        grad = torch.is_grad_enabled()
        if self.training and grad and input.is_cuda and self.momentum is not None:
            self.num_batches_tracked.add_(1)
            return _Norm.apply(input, self.weight, self.bias, self, self.bounds)
        return super().forward(input).clamp(*self.bounds) if self.bounds[0] == 0 else super().forward(input)


def fasten(model: nn.Module) -> nn.Module:
    """Let every batch norm of ``model`` take the activation after it along, in place; parameters keep their names."""
    for block in [m for m in model.modules() if isinstance(m, nn.Sequential)]:
        names = list(block._modules)
        for name, after in zip(names, [*names[1:], None], strict=True):
            norm = block._modules[name]
            if type(norm) is not nn.BatchNorm2d or not norm.affine or not norm.track_running_stats:
                continue
            act = block._modules[after] if after is not None else None
            norm.__class__ = FastNorm
            norm.bounds = BOUNDS.get(type(act), (-math.inf, math.inf))
            if after is not None and type(act) in BOUNDS:
                block._modules[after] = nn.Identity()
    return model


def worst_error(device: str = "cuda", dtype: torch.dtype = torch.bfloat16) -> float:
    """The largest error relative to PyTorch's own batch norm in float32, over some shapes: output and gradients."""
    worst = 0.0
    generator = torch.Generator(device).manual_seed(0)
    for count, channels, size in ((8, 3, 5), (16, 43, 7), (32, 96, 8), (4, 300, 9)):
        shape = (count, channels, size, size)
        x, dy = (torch.randn(shape, generator=generator, device=device).to(dtype).float() for _ in range(2))
        found = []
        for fast in (False, True):
            torch.manual_seed(1)
            block = nn.Sequential(nn.BatchNorm2d(channels), nn.ReLU6()).to(device)
            nn.init.uniform_(block[0].weight, 0.5, 4.0)
            nn.init.uniform_(block[0].bias, -1.0, 3.0)
            given = (x.to(dtype) if fast else x).contiguous(memory_format=torch.channels_last).requires_grad_()
            norm = block[0]
            y = _Norm.apply(given, norm.weight, norm.bias, norm, (0.0, 6.0)) if fast else block(given)
            y.backward(dy.to(y.dtype))
            found.append([y, given.grad, norm.weight.grad, norm.bias.grad, norm.running_mean, norm.running_var])
        for a, b in zip(*found, strict=True):
            worst = max(worst, float((a - b.float()).norm().detach() / a.norm().detach().clamp_min(1e-12)))
    return worst
