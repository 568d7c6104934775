"""Counts a captured network: FLOPs, parameters and peak activation memory as functions of its widths."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx, nn

from bcnet.errors import BcnetError
from bcnet.space.axis import Size
from bcnet.space.capture import Capture
from bcnet.space.cost import PeakCost, QuadraticCost
from bcnet.space.coupling import Coupling
from bcnet.space.walk import bind, layer_of

Monomial = tuple[int, ...]
Polynomial = dict[Monomial, int]


def product(sizes: Iterable[Size], where: str) -> Polynomial:
    """The product of sizes as a polynomial in the units, of degree two at most."""
    result: Polynomial = {(): 1}
    for size in sizes:
        terms: Polynomial = {(v,): k for v, k in size.terms}
        if size.constant:
            terms[()] = size.constant
        grown: Polynomial = {}
        for a, x in result.items():
            for b, y in terms.items():
                key = tuple(sorted(a + b))
                grown[key] = grown.get(key, 0) + x * y
        result = grown
    if any(len(key) > 2 for key in result):
        raise BcnetError(f"the cost of {where} is no quadratic form: fix one of its widths with ignore=[{where!r}]")
    return result


def flops(capture: Capture, coupling: Coupling) -> QuadraticCost:
    """Multiply-accumulates of convolutions, linear layers and matrix products, for one input."""
    total: Polynomial = {}
    for node in capture.graph.nodes:
        if node.op == "call_function" and isinstance(node.target, torch._ops.OpOverload):
            for sizes in _products(node, coupling):
                for key, k in product(sizes, layer_of(node) or node.name).items():
                    total[key] = total.get(key, 0) + k
    return _quadratic({key: k / capture.batch for key, k in total.items()}, coupling)


def parameters(state: Mapping[str, Tensor], coupling: Coupling) -> QuadraticCost:
    """Parameters, each counted once however often it is shared; buffers do not count."""
    total: dict[Monomial, float] = {}
    unique = {id(p): (name, p) for name, p in state.items() if isinstance(p, nn.Parameter)}
    for name, p in unique.values():
        axes = coupling.axes.get(name)
        sizes = [axis.size for axis in axes] if axes else [Size(n) for n in p.shape]
        for key, k in product(sizes, name).items():
            total[key] = total.get(key, 0) + k
    return _quadratic(total, coupling)


def _products(node: fx.Node, coupling: Coupling) -> list[list[Size]]:
    """The factors of every product of sizes that this operator multiplies and accumulates."""
    target: Any = node.target
    kind = target._schema.name
    args = bind(target, node.args, node.kwargs)
    out = list(coupling.sizes[node.name][0]) if coupling.sizes[node.name] else []
    if kind.startswith("aten::conv_transpose"):
        return [[*coupling.sizes[args["input"].name][0], *coupling.sizes[args["weight"].name][0][1:]]]
    if kind.startswith("aten::conv") and "weight" in args:
        return [[*out, *coupling.sizes[args["weight"].name][0][1:]]]
    if kind == "aten::linear":
        return [[*out, coupling.sizes[args["weight"].name][0][1]]]
    if kind in ("aten::matmul", "aten::mm", "aten::bmm"):
        return [[*out, coupling.sizes[args["self"].name][0][-1]]]
    if kind == "aten::scaled_dot_product_attention":
        query, key = coupling.sizes[args["query"].name][0], coupling.sizes[args["key"].name][0]
        return [[*query, key[-2]], [*out, key[-2]]]
    return []


def _quadratic(total: Mapping[Monomial, float], coupling: Coupling) -> QuadraticCost:
    """A polynomial in units as a quadratic form in channels."""
    n = len(coupling.variables)
    per = [v.unit for v in coupling.variables]
    q0, q, matrix = 0.0, np.zeros(n), np.zeros((n, n))
    for key, k in total.items():
        if not key:
            q0 += k
        elif len(key) == 1:
            q[key[0]] += k / per[key[0]]
        else:
            matrix[key[0], key[1]] += k / (per[key[0]] * per[key[1]])
    return QuadraticCost(q0, q, matrix)


def peak_memory(capture: Capture, coupling: Coupling) -> PeakCost:
    """Bytes of the activations alive at the worst moment of a forward pass on one input.

    An operator's inputs and outputs are alive together; views and in-place results take no memory of
    their own; a tensor is freed after its last use. Where two variables span a tensor, the one with the
    smaller share is counted at full width.
    """
    storage = _storages(capture)
    order = {node: i for i, node in enumerate(capture.graph.nodes)}
    last: dict[fx.Node, int] = {}
    for node, owner in storage.items():
        last[owner] = max([last.get(owner, 0), *(order[user] for user in node.users)])
    alive: dict[fx.Node, np.ndarray] = {}
    rows: dict[bytes, np.ndarray] = {}
    for node in capture.graph.nodes:
        if storage.get(node) is node:
            alive[node] = _bytes(node, capture, coupling)
            row = np.sum(list(alive.values()), axis=0)
            rows[row.tobytes()] = row
        alive = {n: b for n, b in alive.items() if last[n] > order[node]}
    table = np.stack(list(rows.values()))
    return PeakCost(table[:, 0], table[:, 1:])


def _storages(capture: Capture) -> dict[fx.Node, fx.Node]:
    """The node that owns the memory of each activation."""
    found: dict[fx.Node, fx.Node] = {}
    for node in capture.graph.nodes:
        if node.op == "placeholder":
            if node.name in capture.inputs:
                found[node] = node
            continue
        if node.op != "call_function" or not any(n in found for n in node.all_input_nodes):
            continue
        target: Any = node.target
        returns = target._schema.returns if isinstance(target, torch._ops.OpOverload) else ()
        aliased = not returns or any(r.alias_info is not None for r in returns)
        source = next(n for n in node.all_input_nodes if n in found)
        found[node] = found[source] if aliased else node
    return found


def _bytes(node: fx.Node, capture: Capture, coupling: Coupling) -> np.ndarray:
    """``[constant, coefficient per variable]`` in channels, shape (1 + L,)."""
    row = np.zeros(1 + len(coupling.variables))
    values = node.meta["val"] if isinstance(node.meta["val"], (list, tuple)) else [node.meta["val"]]
    tensors = [v for v in values if isinstance(v, Tensor)]
    for sizes, value in zip(coupling.sizes[node.name], tensors, strict=False):
        constant, slope = _linear(sizes, coupling)
        weight = value.element_size() / capture.batch
        row[0] += constant * weight
        for v, k in slope.items():
            row[1 + v] += k * weight / coupling.variables[v].unit
    return row


def _linear(sizes: Sequence[Size], coupling: Coupling) -> tuple[int, dict[int, int]]:
    full = [v.count for v in coupling.variables]
    varying = [s for s in sizes if s.terms]
    fixed = prod(s.constant for s in sizes if not s.terms)
    if not varying:
        return fixed, {}
    lead = max(varying, key=lambda s: s.at(full))
    others = prod(s.at(full) for s in varying if s is not lead)
    return lead.constant * fixed * others, {v: k * fixed * others for v, k in lead.terms}
