"""Operators that multiply channels: convolutions, linear layers, matrix products, attention, recurrent layers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial

import torch
from torch import Tensor

from bcnet.space.axis import Size
from bcnet.space.labels import Value, along, varying, vector
from bcnet.space.operators.base import Call, row, together
from bcnet.space.operators.table import Hole, Site, register, rule


def drops_whole_groups(groups: int, per_group_in: int, per_group_out: int) -> bool:
    """Whether a grouped layer loses whole groups (depthwise, ResNeXt), not channels of each group: the finer choice."""
    return groups >= min(per_group_in, per_group_out)


def group_size(site: Site, name: str, inputs: Size, outputs: Size) -> Iterator[Hole]:
    """The number of groups of a layer from ``inputs`` to ``outputs`` channels, where it loses whole groups."""
    groups = site.args[name]
    if not isinstance(groups, int) or groups == 1:
        return
    per_in, per_out = site.full(inputs) // groups, site.full(outputs) // groups
    if drops_whole_groups(groups, per_in, per_out):
        yield name, None, groups, inputs // per_in


def _conv_sizes(site: Site) -> Iterator[Hole]:
    channels = len(site.out) - len(site.of("weight")) + 1  # 0 where there is no batch
    yield from group_size(site, "groups", site.of("input")[channels], site.out[channels])


def _conv_macs(site: Site) -> list[list[Size]]:
    return [[*site.out, *site.of("weight")[1:]]]


@rule("aten::conv1d", "aten::conv3d", sizes=_conv_sizes, macs=_conv_macs, shares="sums")
@rule("aten::conv2d", sizes=_conv_sizes, macs=_conv_macs, shares="sums", fuses="conv")
def convolution(call: Call) -> Value:
    return _convolution(call, out_axis=0, in_axis=1)


@rule(
    *(f"aten::conv_transpose{d}d" for d in (1, 2, 3)),
    sizes=_conv_sizes,
    macs=lambda site: [[*site.of("input"), *site.of("weight")[1:]]],
)
def transposed_convolution(call: Call) -> Value:
    return _convolution(call, out_axis=1, in_axis=0)


def _convolution(call: Call, out_axis: int, in_axis: int) -> Value:
    x, weight, bias, groups = call.value("input"), call.value("weight"), call.args["bias"], int(call.args["groups"])
    channels = len(x.shape) - len(weight.shape) + 1  # 0 where there is no batch
    for layer in weight.layers:
        if not set(varying(layer)) & {0, 1}:
            call.fixed(layer, "a kernel's size does not vary")
    if groups == 1:
        call.agree(x, channels, weight, in_axis)
        result = row(weight, out_axis)
    else:
        result = _grouped(call, row(x, channels), weight, out_axis)
    if bias is not None:
        call.agree(bias, 0, Value((len(result),), (result,)), 0)
    layers = [along(result, channels, call.shape)]
    for layer in x.layers:
        axes = varying(layer)
        if axes != (channels,) and all(x.shape[a] == call.shape[a] for a in axes) and len(axes) == 1:
            # A convolution along the channels themselves (efficient channel attention) takes any number of them.
            layers.append(along(vector(layer, axes[0]), axes[0], call.shape))
        elif axes != (channels,):
            call.fixed(layer, "a convolution runs over this axis")
    return Value(call.shape, tuple(layers))


def _grouped(call: Call, given: Tensor, weight: Value, out_axis: int) -> Tensor:
    """Link a grouped convolution's channels, those ``given`` (n_in,), and return its output labels (n_out,).

    Either whole groups go (input and output channels of one group together), or every group loses the
    same channels, as it must if every image of a batch has its own group and kernel. In a transposed weight
    (in, out/groups) the grouped axis is that of the inputs.
    """
    groups = int(call.args["groups"])
    per_group = (weight.shape[1], weight.shape[0] // groups)
    per_in, per_out = per_group if out_axis == 0 else reversed(per_group)
    source, rows, inner = given.reshape(groups, -1), row(weight, 0).reshape(groups, -1), row(weight, 1)
    why = f"{call.where} joins it with a fixed axis"
    links = call.links
    if not call.batch and drops_whole_groups(groups, per_in, per_out):
        links.link(source, source[:, :1], why)
        links.link(rows, source[:, :1], why)
        call.fixed(inner, "the size of a group does not vary")
        return rows[:, :1].expand(groups, per_out).reshape(-1) if out_axis else rows.reshape(-1)
    links.link(source, source[:1], why)
    links.link(rows, rows[:1], why)
    if out_axis == 0:
        links.link(inner, source[0], why)
        return rows.reshape(-1)
    links.link(rows[0], source[0], why)
    return inner.repeat(groups)


@rule("aten::linear", macs=lambda site: [[*site.out, site.of("weight")[-1]]], shares="sums", fuses="linear")
def linear(call: Call) -> Value:
    x, weight = call.value("input"), call.value("weight")
    last = len(x.shape) - 1
    call.agree(x, last, weight, len(weight.shape) - 1)
    if len(weight.shape) == 1:
        return x.map(lambda t: t[..., 0])
    call.agree(call.args.get("bias"), 0, weight, 0)
    layers = [layer.narrow(last, 0, 1).expand(call.shape) for layer in x.layers if last not in varying(layer)]
    return Value(call.shape, (*layers, along(row(weight, 0), last, call.shape)))


_FACTORS = [
    ("batch1", "batch2"),
    ("mat1", "mat2"),
    ("mat", "vec"),
    *(("self", b) for b in ("other", "mat2", "vec", "tensor")),
]


def _factors(args: Mapping[str, object]) -> tuple[str, str]:
    return next(pair for pair in _FACTORS if set(pair) <= set(args))


_PRODUCTS = "matmul linalg_matmul mm bmm mv dot vdot addmm baddbmm addmv"


def _matmul_macs(site: Site) -> list[list[Size]]:
    """Products of two matrices; torch's counter, whose convention this is, counts none with a vector."""
    rows, columns = (site.of(name) for name in _factors(site.args))
    return [[*site.out, rows[-1]]] if len(rows) > 1 and len(columns) > 1 else []


