"""How labels pass through operators: one small rule per kind of operator.

A rule takes a :class:`Call` and returns the :class:`Value` (or list of values) the operator makes,
linking the labels that must agree. Operators that torch itself tags as pointwise share one rule.
To teach bcnet an operator of your own::

    @rule("mylib::gate")
    def gate(call: Call) -> Value:
        return call.together("x", "scale")
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from bcnet.space.labels import Links, Value, along, varying, vector


@dataclass(frozen=True)
class Call:
    """One operator call: its arguments by the names of its schema, tensors as :class:`Value`."""

    links: Links
    args: dict[str, Any]
    shapes: tuple[tuple[int, ...], ...]
    where: str
    run: Callable[..., Any]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.shapes[0]

    def value(self, name: str) -> Value:
        found = self.args[name]
        assert isinstance(found, Value), f"{name} of {self.where} is no tensor"
        return found

    def axis(self, name: str = "dim", of: str = "self") -> int:
        return int(self.args[name]) % max(1, len(self.value(of).shape))

    def values(self) -> list[Value]:
        """All tensors among the arguments."""
        found = [a for a in self.args.values() if isinstance(a, Value)]
        for a in self.args.values():
            if isinstance(a, (list, tuple)):
                found.extend(v for v in a if isinstance(v, Value))
        return found

    def together(self, *names: str) -> Value:
        """The named tensors (all, if none is named) broadcast to the output, element for element."""
        values = [self.value(n) for n in names if self.args.get(n) is not None] if names else self.values()
        return together(self.links, values, self.shape, self.where)

    def fixed(self, value: Value, why: str) -> None:
        self.links.fix(value, f"{self.where}: {why}")


Rule = Callable[[Call], "Value | list[Value]"]
RULES: dict[str, Rule] = {}


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Register a rule for operators named as torch names them, e.g. ``aten::conv2d``."""

    def register(function: Rule) -> Rule:
        for name in names:
            RULES[name] = function
        return function

    return register


def together(links: Links, values: Sequence[Value], shape: tuple[int, ...], where: str) -> Value:
    """Broadcast ``values`` to ``shape`` and link labels that meet; labels that meet none are fixed."""
    layers: list[Tensor] = []
    seen: list[tuple[int, ...]] = []
    for value in values:
        padded = (1,) * (len(shape) - len(value.shape)) + value.shape
        mine = [layer.reshape(padded).expand(shape) for layer in value.layers]
        unmet = list(layers)
        for layer in mine:
            axes = set(varying(layer))
            met = [other for other in layers if axes & set(varying(other))]
            for other in met:
                links.link(layer, other, f"{where} joins it with something of fixed size")
            unmet = [other for other in unmet if not any(other is m for m in met)]
            if not met:
                if any(all(extent[a] > 1 for a in axes) for extent in seen):
                    links.fix(Value(shape, (layer,)), f"{where} joins it with something of fixed size")
                layers.append(layer)
        for other in unmet:
            if all(padded[a] > 1 for a in varying(other)):
                links.fix(Value(shape, (other,)), f"{where} joins it with something of fixed size")
        seen.append(padded)
    return Value(shape, tuple(layers), all(v.static for v in values)).pruned()


def carry(call: Call, value: Value, shape: tuple[int, ...] | None = None) -> Value:
    """``value`` with other extents on axes its labels do not vary along (pooling, padding, resizing)."""
    shape = call.shape if shape is None else shape
    layers = []
    for layer in value.layers:
        axes = varying(layer)
        if len(value.shape) == len(shape) and all(value.shape[a] == shape[a] for a in axes):
            for axis in range(len(shape)):
                if axis not in axes:
                    layer = layer.narrow(axis, 0, 1)
            layers.append(layer.expand(shape))
        else:
            call.fixed(Value(value.shape, (layer,)), "it changes the size of this axis")
    return Value(shape, tuple(layers), value.static)


def _layer(value: Value | None, axis: int) -> Tensor | None:
    """The labels (n,) along ``axis``, or None where the axis carries none."""
    if value is None:
        return None
    found = [layer for layer in value.layers if axis in varying(layer)]
    return vector(found[0], axis) if found else None


