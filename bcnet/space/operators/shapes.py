"""Operators that give a tensor another shape, or make one of a given shape."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, fx

from bcnet.space.axis import Size
from bcnet.space.labels import Value, along, settle, shrink, varying
from bcnet.space.operators.base import Call, leading, spread, together
from bcnet.space.operators.table import Hole, Site, rule

INFERRED = Size(-1)  # the one size of a view that torch works out itself


def _wanted(args: Mapping[str, Any]) -> tuple[str, Any]:
    """The argument that says a shape."""
    return next((name, args[name]) for name in ("size", "shape", "repeats", "dims") if name in args)


def _shape_sizes(site: Site) -> Iterator[Hole]:
    name, wanted = _wanted(site.args)
    rows = site.out
    merged = [i for i, n in enumerate(wanted) if isinstance(n, fx.Node) and rows[i].terms]
    for i, n in enumerate(wanted):
        if i in merged:  # channels merged with the batch
            yield name, i, -1, INFERRED
        elif isinstance(n, int) and (n > 0 or merged):
            yield name, i, n, rows[i]


def _unflatten_sizes(site: Site) -> Iterator[Hole]:
    dim = site.args["dim"] % len(site.of("self"))
    for i, n in enumerate(site.args["sizes"]):
        if isinstance(n, int) and n > 0:
            yield "sizes", i, n, site.out[dim + i]


@rule("aten::movedim")
@rule("aten::flatten", "aten::squeeze", shares="elements", fuses="flat")
@rule("aten::unsqueeze", shares="elements")
@rule("aten::unflatten", sizes=_unflatten_sizes)
@rule("aten::view", "aten::reshape", sizes=_shape_sizes, shares="elements", fuses="flat")
@rule("aten::_unsafe_view", sizes=_shape_sizes, shares="elements")
def reshape(call: Call) -> Value:
    """Labels move with their elements; an axis that is factored must keep equal counts per row.

    One row then stands for all.
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
    return Value(call.shape, tuple(_one_per_axis(call, layers)))


@rule("aten::view_as", "aten::reshape_as")
def reshape_as(call: Call) -> Value:
    """The channels of both tensors are the same ones."""
    return together(call.links, [reshape(call), call.value("other")], call.shape, call.where)


def _one_per_axis(call: Call, layers: list[Tensor]) -> Iterator[Tensor]:
    """Of two kinds of channels flattened into one axis, only the outer ones may vary."""
    taken: set[int] = set()
    for layer in layers:
        if taken & set(varying(layer)):
            call.fixed(layer, "it is flattened together with other channels")
        else:
            taken.update(varying(layer))
            yield layer


def _elastic(call: Call, layer: Tensor) -> bool:
    return call.links.elastic.issuperset(shrink(layer)[0].unique().tolist())


def _expanded(call: Call, x: Value, layers: list[Tensor]) -> Value:
    """What is expanded from one element (a blur kernel, a group's deviation) takes any size: fresh labels."""
    for axis, (old, new) in enumerate(zip(leading(x.shape, len(call.shape)), call.shape, strict=True)):
        if old == 1 < new:
            labels = call.links.fresh(new)
            call.links.elastic.update(labels.tolist())
            layers.append(along(labels, axis, call.shape))
    return Value(call.shape, tuple(layers))


@rule("aten::expand_as", "aten::broadcast_tensors")
def expand_as(call: Call) -> list[Value]:
    """All tensors in one shape, with the channels of all."""
    joined = call.together()
    return [joined] * len(call.shapes)


@rule("aten::expand", "aten::broadcast_to", sizes=_shape_sizes)
def expand(call: Call) -> Value:
    x = call.value("self")
    return _expanded(call, x, spread(x, call.shape))


def _repeat_sizes(site: Site) -> Iterator[Hole]:
    """Only an axis of one element can be repeated as often as there are channels."""
    name, wanted = _wanted(site.args)
    inputs = site.of("self")
    padded = [Size(1)] * (len(site.out) - len(inputs)) + list(inputs)
    for i, n in enumerate(wanted):
        if isinstance(n, int) and n > 1 and padded[i] == Size(1):
            yield name, i, n, site.out[i]


@rule("aten::repeat", "aten::tile", sizes=_repeat_sizes)
def repeat(call: Call) -> Value:
    x = call.value("self")
    return _expanded(call, x, [call.run(layer) for layer in x.layers])


_FACTORIES = ["zeros", "ones", "full", "empty", "rand", "randn", "new_zeros", "new_ones", "new_full", "new_empty"]


@rule(*(f"aten::{name}" for name in _FACTORIES), sizes=_shape_sizes)
def factory(call: Call) -> Value:
    """A tensor made in the forward pass takes any size; ``new_zeros`` takes nothing but the type of its tensor."""
    call.args.get("self")
    return _expanded(call, Value((1,) * len(call.shape)), [])
