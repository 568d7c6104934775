"""Operators that keep channels apart: norms, activations, pooling, resizing, copies."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from math import prod

import torch

from bcnet.space.labels import Value, varying
from bcnet.space.operators.base import Call, row, together
from bcnet.space.operators.products import drops_whole_groups, group_size
from bcnet.space.operators.table import Hole, Site, rule


@rule("aten::batch_norm", shares="channels", fuses="norm")
@rule("aten::instance_norm")
def batch_norm(call: Call) -> Value:
    x = call.value("input")
    for name in ("weight", "bias", "running_mean", "running_var"):
        call.agree(x, 1, call.args.get(name), 0)
    return x


@rule("aten::group_norm", sizes=lambda site: group_size(site, "num_groups", site.out[1], site.out[1]))
def group_norm(call: Call) -> Value:
    x, groups = call.value("input"), int(call.args["num_groups"])
    for name in ("weight", "bias"):
        call.agree(x, 1, call.args.get(name), 0)
    if groups > 1:
        rows = row(x, 1).reshape(groups, -1)
        whole = drops_whole_groups(groups, rows.shape[1], rows.shape[1])
        call.links.link(rows, rows[:, :1] if whole else rows[:1], f"{call.where} normalises it in groups")
    return x


def _normalized_shape(site: Site) -> Iterator[Hole]:
    shape = site.args["normalized_shape"]
    for i, n in enumerate(shape):
        yield "normalized_shape", i, n, site.out[len(site.out) - len(shape) + i]


@rule("aten::layer_norm", "aten::rms_norm", sizes=_normalized_shape)
def layer_norm(call: Call) -> Value:
    return call.together("input", "weight", "bias")


@rule("aten::_weight_norm", "aten::_weight_norm_interface")
def weight_norm(call: Call) -> Value:
    """Directions ``v`` scaled to lengths ``g``, which has one entry per output."""
    return call.together("v", "g")


_POINTWISE = "hardsigmoid selu celu mish log_sigmoid rrelu softsign tanhshrink hardshrink"


@rule(*(f"aten::{name}" for name in _POINTWISE.split()))
@rule("aten::hardswish", fuses="hardswish")
@rule("aten::hardtanh", fuses="hardtanh")
@rule("aten::relu6", fuses="relu6")
@rule("aten::relu", fuses="relu")
@rule("aten::silu", fuses="silu")
@rule("aten::add", fuses="add")
def pointwise(call: Call) -> Value:
    """Pointwise functions that torch does not tag as such, or about which there is more to say."""
    return call.together()


_LOSSES = "mse_loss l1_loss smooth_l1_loss huber_loss binary_cross_entropy binary_cross_entropy_with_logits kl_div"


@rule(*(f"aten::{name}" for name in _LOSSES.split()))
def loss(call: Call) -> Value:
    """Element by element, and perhaps then reduced."""
    x, target = call.value("self"), call.value("target")
    joined = together(call.links, [x, target], torch.broadcast_shapes(x.shape, target.shape), call.where)
    return joined if joined.shape == call.shape else Value(call.shape)


@rule("aten::copy_", "aten::copy")
def copy(call: Call) -> Value:
    return call.together("self", "src")


_SAME = """softmax _softmax log_softmax alpha_dropout feature_alpha_dropout native_dropout cumsum zeros_like
ones_like rand_like randn_like empty_like full_like bernoulli bernoulli_ normalize lp_pool1d lp_pool2d lp_pool3d
upsample_linear1d upsample_bicubic2d _upsample_bilinear2d_aa _upsample_bicubic2d_aa _upsample_nearest_exact1d
_upsample_nearest_exact2d _upsample_nearest_exact3d upsample_trilinear3d _assert_tensor_metadata prelu_
fill_ zero_ float half bfloat16 double rot90 real imag triu tril"""
_SAME_SHARED = """feature_dropout upsample_nearest1d upsample_nearest2d upsample_nearest3d
upsample_bilinear2d"""


@rule(*(f"aten::{name}" for name in _SAME.split()))
@rule(*(f"aten::{name}" for name in _SAME_SHARED.split()), shares="channels")
@rule("aten::dropout", shares="channels", fuses="dropout")
def same(call: Call) -> list[Value]:
    """Channels pass through unchanged; other axes may change their size."""
    x = call.first
    return [call.carry(x, shape) for shape in call.shapes]


@rule("aten::grid_sampler")
def sampled(call: Call) -> Value:
    """Groups of channels that are merged with the batch have places of their own."""
    x, grid = call.value("input"), call.value("grid")
    call.agree(x, 0, grid, 0)
    call.fixed(grid, "it holds places")
    return call.carry(x)


@rule("aten::type_as")
def typed(call: Call) -> Value:
    """The second tensor gives nothing but its type."""
    x, _ = call.value("self"), call.value("other")
    return call.carry(x)


@rule("aten::alias", "aten::lift_fresh_copy", "aten::lift_fresh", "aten::to", "aten::_to_copy")
@rule("aten::contiguous", "aten::clone", "aten::detach", shares="channels")
def copied(call: Call) -> Value:
    """The tensor itself, indices of channels included."""
    x = call.first
    return replace(call.carry(x), numbers=x.numbers)


@rule("aten::max_unpool2d", "aten::max_unpool3d")
def unpool(call: Call) -> Value:
    x, indices = call.value("self"), call.value("indices")
    return call.carry(together(call.links, [x, indices], x.shape, call.where))


_POOLS = [f"aten::{kind}{d}d" for d in (1, 2, 3) for kind in ("avg_pool", "max_pool", "adaptive_avg_pool")]
_MAX_POOLS = [name for d in (1, 2, 3) for name in (f"aten::max_pool{d}d_with_indices", f"aten::adaptive_max_pool{d}d")]


@rule("aten::adaptive_avg_pool2d", shares="channels", fuses="pool")  # this one counts: decorators apply upwards
@rule(*_POOLS, shares="channels")
@rule(*_MAX_POOLS)
def pool(call: Call) -> list[Value]:
    """As :func:`same`; a window that slides over the channels themselves (local response norm) belongs to its middle
    one."""
    moved = _middles(call, call.first)
    return [call.carry(moved, shape) for shape in call.shapes]


def _middles(call: Call, x: Value) -> Value:
    """``x`` without the channels at both ends that are no window's middle, where a pool runs over channels."""
    kernel = call.args.get("kernel_size")
    if not isinstance(kernel, (list, tuple)):
        return x
    stride = call.args.get("stride") or kernel
    for axis in {axis for layer in x.layers if len(varying(layer)) == 1 for axis in varying(layer)}:
        place = axis - len(x.shape)
        if -place <= len(kernel) and int(kernel[place]) > 1 and int(stride[place]) == 1:
            length, size = int(kernel[place]), call.shape[axis]
            if size == x.shape[axis] - length + 1:
                x = x.map(partial(torch.narrow, dim=axis, start=length // 2, length=size))
    return x


@rule("aten::prelu", "aten::_prelu_kernel")
def prelu(call: Call) -> Value:
    x, weight = call.value("self"), call.value("weight")
    if prod(weight.shape) > 1:
        call.agree(x, 1, weight, 0)
    return x


@rule("aten::glu")
def glu(call: Call) -> Value:
    x, dim = call.value("self"), call.axis()
    call.alike(x, dim, 2, "splits it into equal parts")
    return x.map(lambda t: t.narrow(dim, 0, x.shape[dim] // 2))


@rule("aten::topk", "aten::sort", "aten::argsort", "aten::cummax", "aten::cummin")
def ordered(call: Call) -> list[Value]:
    """Elements sorted along one axis, all of which must stay."""
    kept = call.fixed_along(call.value("self"), {call.axis()}, "it puts these channels in order")
    return [call.carry(kept, shape) for shape in call.shapes]


_TRANSFORMS = [f"aten::fft_{kind}{suffix}" for kind in ("fft", "ifft", "rfft", "irfft") for suffix in ("", "2", "n")]


@rule(*_TRANSFORMS)
def fourier(call: Call) -> Value:
    """Fourier transforms mix the axes they run over."""
    x, dims = call.value("self"), call.args.get("dim")
    axes = range(len(x.shape)) if dims is None else [dims] if isinstance(dims, int) else dims
    return call.carry(call.fixed_along(x, {a % len(x.shape) for a in axes}, "it mixes these channels"))


@rule("aten::view_as_complex")
def as_complex(call: Call) -> Value:
    x = call.value("self")
    return call.fixed_along(x, {len(x.shape) - 1}, "it has the real and the imaginary part").map(lambda t: t[..., 0])


@rule("aten::view_as_real")
def as_real(call: Call) -> Value:
    return call.value("self").map(lambda t: t[..., None].expand(*t.shape, 2))