@rule(*(f"aten::{name}" for name in _PRODUCTS.split()), macs=_matmul_macs)
def matmul(call: Call) -> Value:
    """The last axis of the first factor is summed with the last but one (of a vector: the only) of the second."""
    first, second = _factors(call.args)
    a, b = call.value(first), call.value(second)
    left = a.map(lambda t: t[None]) if len(a.shape) == 1 else a
    right = b.map(lambda t: t[:, None]) if len(b.shape) == 1 else b
    batch = torch.broadcast_shapes(left.shape[:-2], right.shape[:-2])
    summed = [left.map(lambda t: t[..., 0, :]), right.map(lambda t: t[..., :, 0])]
    together(call.links, summed, (*batch, a.shape[-1]), call.where)
    rows, columns = left.map(lambda t: t[..., :, :1]), right.map(lambda t: t[..., :1, :])
    shape = (*batch, left.shape[-2], right.shape[-1])
    product = together(call.links, [rows, columns], shape, call.where).map(lambda t: t.reshape(call.shape))
    added = call.args.get("self") if first != "self" else None
    return product if added is None else together(call.links, [product, added], call.shape, call.where)


def _attention_macs(site: Site) -> list[list[Size]]:
    tokens = site.of("key")[-2]
    return [[*site.of("query"), tokens], [*site.out, tokens]]


@rule("aten::scaled_dot_product_attention", macs=_attention_macs)
def attention(call: Call) -> Value:
    query, key, value = (call.value(name) for name in ("query", "key", "value"))
    call.agree(query, len(query.shape) - 1, key, len(key.shape) - 1)
    mask = call.args.get("attn_mask")
    for tokens, axis in ((query, -2), (key, -1)):
        if mask is not None and mask.shape[axis] > 1:
            call.agree(mask, len(mask.shape) + axis, tokens, len(tokens.shape) - 2)
    heads = [v.map(lambda t: t[..., :1, :1]) for v in (query, key, value, mask) if v is not None]
    together(call.links, heads, (*call.shape[:-2], 1, 1), call.where)
    return call.carry(value)


def _letters(equation: str, ranks: list[int]) -> tuple[list[list[str]], list[str]]:
    """The axes of an einsum's operands and of its result, an ellipsis spelt out as ``.1 .0``."""
    left, arrow, right = equation.replace(" ", "").partition("->")
    terms = left.split(",")
    hidden = [n - len(t.replace("...", "")) if "..." in t else 0 for t, n in zip(terms, ranks, strict=True)]

    def spelt(term: str, n: int) -> list[str]:
        before, dots, after = term.partition("...")
        return [*before, *(f".{i}" for i in reversed(range(n if dots else 0))), *after]

    axes = [spelt(t, n) for t, n in zip(terms, hidden, strict=True)]
    if arrow:
        return axes, spelt(right, max(hidden, default=0))
    once = sorted(c for c in set(left) - set(",.") if left.count(c) == 1)
    return axes, [*(f".{i}" for i in reversed(range(max(hidden, default=0)))), *once]


