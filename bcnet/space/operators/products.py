"""Operators that multiply channels: convolutions, linear layers, matrix products, attention, recurrent layers."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from bcnet.space.axis import Size
from bcnet.space.labels import Value, along, varying, vector
from bcnet.space.operators.base import Call, labels_along, together
from bcnet.space.operators.table import Hole, Site, rule


def drops_whole_groups(groups: int, per_group_in: int, per_group_out: int) -> bool:
    """A grouped layer loses whole groups (depthwise, ResNeXt) or channels of each group, whichever is finer."""
    return groups >= min(per_group_in, per_group_out)


def group_size(site: Site, name: str, source: Size) -> Iterator[Hole]:
    """The number of groups of a layer that reads ``source`` channels, where it loses whole groups."""
    groups = site.args[name]
    if not isinstance(groups, int) or groups == 1:
        return
    axis = len(site.out) - _spatial(site) - 1
    per_in, per_out = site.full(source) // groups, site.full(site.out[axis]) // groups
    if drops_whole_groups(groups, per_in, per_out):
        yield name, None, groups, source // per_in


def _spatial(site: Site) -> int:
    """Axes behind that of the channels."""
    return len(site.of("weight")) - 2 if "groups" in site.args else len(site.out) - 2


def _conv_sizes(site: Site) -> Iterator[Hole]:
    inputs = site.of("input")
    yield from group_size(site, "groups", inputs[len(inputs) - len(site.of("weight")) + 1])


@rule(
    *(f"aten::conv{d}d" for d in (1, 2, 3)),
    sizes=_conv_sizes,
    macs=lambda site: [[*site.out, *site.of("weight")[1:]]],
)
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
    outputs, n_out = labels_along(weight, out_axis), call.shape[channels]
    result = torch.zeros(n_out, dtype=torch.int64)
    if groups == 1:
        call.agree(x, channels, weight, in_axis)
        result = result if outputs is None else outputs
    else:
        result = _grouped(call, labels_along(x, channels), weight, out_axis)
    if bias is not None:
        call.agree(bias, 0, Value((n_out,), (result,)), 0)
    layers = [along(result, channels, call.shape)]
    for layer in x.layers:
        axes = varying(layer)
        if axes != (channels,) and all(x.shape[a] == call.shape[a] for a in axes) and len(axes) == 1:
            # A convolution along the channels themselves (efficient channel attention) takes as many as come.
            layers.append(along(vector(layer, axes[0]), axes[0], call.shape))
        elif axes != (channels,):
            call.fixed(layer, "a convolution runs over this axis")
    return Value(call.shape, tuple(layers))


def _grouped(call: Call, given: Tensor | None, weight: Value, out_axis: int) -> Tensor:
    """Link a grouped convolution's channels and return its output labels (n_out,).

    Either whole groups go (input and output channels of one group together), or every group loses the
    same channels, as it must where every image of a batch has a group and a kernel of its own. A transposed
    weight (in, out/groups) has the grouped axis on the other side.
    """
    groups = int(call.args["groups"])
    per_group = (weight.shape[1], weight.shape[0] // groups)
    n_in, n_out = (groups * n for n in (per_group if out_axis == 0 else reversed(per_group)))
    source = (torch.zeros(n_in, dtype=torch.int64) if given is None else given).reshape(groups, -1)
    grouped, plain = labels_along(weight, 0), labels_along(weight, 1)
    rows = (torch.zeros(weight.shape[0], dtype=torch.int64) if grouped is None else grouped).reshape(groups, -1)
    why = f"{call.where} joins it with a fixed axis"
    links = call.links
    if not call.batch and drops_whole_groups(groups, n_in // groups, n_out // groups):
        links.link(source, source[:, :1], why)
        links.link(rows, source[:, :1], why)
        if plain is not None:
            call.fixed(plain, "the size of a group does not vary")
        return rows[:, :1].expand(groups, n_out // groups).reshape(-1) if out_axis else rows.reshape(-1)
    links.link(source, source[:1], why)
    links.link(rows, rows[:1], why)
    inner = torch.zeros(weight.shape[1], dtype=torch.int64) if plain is None else plain
    if out_axis == 0:
        links.link(inner, source[0], why)
        return rows.reshape(-1)
    links.link(rows[0], source[0], why)
    return inner.repeat(groups)


@rule("aten::linear", macs=lambda site: [[*site.out, site.of("weight")[-1]]])
def linear(call: Call) -> Value:
    x, weight = call.value("input"), call.value("weight")
    last = len(x.shape) - 1
    call.agree(x, last, weight, len(weight.shape) - 1)
    if len(weight.shape) == 1:
        return x.map(lambda t: t[..., 0])
    layers = [layer.narrow(last, 0, 1).expand(call.shape) for layer in x.layers if last not in varying(layer)]
    outputs = labels_along(weight, 0)
    if outputs is not None:
        call.agree(call.args.get("bias"), 0, weight, 0)
        layers.append(along(outputs, last, call.shape))
    elif call.args.get("bias") is not None:
        call.fixed(call.value("bias"), "its layer's output does not vary")
    return Value(call.shape, tuple(layers))


_FACTORS = [
    ("batch1", "batch2"),
    ("mat1", "mat2"),
    ("mat", "vec"),
    *(("self", b) for b in ("other", "mat2", "vec", "tensor")),
]


def _factors(args: dict[str, object]) -> tuple[str, str]:
    return next(pair for pair in _FACTORS if set(pair) <= set(args))


_PRODUCTS = "matmul linalg_matmul mm bmm mv dot vdot addmm baddbmm addmv"


def _matmul_macs(site: Site) -> list[list[Size]]:
    """Products of two matrices: with a vector torch's counter, whose convention this is, counts none."""
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
    """Products pair by pair, as torch multiplies: along its path, else from the front, the result put last."""
    sizes = [site.of(node) for node in site.args["tensors"]]
    terms, result = _letters(site.args["equation"], [len(s) for s in sizes])
    extent: dict[str, Size] = {}
    for letters, row in zip(terms, sizes, strict=True):
        for letter, size in zip(letters, row, strict=True):
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
    layers = []
    for axis, letter in enumerate(result):
        labels = labels_along(*first[letter])
        if labels is not None:
            layers.append(along(labels, axis, call.shape))
    return Value(call.shape, tuple(layers))


