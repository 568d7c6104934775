"""Rules of the layers that multiply channels: convolutions, linear layers, matrix products, attention."""

from __future__ import annotations

import torch
from torch import Tensor

from bcnet.space.labels import Value, along, varying, vector
from bcnet.space.operators.base import Call, labels_along, rule, together


def _fix_other(call: Call, value: Value, *axes: int) -> None:
    """Fix labels of ``value`` along axes other than the given ones (kernel sizes and the like)."""
    for layer in value.layers:
        if not set(varying(layer)) & set(axes):
            call.fixed(layer, "a kernel's size does not vary")


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
    outputs, n_out = labels_along(weight, out_axis), call.shape[1]
    result = torch.zeros(n_out, dtype=torch.int64)
    if groups == 1:
        call.agree(x, 1, weight, in_axis)
        result = result if outputs is None else outputs
    else:
        result = _grouped(call, x, weight, (out_axis, in_axis), groups)
    if bias is not None:
        call.agree(bias, 0, Value((n_out,), (result,)), 0)
    layers = [along(result, 1, call.shape)]
    for layer in x.layers:
        axes = varying(layer)
        if axes != (1,) and all(x.shape[a] == call.shape[a] for a in axes) and len(axes) == 1:
            # A convolution along the channels themselves (efficient channel attention) takes as many as come.
            layers.append(along(vector(layer, axes[0]), axes[0], call.shape))
        elif axes != (1,):
            call.fixed(layer, "a convolution runs over this axis")
    return Value(call.shape, tuple(layers), x.static and weight.static)


def _grouped(call: Call, x: Value, weight: Value, axes: tuple[int, int], groups: int) -> Tensor:
    """Link a grouped convolution's channels and return its output labels (n_out,).

    Either whole groups go (input and output channels of one group together), or every group loses the
    same channels. A transposed weight (in, out/groups) has the grouped axis on the other side.
    """
    out_axis, in_axis = axes
    n_in, n_out = x.shape[1], call.shape[1]
    given = labels_along(x, 1)
    source = torch.zeros(n_in, dtype=torch.int64) if given is None else given
    source = source.reshape(groups, -1)
    grouped_axis, plain_axis = (out_axis, in_axis) if out_axis == 0 else (in_axis, out_axis)
    grouped, plain = labels_along(weight, grouped_axis), labels_along(weight, plain_axis)
    full = torch.zeros(weight.shape[grouped_axis], dtype=torch.int64) if grouped is None else grouped
    rows = full.reshape(groups, -1)
    why = f"{call.where} joins it with a fixed axis"
    links = call.links
    if drops_whole_groups(groups, n_in // groups, n_out // groups):
        links.link(source, source[:, :1], why)
        links.link(rows, source[:, :1], why)
        if plain is not None:
            call.fixed(plain, "the size of a group does not vary")
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
    call.agree(x, last, weight, 1)
    layers = [layer.narrow(last, 0, 1).expand(call.shape) for layer in x.layers if last not in varying(layer)]
    outputs = labels_along(weight, 0)
    if outputs is not None:
        call.agree(call.args.get("bias"), 0, weight, 0)
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
    return call.carry(call.value("value"))


@rule("aten::einsum")
def einsum(call: Call) -> Value:
    terms, _, result = str(call.args["equation"]).replace(" ", "").partition("->")
    tensors = call.args["tensors"]
    first: dict[str, tuple[Value, int]] = {}
    for letters, value in zip(terms.split(","), tensors, strict=True):
        for axis, letter in enumerate(letters):
            if letter in first:
                call.agree(first[letter][0], first[letter][1], value, axis)
            elif labels_along(value, axis) is not None or letter not in first:
                first[letter] = (value, axis)
    layers = []
    for axis, letter in enumerate(result):
        labels = labels_along(*first[letter])
        if labels is not None:
            layers.append(along(labels, axis, call.shape))
    return Value(call.shape, tuple(layers))
