"""Rules of the operators that keep channels apart: norms, activations, pooling, resizing, copies."""

from __future__ import annotations

from math import prod

from bcnet.space.labels import Value
from bcnet.space.operators.base import Call, labels_along, rule
from bcnet.space.operators.products import drops_whole_groups


@rule("aten::batch_norm", "aten::instance_norm")
def batch_norm(call: Call) -> Value:
    x = call.value("input")
    for name in ("weight", "bias", "running_mean", "running_var"):
        call.agree(x, 1, call.args.get(name), 0)
    return x


@rule("aten::group_norm")
def group_norm(call: Call) -> Value:
    x, groups = call.value("input"), int(call.args["num_groups"])
    labels = labels_along(x, 1)
    for name in ("weight", "bias"):
        call.agree(x, 1, call.args.get(name), 0)
    if labels is not None and groups > 1:
        rows = labels.reshape(groups, -1)
        whole = drops_whole_groups(groups, rows.shape[1], rows.shape[1])
        call.links.link(rows, rows[:, :1] if whole else rows[:1], f"{call.where} normalises it in groups")
    return x


@rule("aten::layer_norm", "aten::rms_norm")
def layer_norm(call: Call) -> Value:
    return call.together("input", "weight", "bias")


_POINTWISE = "hardswish hardtanh hardsigmoid relu6 selu celu mish log_sigmoid rrelu"


@rule(*(f"aten::{name}" for name in _POINTWISE.split()))
def activation(call: Call) -> Value:
    """Pointwise functions that torch does not tag as such."""
    return call.together("self")


@rule("aten::copy_", "aten::copy")
def copy(call: Call) -> Value:
    return call.together("self", "src")


_SAME = """softmax _softmax log_softmax dropout dropout_ feature_dropout alpha_dropout contiguous clone detach alias
lift_fresh_copy lift_fresh to _to_copy type_as cumsum zeros_like ones_like rand_like randn_like empty_like full_like
bernoulli bernoulli_ normalize adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d adaptive_max_pool1d
adaptive_max_pool2d adaptive_max_pool3d avg_pool1d avg_pool2d avg_pool3d max_pool1d max_pool2d max_pool3d
max_pool2d_with_indices lp_pool2d upsample_nearest1d upsample_nearest2d upsample_nearest3d upsample_linear1d
upsample_bilinear2d upsample_bicubic2d _upsample_nearest_exact2d upsample_trilinear3d grid_sampler
_assert_tensor_metadata prelu_ detach_ fill_ zero_ float half bfloat16 double rot90"""


@rule(*(f"aten::{name}" for name in _SAME.split()))
def same(call: Call) -> Value | list[Value]:
    """Channels pass through untouched; extents of other axes may change."""
    x = call.values()[0]
    return [call.carry(x, shape) for shape in call.shapes] if len(call.shapes) > 1 else call.carry(x)


@rule("aten::prelu", "aten::_prelu_kernel")
def prelu(call: Call) -> Value:
    x, weight = call.value("self"), call.value("weight")
    if prod(weight.shape) > 1:
        call.agree(x, 1, weight, 0)
    return x


@rule("aten::glu")
def glu(call: Call) -> Value:
    x, dim = call.value("self"), call.axis()
    labels = labels_along(x, dim)
    if labels is not None:
        halves = labels.reshape(2, -1)
        call.links.link(halves, halves[:1], f"{call.where} splits it into equal parts")
    return x.map(lambda t: t.narrow(dim, 0, x.shape[dim] // 2))