def _einsum_macs(site: Site) -> Iterator[list[Size]]:
    """Products pair by pair, as torch multiplies: along its path, or else from the front, the result put last."""
    sizes = [site.of(node) for node in site.args["tensors"]]
    terms, result = _letters(site.args["equation"], [len(s) for s in sizes])
    extent: dict[str, Size] = {}
    for letters, extents in zip(terms, sizes, strict=True):
        for letter, size in zip(letters, extents, strict=True):
            if letter not in extent or extent[letter] == Size(1):
                extent[letter] = size
    left = [set(letters) for letters in terms]
    path = list(site.args.get("path") or ())
    while len(left) > 1:
        i, j = sorted((path.pop(0), path.pop(0))) if path else (0, 1)
        b, a = left.pop(j), left.pop(i)
        later = set(result).union(*left)
        if (a & b) - later:
            yield [extent[letter] for letter in sorted((a & b) | ((a | b) & later))]
        left.append((a | b) & later)


@rule("aten::einsum", macs=_einsum_macs)
def einsum(call: Call) -> Value:
    tensors: list[Value] = call.args["tensors"]
    terms, result = _letters(str(call.args["equation"]), [len(t.shape) for t in tensors])
    first: dict[str, tuple[Value, int]] = {}
    for letters, value in zip(terms, tensors, strict=True):
        for axis, letter in enumerate(letters):
            if letter not in first or first[letter][0].shape[first[letter][1]] == 1:
                first[letter] = (value, axis)
            elif value.shape[axis] > 1:
                call.agree(first[letter][0], first[letter][1], value, axis)
    layers = [along(row(*first[letter]), axis, call.shape) for axis, letter in enumerate(result)]
    return Value(call.shape, tuple(layers))


def _recurrent_macs(site: Site) -> list[list[Size]]:
    """Every matrix of a recurrent layer meets every step of every sequence."""
    args = site.args
    steps = site.of("input" if "input" in args else "data")[:-1]
    weights = args["params"] if "params" in args else [args["w_ih"], args["w_hh"]]
    return [[*steps, *site.of(w)] for w in weights if len(site.of(w)) == 2]


_GATES = {"lstm": 4, "gru": 3, "rnn_tanh": 1, "rnn_relu": 1}


def recurrent(call: Call, gates: int) -> list[Value]:
    """All gates, layers and directions of a recurrent layer share the hidden width, and so does its state."""
    x = call.value("input" if "input" in call.args else "data")
    cells, directions = _cells(call), 1 + bool(call.args.get("bidirectional"))
    hidden = row(cells[0][1], 1)
    for number, (from_input, from_state, *biases) in enumerate(cells):
        for rows in (from_input, from_state, *biases):
            call.links.link(row(rows, 0).reshape(gates, -1), hidden, f"{call.where} shares it between gates")
        call.links.link(row(from_state, 1), hidden, f"{call.where} shares it between layers")
        if number < directions:
            call.agree(x, len(x.shape) - 1, from_input, 1)
        else:
            call.links.link(row(from_input, 1), hidden.repeat(directions), f"{call.where} feeds it to the next")
    _keep_sequences(call, x, hidden)
    ends = [hidden.repeat(shape[-1] // len(hidden)) for shape in call.shapes]
    return [Value(s, (along(labels, len(s) - 1, s),)) for s, labels in zip(call.shapes, ends, strict=True)]


def _cells(call: Call) -> list[list[Value]]:
    """The weights of each layer and direction: from the input, from the state, and perhaps their biases."""
    if "params" not in call.args:
        names = ("w_ih", "w_hh", "b_ih", "b_hh")
        return [[call.value(name) for name in names if call.args.get(name) is not None]]
    weights, each = call.args["params"], 4 if call.args["has_biases"] else 2
    if any(len(w.shape) != (2 if i % each < 2 else 1) for i, w in enumerate(weights)):
        raise ValueError("a recurrent layer with projections")  # the caller then keeps its channels
    return [list(weights[i : i + each]) for i in range(0, len(weights), each)]


def _keep_sequences(call: Call, x: Value, hidden: Tensor) -> None:
    """The state has the hidden width; lengths of sequences, batches and numbers of layers do not vary."""
    states = call.args["hx"]
    for value in (x, *(states if isinstance(states, (list, tuple)) else [states])):
        last = len(value.shape) - 1
        if value is not x:
            call.links.link(row(value, last), hidden, f"{call.where} starts from a state of fixed size")
        for layer in value.layers:
            if varying(layer) != (last,):
                call.fixed(layer, "the length of a sequence does not vary")


for _cell, _gates in _GATES.items():
    register(f"aten::{_cell}", f"aten::{_cell}_cell", couple=partial(recurrent, gates=_gates), macs=_recurrent_macs)
