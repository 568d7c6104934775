"""Rules of the operators that move elements: joining, splitting, reshaping, padding, reducing."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from bcnet.space.labels import Value, along, settle, shrink, varying, vector
from bcnet.space.operators.base import Call, labels_along, rule, together


@rule("aten::cat", "aten::concat", "aten::concatenate")
def cat(call: Call) -> Value:
    tensors: list[Value] = [t for t in call.args["tensors"] if t.shape != (0,)]
    dim = int(call.args["dim"]) % len(call.shape)
    others = [t.map(lambda layer: layer.narrow(dim, 0, 1)) for t in tensors]
    base = (*call.shape[:dim], 1, *call.shape[dim + 1 :])
    joined = together(call.links, others, base, call.where)
    layers = [layer.expand(call.shape) for layer in joined.layers]
    if any(labels_along(t, dim) is not None for t in tensors):
        pieces = [labels_along(t, dim) for t in tensors]
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
    parts = [x.map(partial(torch.narrow, dim=dim, start=s, length=n)) for s, n in zip(starts, sizes, strict=True)]
    for start, n in zip(starts, sizes, strict=True):
        _pin(call, x, dim, start, n)
    labels = labels_along(x, dim)
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
    return [x.map(partial(torch.select, dim=dim, index=i)) for i in range(x.shape[dim])]


@rule("aten::select")
def select(call: Call) -> Value:
    x, dim = call.value("self"), call.axis()
    _fix_axis(call, x, dim)
    return x.map(lambda t: t.select(dim, int(call.args["index"])))


def _pin(call: Call, x: Value, dim: int, start: int, n: int) -> None:
    """A part of ``n`` channels that is a single one is fixed: nothing could tell it from no channel at all."""
    labels = labels_along(x, dim)
    if labels is not None and n == 1:
        call.fixed(labels[start : start + 1], "it picks single channels by number")


def _fix_axis(call: Call, x: Value, dim: int) -> None:
    for layer in x.layers:
        if varying(layer) == (dim,):
            call.fixed(layer, "it picks single channels by number")


@rule("aten::view", "aten::reshape", "aten::_unsafe_view", "aten::flatten", "aten::unflatten", "aten::view_as")
@rule("aten::reshape_as", "aten::squeeze", "aten::unsqueeze", "aten::movedim")
def reshape(call: Call) -> Value:
    """Labels move with their elements; an axis that is factored must keep equal counts per row.

    One row then speaks for all.
    """
    x = call.value("self")
    layers = []
    for layer in x.layers:
        before, moved = varying(layer), settle(layer.reshape(call.shape))
        after = varying(moved)
        if len(before) == 1 and len(after) > 1:
            longest = max(after, key=lambda a: (call.shape[a], -a))  # among equals the groups, as in group norm
            for axis in set(after) - {longest}:
                call.links.link(moved, moved.narrow(axis, 0, 1), f"{call.where} factors it")
                moved = moved.narrow(axis, 0, 1).expand(call.shape)
        layers.append(moved)
    taken = {axis for layer in layers if not _elastic(call, layer) for axis in varying(layer)}
    layers = [layer for layer in layers if not (_elastic(call, layer) and taken & set(varying(layer)))]
    return Value(call.shape, tuple(layers), x.static)


def _elastic(call: Call, layer: Tensor) -> bool:
    return call.links.elastic.issuperset(shrink(layer)[0].unique().tolist())


@rule("aten::slice", "aten::narrow")
def part(call: Call) -> Value:
    x, dim = call.value("self"), call.axis()
    start = int(call.args["start"] or 0)
    _pin(call, x, dim, start % x.shape[dim], call.shape[dim])
    return x.map(lambda layer: call.run(layer))


@rule("aten::permute", "aten::transpose", "aten::t", "aten::swapaxes", "aten::numpy_T")
@rule("aten::roll", "aten::flip", "aten::repeat", "aten::repeat_interleave", "aten::tile")
def movement(call: Call) -> Value:
    """Run the operator on the labels themselves."""
    x = call.value("self")
    return x.map(lambda layer: call.run(layer))


@rule("aten::channel_shuffle", "aten::native_channel_shuffle")
def channel_shuffle(call: Call) -> Value:
    """Every group must keep as many channels as the others, in the same places."""
    x = call.value("self")
    labels = labels_along(x, 1)
    if labels is not None:
        rows = labels.reshape(int(call.args["groups"]), -1)
        call.links.link(rows, rows[:1], f"{call.where} shuffles it in groups")
    return x.map(lambda layer: call.run(layer))


@rule("aten::unfold")
def windows(call: Call) -> Value:
    """Windows along one axis; the labels of other axes move with their elements."""
    x, dim = call.value("self"), call.axis("dimension")
    _fix_axis(call, x, dim)
    return x.map(lambda layer: call.run(layer))


@rule("aten::expand", "aten::expand_as", "aten::broadcast_to")
def expand(call: Call) -> Value:
    """What is blown up from one element (a blur kernel, a group's deviation) takes any size: fresh labels."""
    x = call.value("self")
    padded = (1,) * (len(call.shape) - len(x.shape)) + x.shape
    layers = [layer.reshape(padded).expand(call.shape) for layer in x.layers]
    for axis, (old, new) in enumerate(zip(padded, call.shape, strict=True)):
        if old < new:
            labels = call.links.fresh(new)
            call.links.elastic.update(labels.tolist())
            layers.append(along(labels, axis, call.shape))
    return Value(call.shape, tuple(layers), x.static)


@rule("aten::constant_pad_nd", "aten::pad", "aten::reflection_pad2d", "aten::replication_pad2d")
def pad(call: Call) -> Value:
    """Padding of the channel axis adds as many zero channels as the next layer asks for: fresh labels."""
    x, amounts = call.value("self"), list(call.args["pad" if "pad" in call.args else "padding"])
    layers: list[Tensor] = []
    for layer in x.layers:
        axes = varying(layer)
        axis = axes[0] if len(axes) == 1 else None
        place = None if axis is None else len(x.shape) - 1 - axis
        if axis is None or place is None or 2 * place >= len(amounts) or not any(amounts[2 * place : 2 * place + 2]):
            layers.extend(call.carry(Value(x.shape, (layer,))).layers)
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
    labels = labels_along(x, 1)
    if labels is None:
        return Value(call.shape)
    rows = labels.reshape(-1, square)
    call.links.link(rows, rows[:, :1], f"{call.where} folds it into space")
    return Value(call.shape, (along(rows[:, 0], 1, call.shape),))


@rule("aten::pixel_unshuffle", "aten::im2col")
def unfold_channels(call: Call) -> Value:
    x = call.value("self")
    labels = labels_along(x, 1)
    if labels is None:
        return Value(call.shape)
    return Value(call.shape, (along(labels.repeat_interleave(call.shape[1] // x.shape[1]), 1, call.shape),))
