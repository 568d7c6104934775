"""One walk through a network's graph: labels in at its parameters, along its operators, links out."""

from __future__ import annotations

import operator
import warnings
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx

from bcnet.space.capture import Capture
from bcnet.space.labels import Links, Value, along
from bcnet.space.operators import RULES, Call

Dim = tuple[str, int]


class Walk:
    """Propagates labels through the graph, node by node.

    ``links`` and ``labels`` (parameter dimension to labels) of an earlier walk are gone on with.
    """

    def __init__(
        self,
        capture: Capture,
        state: Mapping[str, Tensor],
        links: Links | None = None,
        labels: dict[Dim, Tensor] | None = None,
    ):
        self.capture, self.state = capture, state
        first: dict[int, str] = {}
        self.tied = {name: first.setdefault(id(tensor), name) for name, tensor in state.items()}
        self.links = Links() if links is None else links
        self.labels: dict[Dim, Tensor] = {} if labels is None else labels
        self.values: dict[fx.Node, Any] = {}

    def propagate(self) -> None:
        for node in self.capture.graph.nodes:
            if node.op == "placeholder":
                self.values[node] = self._placeholder(node)
            elif node.op == "call_function":
                self.values[node] = self._call(node)
            elif node.op == "output":
                for value in values_in(fx.node.map_aggregate(node.args, self._resolve)):
                    for layer in value.layers:
                        self.links.fix(layer, "it is the network's output")

    def parameter(self, node: fx.Node) -> str | None:
        """The parameter or buffer that a placeholder stands for, under the first of its names where it is tied."""
        name = self.capture.state_of.get(node.name)
        return None if name is None else self.tied[name]

    def _placeholder(self, node: fx.Node) -> Any:
        name = self.parameter(node)
        if name is None:
            val = node.meta.get("val")
            known = node.name in self.capture.constants
            return Value(_shape(val), (), known) if isinstance(val, Tensor) else val
        if not node.users:  # what nothing reads stays as it is
            return Value(tuple(self.state[name].shape), (), True)
        shape = tuple(self.state[name].shape)
        layers = []
        for axis, n in enumerate(shape):
            if n > 1:
                if (name, axis) not in self.labels:
                    self.labels[name, axis] = self.links.fresh(n)
                layers.append(along(self.labels[name, axis], axis, shape))
        return Value(shape, tuple(layers), True)

    def _call(self, node: fx.Node) -> Any:
        args: Any = fx.node.map_aggregate(node.args, self._resolve)
        kwargs: Any = fx.node.map_aggregate(node.kwargs, self._resolve)
        if node.target is operator.getitem:
            return args[0][args[1]]
        val = node.meta.get("val")
        shapes = [_shape(v) for v in _leaves(val)] if not isinstance(val, Tensor) else [_shape(val)]
        tensors = list(values_in((args, kwargs)))
        if not shapes:
            if isinstance(val, (int, float, bool, torch.SymInt, torch.SymFloat, torch.SymBool)):
                return _concrete(val)
            return None
        if not isinstance(node.target, torch._ops.OpOverload) or not any(t.layers for t in tensors):
            static = all(t.static for t in tensors)
            plain = [Value(shape, (), static) for shape in shapes]
            if not any(t.layers for t in tensors) and not _needs_rule(node):
                return plain if isinstance(val, (list, tuple)) else plain[0]
        return self._apply(node, args, kwargs, tuple(shapes), isinstance(val, (list, tuple)))

    def _apply(self, node: fx.Node, args: Any, kwargs: Any, shapes: tuple[tuple[int, ...], ...], many: bool) -> Any:
        target: Any = node.target
        where = layer_of(node) or node.name
        named = bind(target, args, kwargs)
        run = partial(_run_on, target, args, kwargs)
        call = Call(self.links, named, shapes, where, run)
        name = target._schema.name if hasattr(target, "_schema") else str(target)
        known = RULES.get(name) or RULES.get(name.removesuffix("_"))
        result: Value | list[Value]
        if isinstance(bind(target, node.args, node.kwargs).get("groups"), fx.Node):
            result = _keep(call, "the number of its groups depends on the batch")
        elif known is not None:
            result = known(call)
        elif _pointwise(target):
            result = call.together()
        else:
            warnings.warn(
                f"bcnet does not know the operator {name} (in {where}) and keeps the channels that meet it at their "
                f'full width; teach it with @bcnet.space.rule("{name}")',
                stacklevel=2,
            )
            result = _keep(call, f"operator {name} is unknown to bcnet")
        if many:
            return result if isinstance(result, list) else [result]
        return result[0] if isinstance(result, list) else result

    def _resolve(self, arg: Any) -> Any:
        return self.values[arg] if isinstance(arg, fx.Node) else arg


def _keep(call: Call, why: str) -> list[Value]:
    """Fix all channels that meet an operator whose rule cannot be applied."""
    for value in call.values():
        call.fixed(value, why)
    return [Value(shape) for shape in call.shapes]


def _needs_rule(node: fx.Node) -> bool:
    """Expanding a constant makes labels where there were none."""
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.name in (
        "aten::expand",
        "aten::expand_as",
    )


def _pointwise(target: Any) -> bool:
    """Whether torch tags the operator, or its out-of-place twin, as pointwise."""
    if torch.Tag.pointwise in getattr(target, "tags", ()):
        return True
    space, _, name = target._schema.name.partition("::")
    twin = getattr(getattr(torch.ops, space), name.removesuffix("_"), None)
    return twin is not None and any(torch.Tag.pointwise in getattr(twin, o).tags for o in twin.overloads())


def bind(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments by the names of the operator's schema, defaults filled in."""
    named: dict[str, Any] = {}
    for i, argument in enumerate(target._schema.arguments):
        if i < len(args):
            named[argument.name] = args[i]
        elif argument.name in kwargs:
            named[argument.name] = kwargs[argument.name]
        else:
            named[argument.name] = argument.default_value if argument.has_default_value() else None
    return named


def _run_on(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any], layer: Tensor) -> Tensor:
    result: Tensor = target(layer, *args[1:], **kwargs)
    return result


def _leaves(val: Any) -> list[Tensor]:
    items = val if isinstance(val, (list, tuple)) else [val]
    return [v for v in items if isinstance(v, Tensor)]


def values_in(tree: Any) -> Iterable[Value]:
    """All values in nested lists, tuples and dictionaries."""
    if isinstance(tree, Value):
        yield tree
    elif isinstance(tree, (list, tuple)):
        for item in tree:
            yield from values_in(item)
    elif isinstance(tree, dict):
        yield from values_in(list(tree.values()))


def _concrete(value: Any) -> Any:
    if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return value.node.hint
    return value


def _shape(val: Any) -> tuple[int, ...]:
    return tuple(int(_concrete(s)) for s in val.shape)


def layer_of(node: fx.Node) -> str:
    """The path of the module whose forward made this node."""
    stack = node.meta.get("nn_module_stack") or {}
    return list(stack.values())[-1][0].removeprefix("L['self'].").removeprefix("L['self']") if stack else ""