def _agree(call: Call, a: Value | None, axis_a: int, b: Value | None, axis_b: int) -> None:
    """Two axes of equal size must keep the same channels."""
    if a is None or b is None:
        return
    left, right = _layer(a, axis_a), _layer(b, axis_b)
    if left is None and right is None:
        return
    zeros = torch.zeros(a.shape[axis_a], dtype=torch.int64)
    call.links.link(
        zeros if left is None else left, zeros if right is None else right, f"{call.where} joins it with a fixed axis"
    )


def _fix_other(call: Call, value: Value, *axes: int) -> None:
    """Fix labels of ``value`` along axes other than the given ones (kernel sizes and the like)."""
    for layer in value.layers:
        if not set(varying(layer)) & set(axes):
            call.fixed(Value(value.shape, (layer,)), "a kernel's size does not vary")


@rule("aten::conv1d", "aten::conv2d", "aten::conv3d")
def convolution(call: Call) -> Value:
    return _convolution(call, out_axis=0, in_axis=1)


@rule("aten::conv_transpose1d", "aten::conv_transpose2d", "aten::conv_transpose3d")
def transposed_convolution(call: Call) -> Value:
    return _convolution(call, out_axis=1, in_axis=0)


def drops_whole_groups(groups: int, per_group_in: int, per_group_out: int) -> bool:
    """A grouped layer loses whole groups (depthwise, ResNeXt) or channels of each group, whichever is finer."""
    return groups >= min(per_group_in, per_group_out)


def _convolution(call: Call, out_axis: int, in_axis: int) -> Value:
    x, weight, bias, groups = call.value("input"), call.value("weight"), call.args["bias"], int(call.args["groups"])
    _fix_other(call, weight, 0, 1)
    outputs, n_out = _layer(weight, out_axis), call.shape[1]
    result = torch.zeros(n_out, dtype=torch.int64)
    if groups == 1:
        _agree(call, x, 1, weight, in_axis)
        result = result if outputs is None else outputs
    else:
        result = _grouped(call, x, weight, (out_axis, in_axis), groups)
    if bias is not None:
        _agree(call, bias, 0, Value((n_out,), (result,)).pruned(), 0)
    for layer in x.layers:
        if varying(layer) != (1,):
            call.fixed(Value(x.shape, (layer,)), "a convolution runs over this axis")
    return Value(call.shape, (along(result, 1, call.shape),), x.static and weight.static).pruned()