def _recurrent_macs(site: Site) -> list[list[Size]]:
    """Every matrix of a recurrent layer meets every step of every sequence."""
    args = site.args
    steps = site.of("input" if "input" in args else "data")[:-1]
    weights = args["params"] if "params" in args else [args["w_ih"], args["w_hh"]]
    return [[*steps, *site.of(w)] for w in weights if len(site.of(w)) == 2]


_RECURRENT = [f"aten::{kind}{cell}" for kind in ("lstm", "gru", "rnn_tanh", "rnn_relu") for cell in ("", "_cell")]


@rule(*_RECURRENT, macs=_recurrent_macs)
def recurrent(call: Call) -> list[Value]:
    """Its input's width may vary; its hidden widths, which the gates share, stay."""
    x = call.value("input" if "input" in call.args else "data")
    weights = call.args["params"] if "params" in call.args else [call.args["w_ih"], call.args["w_hh"]]
    matrices = [w for w in weights if len(w.shape) == 2]
    inputs = [matrices[0], *(matrices[2:3] if call.args.get("bidirectional") else ())]
    for weight in inputs:
        call.agree(x, len(x.shape) - 1, weight, 1)
    free = {id(layer) for w in inputs for layer in w.layers if varying(layer) == (1,)}
    for value in call.values():
        for layer in value.layers:
            if id(layer) not in free and not (value is x and varying(layer) == (len(x.shape) - 1,)):
                call.fixed(layer, "the hidden size of a recurrent layer does not vary")
    return [Value(shape) for shape in call.shapes]
