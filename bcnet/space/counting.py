"""Counts a captured network: FLOPs, parameters and peak activation memory as functions of its widths."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from bcnet.space.axis import Size
from bcnet.space.capture import Capture
from bcnet.space.cost import PeakCost, QuadraticCost
from bcnet.space.coupling import Coupling
from bcnet.space.operators.table import Site, find, name_of
from bcnet.space.torch_export import tensors_in
from bcnet.space.walk import concrete, layer_of, shape_of

Monomial = tuple[int, ...]
Polynomial = dict[Monomial, int]


def product(sizes: Iterable[Size]) -> Polynomial:
    """The product of sizes as a polynomial in the units."""
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
    return result


def beyond_quadratic(capture: Capture, state: Mapping[str, Tensor], coupling: Coupling) -> tuple[int, str] | None:
    """A variable because of which some cost is not a quadratic form, and where: of several the one with the fewest
    layers, and of those the narrowest."""
    costs = [(sizes, layer_of(n) or n.name) for n in capture.graph.nodes for sizes in products(n, coupling)]
    costs += [([axis.size for axis in coupling.axes[name]], name) for name in state if name in coupling.axes]
    variables = coupling.variables
    for sizes, where in costs:
        for key in product(sizes):
            if len(key) > 2:
                return min(key, key=lambda v: (len(variables[v].layers), variables[v].count)), where
    return None


def flops(capture: Capture, coupling: Coupling) -> QuadraticCost:
    """Multiply-accumulates of convolutions, linear layers and matrix products, for one input."""
    total: dict[Monomial, float] = {}
    fed = {node for node in capture.graph.nodes if node.name in capture.inputs}
    for node in capture.graph.nodes:
        if fed.intersection(node.all_input_nodes):
            fed.add(node)
        batch = capture.batch ** _batch_power(node) if node in fed else 1  # weights alone: computed once
        for sizes in products(node, coupling):
            for key, k in product(sizes).items():
                total[key] = total.get(key, 0) + k / batch
    return _quadratic(total, coupling)


def _batch_power(node: fx.Node) -> int:
    """How often the batch size is a factor of a node's products: twice if images meet each other in a matrix product,
    where every axis occurs in two of the three matrices."""
    if node.op != "call_function" or name_of(node.target) not in ("aten::matmul", "aten::mm", "aten::bmm"):
        return 1
    shapes = [v.shape for n in (node, *node.all_input_nodes) for v in tensors_in(n.meta.get("val"))]
    return max(1, sum(isinstance(size, torch.SymInt) for shape in shapes for size in shape) // 2)


def products(node: fx.Node, coupling: Coupling) -> list[list[Size]]:
    """The sizes of every product that a node accumulates.

    An operator whose table entry does not say is run without data under torch's own counter: the result for the full
    network counts at all widths, and a warning names the operator if its widths vary.
    """
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
        return []
    entry = find(node.target)
    if entry is not None and entry.macs is not None:
        return [list(sizes) for sizes in entry.macs(Site(node, coupling))]
    counted = _counted_by_torch(node)
    if not counted:
        return []
    tensors = [n for n in (node, *node.all_input_nodes) if n.name in coupling.sizes]
    if any(size.terms for n in tensors for row in coupling.sizes[n.name] for size in row):
        name, where = name_of(node.target), layer_of(node) or node.name
        warnings.warn(
            f"bcnet does not know what the operator {name} (in {where}) multiplies and counts its FLOPs as in the full "
            f'network; say it with bcnet.space.register("{name}", couple=..., macs=...)',
            stacklevel=2,
        )
    return [[Size(counted)]]


def _counted_by_torch(node: fx.Node) -> int:
    """Multiply-accumulates of one call by torch's counter, on tensors without data; 0 if it cannot be run on them."""
    if torch.Tag.pointwise in node.target.tags:  # type: ignore[union-attr]
        return 0

    def without_data(value: Any) -> Any:
        val = value.meta.get("val") if isinstance(value, fx.Node) else value
        if isinstance(val, Tensor):
            return torch.empty(shape_of(val), dtype=val.dtype, device="meta")
        return concrete(val)

    args, kwargs = (fx.node.map_aggregate(a, without_data) for a in (node.args, node.kwargs))
    try:
        with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH), torch.no_grad():
            node.target(*args, **{**kwargs, **({"device": "meta"} if "device" in kwargs else {})})  # type: ignore
    except (RuntimeError, NotImplementedError, TypeError, ValueError):
        return 0
    return int(counter.get_total_flops()) // 2


def parameters(state: Mapping[str, Tensor], coupling: Coupling) -> QuadraticCost:
    """Parameters, each counted once even if it is shared; buffers do not count."""
    total: dict[Monomial, float] = {}
    unique = {id(p): (name, p) for name, p in state.items() if isinstance(p, nn.Parameter)}
    for name, p in unique.values():
        axes = coupling.axes.get(name)
        sizes = [axis.size for axis in axes] if axes else [Size(n) for n in p.shape]
        for key, k in product(sizes).items():
            total[key] = total.get(key, 0) + k
    return _quadratic(total, coupling)


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
    for sizes, value in zip(coupling.sizes[node.name], tensors_in(node.meta["val"]), strict=False):
        constant, slope = _linear(sizes, coupling)
        weight = value.element_size() / capture.batch
        row[0] += constant * weight
        for v, k in slope.items():
            row[1 + v] += k * weight / coupling.variables[v].unit
    return row


def _linear(sizes: Sequence[Size], coupling: Coupling) -> tuple[int, dict[int, int]]:
    full = coupling.counts
    varying = [s for s in sizes if s.terms]
    fixed = prod(s.constant for s in sizes if not s.terms)
    if not varying:
        return fixed, {}
    lead = max(varying, key=lambda s: s.at(full))
    others = prod(s.at(full) for s in varying if s is not lead)
    return lead.constant * fixed * others, {v: k * fixed * others for v, k in lead.terms}