def _grouped(call: Call, x: Value, weight: Value, axes: tuple[int, int], groups: int) -> Tensor:
    """Link a grouped convolution's channels and return its output labels (n_out,).

    Either whole groups go (input and output channels of one group together), or every group loses the
    same channels. A transposed weight (in, out/groups) has the grouped axis on the other side.
    """
    out_axis, in_axis = axes
    n_in, n_out = x.shape[1], call.shape[1]
    given = _layer(x, 1)
    source = torch.zeros(n_in, dtype=torch.int64) if given is None else given
    source = source.reshape(groups, -1)
    grouped_axis, plain_axis = (out_axis, in_axis) if out_axis == 0 else (in_axis, out_axis)
    grouped, plain = _layer(weight, grouped_axis), _layer(weight, plain_axis)
    full = torch.zeros(weight.shape[grouped_axis], dtype=torch.int64) if grouped is None else grouped
    rows = full.reshape(groups, -1)
    why = f"{call.where} joins it with a fixed axis"
    links = call.links
    if drops_whole_groups(groups, n_in // groups, n_out // groups):
        links.link(source, source[:, :1], why)
        links.link(rows, source[:, :1], why)
        if plain is not None:
            call.fixed(Value(plain.shape, (plain,)), "the size of a group does not vary")
        return rows[:, :1].expand(groups, n_out // groups).reshape(-1) if out_axis else rows.reshape(-1)
    links.link(source, source[:1], why)
    links.link(rows, rows[:1], why)
    inner = torch.zeros(weight.shape[plain_axis], dtype=torch.int64) if plain is None else plain
    if out_axis == 0:
        links.link(inner, source[0], why)
        return rows.reshape(-1)
    links.link(rows[0], source[0], why)
    return inner.repeat(groups)


@rule("aten::linear")
def linear(call: Call) -> Value:
    x, weight = call.value("input"), call.value("weight")
    last = len(x.shape) - 1
    _agree(call, x, last, weight, 1)
    layers = [layer.narrow(last, 0, 1).expand(call.shape) for layer in x.layers if last not in varying(layer)]
    outputs = _layer(weight, 0)
    if outputs is not None:
        _agree(call, call.args.get("bias"), 0, weight, 0)
        layers.append(along(outputs, last, call.shape))
    elif call.args.get("bias") is not None:
        call.fixed(call.value("bias"), "its layer's output does not vary")
    return Value(call.shape, tuple(layers), x.static and weight.static)


@rule("aten::matmul", "aten::mm", "aten::bmm")
def matmul(call: Call) -> Value:
    a, b = call.value("self"), call.value("mat2" if "mat2" in call.args else "other")
    if len(a.shape) < 2 or len(b.shape) < 2:
        call.fixed(a, "a product with a vector")
        call.fixed(b, "a product with a vector")
        return Value(call.shape)
    together(
        call.links,
        [a.map(lambda t: t[..., 0, :]), b.map(lambda t: t[..., :, 0])],
        (*call.shape[:-2], a.shape[-1]),
        call.where,
    )
    rows = a.map(lambda t: t[..., :, :1])
    columns = b.map(lambda t: t[..., :1, :])
    return together(call.links, [rows, columns], call.shape, call.where)


@rule("aten::scaled_dot_product_attention")
def attention(call: Call) -> Value:
    query, key, value = (call.value(n).map(lambda t: t[..., :1, :]) for n in ("query", "key", "value"))
    together(call.links, [query, key, value], query.shape, call.where)
    return carry(call, call.value("value"))


@rule("aten::einsum")
def einsum(call: Call) -> Value:
    terms, _, result = str(call.args["equation"]).replace(" ", "").partition("->")
    tensors = call.args["tensors"]
    first: dict[str, tuple[Value, int]] = {}
    for letters, value in zip(terms.split(","), tensors, strict=True):
        for axis, letter in enumerate(letters):
            if letter in first:
                _agree(call, first[letter][0], first[letter][1], value, axis)
            elif _layer(value, axis) is not None or letter not in first:
                first[letter] = (value, axis)
    layers = []
    for axis, letter in enumerate(result):
        labels = _layer(*first[letter])
        if labels is not None:
            layers.append(along(labels, axis, call.shape))
    return Value(call.shape, tuple(layers))


@rule("aten::batch_norm", "aten::instance_norm")
def batch_norm(call: Call) -> Value:
    x = call.value("input")
    for name in ("weight", "bias", "running_mean", "running_var"):
        _agree(call, x, 1, call.args.get(name), 0)
    return x


@rule("aten::group_norm")
def group_norm(call: Call) -> Value:
    x, groups = call.value("input"), int(call.args["num_groups"])
    labels = _layer(x, 1)
    for name in ("weight", "bias"):
        _agree(call, x, 1, call.args.get(name), 0)
    if labels is not None and groups > 1:
        rows = labels.reshape(groups, -1)
        whole = drops_whole_groups(groups, rows.shape[1], rows.shape[1])
        call.links.link(rows, rows[:, :1] if whole else rows[:1], f"{call.where} normalises it in groups")
    return x


@rule("aten::layer_norm", "aten::rms_norm")
def layer_norm(call: Call) -> Value:
    return call.together("input", "weight", "bias")


@rule("aten::cat", "aten::concat", "aten::concatenate")
def cat(call: Call) -> Value:
    tensors: list[Value] = [t for t in call.args["tensors"] if t.shape != (0,)]
    dim = int(call.args["dim"]) % len(call.shape)
    others = [t.map(lambda layer: layer.narrow(dim, 0, 1)) for t in tensors]
    base = (*call.shape[:dim], 1, *call.shape[dim + 1 :])
    joined = together(call.links, others, base, call.where)
    layers = [layer.expand(call.shape) for layer in joined.layers]
    if any(_layer(t, dim) is not None for t in tensors):
        pieces = [_layer(t, dim) for t in tensors]
        filled = [
            torch.zeros(t.shape[dim], dtype=torch.int64) if p is None else p
            for t, p in zip(tensors, pieces, strict=True)
        ]
        layers.append(along(torch.cat(filled), dim, call.shape))
    return Value(call.shape, tuple(layers), all(t.static for t in tensors))


@rule("aten::stack")
def stack(call: Call) -> Value:
    dim = int(call.args["dim"]) % len(call.shape)
    values = [t.map(lambda layer: layer.unsqueeze(dim)) for t in call.args["tensors"]]
    base = (*call.shape[:dim], 1, *call.shape[dim + 1 :])
    joined = together(call.links, values, base, call.where)
    return Value(call.shape, tuple(layer.expand(call.shape) for layer in joined.layers), joined.static)


@rule("aten::split", "aten::chunk", "aten::split_with_sizes", "aten::tensor_split", "aten::unsafe_chunk")
def split(call: Call) -> list[Value]:
    x, dim = call.value("self"), call.axis()
    sizes = [shape[dim] for shape in call.shapes]
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    parts = [x.map(lambda t, s=s, n=n: t.narrow(dim, s, n)) for s, n in zip(starts, sizes, strict=True)]
    labels = _layer(x, dim)
    asked = call.args.get("split_sizes", call.args.get("split_size"))
    if labels is not None and len(set(sizes)) == 1 and len(sizes) > 1 and not isinstance(asked, (list, tuple)):
        # An equal split stays equal, as the network's own code says it.
        rows = labels.reshape(len(sizes), -1)
        call.links.link(rows, rows[:1], f"{call.where} splits it into equal parts")
    return parts


@rule("aten::unbind")
def unbind(call: Call) -> list[Value]:
    x, dim = call.value("self"), call.axis()
    _fix_axis(call, x, dim)
    return [x.map(lambda t, i=i: t.select(dim, i)) for i in range(x.shape[dim])]


@rule("aten::select")
def select(call: Call) -> Value:
    x, dim = call.value("self"), call.axis()
    _fix_axis(call, x, dim)
    return x.map(lambda t: t.select(dim, int(call.args["index"])))


def _fix_axis(call: Call, x: Value, dim: int) -> None:
    for layer in x.layers:
        if varying(layer) == (dim,):
            call.fixed(Value(x.shape, (layer,)), "it picks single channels by number")


@rule("aten::view", "aten::reshape", "aten::_unsafe_view", "aten::flatten", "aten::unflatten", "aten::view_as")
@rule("aten::reshape_as", "aten::squeeze", "aten::unsqueeze", "aten::movedim")
def reshape(call: Call) -> Value:
    """Labels move with their elements; an axis that is factored must keep equal counts per row.

    A channel shuffle (factor, transpose, merge) changes the order of channels, not how many there are:
    merged labels return in the order they had before, so that later splits see whole variables.
    """
    x = call.value("self")
    layers = []
    for layer in x.layers:
        before, moved = varying(layer), layer.reshape(call.shape)
        after = varying(moved)
        if len(before) == 1 and len(after) > 1:
            labels = vector(layer, before[0])
            call.links.orders[_key(labels)] = labels
            longest = max(after, key=lambda a: (call.shape[a], a))
            for axis in set(after) - {longest}:
                call.links.link(moved, moved.narrow(axis, 0, 1), f"{call.where} factors it")
        elif len(before) > 1 and len(after) == 1:
            original = call.links.orders.get(_key(vector(moved, after[0])))
            if original is not None:
                moved = along(original, after[0], call.shape)
        layers.append(moved)
    for i, layer in enumerate(layers):
        if any(set(varying(layer)) & set(varying(other)) for other in layers[:i]):
            call.fixed(Value(call.shape, tuple(layers)), "it merges two axes that could both vary")
    return Value(call.shape, tuple(layers), x.static).pruned()


def _key(labels: Tensor) -> bytes:
    return labels.sort().values.numpy().tobytes()


@rule("aten::permute", "aten::transpose", "aten::t", "aten::swapaxes", "aten::numpy_T", "aten::slice", "aten::narrow")
@rule("aten::roll", "aten::flip", "aten::repeat", "aten::repeat_interleave", "aten::tile", "aten::channel_shuffle")
def movement(call: Call) -> Value:
    """Run the operator on the labels themselves."""
    x = call.value("self")
    return x.map(lambda layer: call.run(layer))


@rule("aten::expand", "aten::expand_as", "aten::broadcast_to")
def expand(call: Call) -> Value:
    """A constant blown up to some channels (a blur kernel) takes as many as it meets: fresh labels."""
    x = call.value("self")
    padded = (1,) * (len(call.shape) - len(x.shape)) + x.shape
    layers = [layer.reshape(padded).expand(call.shape) for layer in x.layers]
    if x.static:
        grown = [a for a in range(len(padded)) if padded[a] == 1 and call.shape[a] > 1]
        layers += [along(call.links.fresh(call.shape[a]), a, call.shape) for a in grown]
    return Value(call.shape, tuple(layers), x.static)


@rule("aten::constant_pad_nd", "aten::pad", "aten::reflection_pad2d", "aten::replication_pad2d")
def pad(call: Call) -> Value:
    """Padding of the channel axis adds as many zero channels as the next layer asks for: fresh labels."""
    x, amounts = call.value("self"), list(call.args.get("pad", call.args.get("padding")))
    layers = []
    for layer in x.layers:
        axes = varying(layer)
        axis = axes[0] if len(axes) == 1 else None
        place = None if axis is None else len(x.shape) - 1 - axis
        if axis is None or place is None or 2 * place >= len(amounts) or not any(amounts[2 * place : 2 * place + 2]):
            layers.extend(carry(call, Value(x.shape, (layer,))).layers)
            continue
        before, after = amounts[2 * place : 2 * place + 2]
        labels = torch.cat([call.links.fresh(before), vector(layer, axis), call.links.fresh(after)])
        layers.append(along(labels, axis, call.shape))
    return Value(call.shape, tuple(layers), x.static)


@rule("aten::mean", "aten::sum", "aten::amax", "aten::amin", "aten::max", "aten::min", "aten::var", "aten::std")
@rule("aten::norm", "aten::linalg_vector_norm", "aten::logsumexp", "aten::prod", "aten::var_mean", "aten::std_mean")
@rule("aten::argmax", "aten::argmin", "aten::any", "aten::all")
def reduction(call: Call) -> Value | list[Value]:
    x = call.values()[0]
    if "other" in call.args:
        return call.together()
    dims = call.args.get("dim")
    axes = range(len(x.shape)) if dims is None else [dims] if isinstance(dims, int) else list(dims)
    chosen = sorted({a % len(x.shape) for a in axes}) if x.shape else []
    reduced = x.map(lambda layer: _first(layer, chosen).reshape(call.shape))
    return [reduced] * len(call.shapes) if len(call.shapes) > 1 else reduced


def _first(layer: Tensor, axes: Sequence[int]) -> Tensor:
    for axis in axes:
        layer = layer.narrow(axis, 0, 1)
    return layer


@rule("aten::pixel_shuffle")
def pixel_shuffle(call: Call) -> Value:
    x, square = call.value("self"), int(call.args["upscale_factor"]) ** 2
    labels = _layer(x, 1)
    if labels is None:
        return Value(call.shape)
    rows = labels.reshape(-1, square)
    call.links.link(rows, rows[:, :1], f"{call.where} folds it into space")
    return Value(call.shape, (along(rows[:, 0], 1, call.shape),)).pruned()


@rule("aten::pixel_unshuffle", "aten::im2col")
def unfold_channels(call: Call) -> Value:
    x = call.value("self")
    labels = _layer(x, 1)
    if labels is None:
        return Value(call.shape)
    return Value(call.shape, (along(labels.repeat_interleave(call.shape[1] // x.shape[1]), 1, call.shape),))


@rule(*(f"aten::{name}" for name in "hardswish hardtanh hardsigmoid relu6 selu celu mish log_sigmoid rrelu".split()))
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
_assert_tensor_metadata prelu_ detach_ fill_ zero_ float half bfloat16 double rot90""".split()


@rule(*(f"aten::{name}" for name in _SAME))
def same(call: Call) -> Value | list[Value]:
    """Channels pass through untouched; extents of other axes may change."""
    x = call.values()[0]
    return [carry(call, x, shape) for shape in call.shapes] if len(call.shapes) > 1 else carry(call, x)


@rule("aten::prelu", "aten::_prelu_kernel")
def prelu(call: Call) -> Value:
    x, weight = call.value("self"), call.value("weight")
    if prod(weight.shape) > 1:
        _agree(call, x, 1, weight, 0)
    return x


@rule("aten::glu")
def glu(call: Call) -> Value:
    x, dim = call.value("self"), call.axis()
    labels = _layer(x, dim)
    if labels is not None:
        halves = labels.reshape(2, -1)
        call.links.link(halves, halves[:1], f"{call.where} splits it into equal parts")
    return x.map(lambda t: t.narrow(dim, 0, x.shape[dim] // 2))
