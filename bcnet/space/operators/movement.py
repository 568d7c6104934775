"""Operators that move elements: joining, splitting, picking, padding, reducing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from bcnet.space.labels import Value, along, varying, vector
from bcnet.space.operators.base import Call, labels_along, row, together
from bcnet.space.operators.table import Hole, Site, name_of, rule


@rule("aten::cat", "aten::concat", "aten::concatenate", shares="joins")
def cat(call: Call) -> Value:
    dim = int(call.args["dim"]) % len(call.shape)
    tensors: list[Value] = [t for t in call.args["tensors"] if t.shape != (0,) and t.shape[dim]]
    others = [t.map(lambda layer: layer.narrow(dim, 0, 1)) for t in tensors]
    base = (*call.shape[:dim], 1, *call.shape[dim + 1 :])
    joined = together(call.links, others, base, call.where)
    layers = [layer.expand(call.shape) for layer in joined.layers]
    layers.append(along(torch.cat([row(t, dim) for t in tensors]), dim, call.shape))
    return Value(call.shape, tuple(layers))


@rule("aten::stack")
def stack(call: Call) -> Value:
    dim = int(call.args["dim"]) % len(call.shape)
    values = [t.map(lambda layer: layer.unsqueeze(dim)) for t in call.args["tensors"]]
    base = (*call.shape[:dim], 1, *call.shape[dim + 1 :])
    joined = together(call.links, values, base, call.where)
    return Value(call.shape, tuple(layer.expand(call.shape) for layer in joined.layers))


def _split_sizes(site: Site) -> Iterator[Hole]:
    args = site.args
    if "split_size" in args or "split_sizes" in args:
        dim = args["dim"] % len(site.out)
        if "split_size" in args:
            yield "split_size", None, args["split_size"], site.out[dim]
        else:
            for i, n in enumerate(args["split_sizes"]):
                yield "split_sizes", i, n, site.outs[i][dim]


_SPLITS = [f"aten::{name}" for name in ("split", "chunk", "split_with_sizes", "tensor_split", "unsafe_chunk")]


@rule(*_SPLITS, sizes=_split_sizes)
def split(call: Call) -> list[Value]:
    x, dim = call.value("self"), call.axis()
    sizes = [shape[dim] for shape in call.shapes]
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    parts = [x.map(partial(torch.narrow, dim=dim, start=s, length=n)) for s, n in zip(starts, sizes, strict=True)]
    for start, n in zip(starts, sizes, strict=True):
        _pin(call, x, dim, start, n)
    asked = call.args.get("split_sizes", call.args.get("split_size"))
    if len(set(sizes)) == 1 and not isinstance(asked, (list, tuple)):
        # An equal split stays equal, since that is what the network's own code says.
        call.alike(x, dim, len(sizes), "splits it into equal parts")
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
    """A part of ``n`` channels is fixed if it is a single one, which cannot get any narrower."""
    if n == 1:
        call.fixed(row(x, dim)[start : start + 1], "it picks single channels by number")


def _fix_axis(call: Call, x: Value, dim: int) -> None:
    for layer in x.layers:
        if varying(layer) == (dim,):
            call.fixed(layer, "it picks single channels by number")


def _slice_sizes(site: Site) -> Iterator[Hole]:
    args = site.args
    source = args["self"]
    axis = args["dim"] % len(site.of(source))
    length = site.full(site.of(source)[axis])
    if name_of(site.node.target) == "aten::narrow":
        start, n = args["start"], args["length"]
        if not (isinstance(start, int) and isinstance(n, int)):  # a part of the batch
            return
        yield "start", None, start, site.before(source, axis, start)
        yield "length", None, n, site.before(source, axis, start + n) - site.before(source, axis, start)
        return
    for name in ("start", "end"):
        position = args[name]
        if isinstance(position, int) and position != 0 and abs(position) < length:
            size = site.before(source, axis, position % length)
            yield name, None, position, size if position > 0 else size - site.before(source, axis, length)


@rule("aten::slice", "aten::narrow", sizes=_slice_sizes)
def part(call: Call) -> Value:
    x, dim = call.value("self"), call.axis()
    start = int(call.args["start"] or 0)
    labels = labels_along(x, dim)
    if labels is not None:
        call.links.cut(labels, start, start + call.args["length"] if "length" in call.args else call.args["end"])
    _pin(call, x, dim, start % x.shape[dim] if x.shape[dim] else 0, call.shape[dim])
    return x.map(call.run)


@rule("aten::permute", "aten::transpose", "aten::t", "aten::swapaxes", "aten::numpy_T")
@rule("aten::flip", "aten::repeat_interleave")
def movement(call: Call) -> Value:
    """Run the operator on the labels themselves."""
    return call.value("self").map(call.run)


@rule("aten::roll")
def roll(call: Call) -> Value:
    """With fewer channels, others would wrap around."""
    x = call.value("self")
    rolled = {d % len(x.shape) for d in call.args["dims"] or range(len(x.shape))}
    return call.fixed_along(x, rolled, "it moves channels round").map(call.run)


@rule("aten::channel_shuffle", "aten::native_channel_shuffle")
def channel_shuffle(call: Call) -> Value:
    """All groups must keep the same channels."""
    x = call.value("self")
    call.alike(x, 1, int(call.args["groups"]), "shuffles it in groups")
    return x.map(call.run)


@rule("aten::unfold")
def windows(call: Call) -> Value:
    """Windows along one axis; the labels of other axes move with their elements."""
    x, dim = call.value("self"), call.axis("dimension")
    _fix_axis(call, x, dim)
    return x.map(call.run)


def _pad_sizes(site: Site) -> Iterator[Hole]:
    pad: list[int] = site.args.get("pad") or []
    for i in range(0, len(pad), 2):
        axis = len(site.out) - 1 - i // 2
        if site.out[axis].terms:
            n = site.full(site.out[axis])
            if pad[i]:
                yield "pad", i, pad[i], site.before(site.node, axis, pad[i])
            if pad[i + 1]:
                rest = site.before(site.node, axis, n - pad[i + 1])
                yield "pad", i + 1, pad[i + 1], site.before(site.node, axis, n) - rest


_PADS = [f"aten::{kind}_pad{d}d" for kind in ("reflection", "replication") for d in (1, 2, 3)]


@rule("aten::constant_pad_nd", "aten::pad", *_PADS, sizes=_pad_sizes)
def pad(call: Call) -> Value:
    """Padding of the channel axis adds as many zero channels as the next layer needs: fresh labels."""
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
        call.links.cut(labels, before, -after)
        layers.append(along(labels, axis, call.shape))
    return Value(call.shape, tuple(layers))


@rule("aten::mean", shares="elements", fuses="pool")
@rule("aten::sum", "aten::amax", "aten::amin", shares="elements")
@rule("aten::max", "aten::min", "aten::var", "aten::std")
@rule("aten::norm", "aten::linalg_vector_norm", "aten::logsumexp", "aten::prod", "aten::var_mean", "aten::std_mean")
@rule("aten::argmax", "aten::argmin", "aten::any", "aten::all", "aten::median", "aten::count_nonzero", "aten::aminmax")
@rule("aten::linalg_norm", "aten::frobenius_norm", "aten::nansum", "aten::nanmean", "aten::nuclear_norm")
def reduction(call: Call) -> list[Value]:
    x = call.first
    if "other" in call.args:
        return [call.together()]
    dims = call.args.get("dim")
    axes = range(len(x.shape)) if dims is None else [dims] if isinstance(dims, int) else list(dims)
    chosen = sorted({a % len(x.shape) for a in axes}) if x.shape else []
    return [x.map(lambda layer: _first(layer, chosen).reshape(call.shape))] * len(call.shapes)


def _first(layer: Tensor, axes: Sequence[int]) -> Tensor:
    for axis in axes:
        layer = layer.narrow(axis, 0, 1)
    return layer


@rule("aten::pixel_shuffle")
def pixel_shuffle(call: Call) -> Value:
    return _folded(call, 1)


@rule("aten::col2im")
def fold_windows(call: Call) -> Value:
    """Windows added up to a map."""
    return _folded(call, len(call.value("self").shape) - 2)


def _folded(call: Call, source: int) -> Value:
    """Channels along the axis ``source`` laid out in space: those of one place, or of one window, go together."""
    axis = len(call.shape) - 3
    rows = row(call.value("self"), source).reshape(call.shape[axis], -1)
    call.links.link(rows, rows[:, :1], f"{call.where} folds it into space")
    return Value(call.shape, (along(rows[:, 0], axis, call.shape),))


@rule("aten::pixel_unshuffle", "aten::im2col")
def unfold_channels(call: Call) -> Value:
    x = call.value("self")
    return Value(call.shape, (along(row(x, 1).repeat_interleave(call.shape[1] // x.shape[1]), 1, call.shape),))


@rule("aten::embedding")
def embedding(call: Call) -> Value:
    weight = call.value("weight")
    _fix_axis(call, weight, 0)
    call.fixed(call.value("indices"), "it holds the numbers of channels")
    return Value(call.shape, (along(row(weight, 1), len(call.shape) - 1, call.shape),))


@rule("aten::index")
def index(call: Call) -> Value:
    """``x[:, table]``: channels are put in the order of a buffer; any other indexed axis keeps all its channels."""
    x, picks = call.value("self"), list(call.args["indices"])
    used = [axis for axis, pick in enumerate(picks) if pick is not None]
    if len(used) == 1 and (moved := _reordered(call, x, used[0], picks[used[0]])) is not None:
        return moved
    for axis in used:
        call.fixed(picks[axis], "it holds the numbers of channels")
    free = call.fixed_along(x, set(used), "it picks single channels by number")
    at = [None if p is None else torch.zeros(p.shape, dtype=torch.int64) for p in picks]
    layers = tuple(torch.ops.aten.index.Tensor(layer, at) for layer in free.layers)
    if any(tuple(layer.shape) != call.shape for layer in layers):  # a mask picks any number
        call.fixed(free, "a mask picks elements of it")
        return Value(call.shape)
    return Value(call.shape, layers)


@rule("aten::index_select")
def index_select(call: Call) -> Value:
    x, dim, pick = call.value("self"), call.axis(), call.value("index")
    if (moved := _reordered(call, x, dim, pick)) is not None:
        return moved
    call.fixed(pick, "it holds the numbers of channels")
    return call.carry(call.fixed_along(x, {dim}, "it picks single channels by number"))


def _reordered(call: Call, x: Value, dim: int, pick: Value) -> Value | None:
    """The channels of ``x`` that a buffer of indices picks, each entry of which goes with its channel; None if there is
    no such buffer, or no channels."""
    labels, entries = labels_along(x, dim), labels_along(pick, 0)
    if pick.numbers is None or labels is None or entries is None:
        return None
    if any(dim in varying(layer) and varying(layer) != (dim,) for layer in x.layers):
        return None
    name, numbers = pick.numbers
    earlier = call.links.picked.setdefault(name, labels)
    why = f"{call.where} picks it by number"
    if len(earlier) != len(labels):
        return None
    call.links.link(labels, earlier, why)
    call.links.link(entries, labels[numbers], why)
    return x.map(lambda layer: layer.index_select(dim, numbers))


_PICKING = "gather scatter scatter_add scatter_reduce index_add index_put index_copy masked_select nonzero take"


@rule(*(f"aten::{name}" for name in _PICKING.split()))
def picking(call: Call) -> list[Value]:
    for value in call.values():
        call.fixed(value, "it picks elements by number")
    return [Value(shape) for shape in call.shapes]
