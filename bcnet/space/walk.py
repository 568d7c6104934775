"""One walk through a network's graph: labels enter at its parameters, follow its operators, and leave links."""

from __future__ import annotations

import operator
import warnings
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx

from bcnet.space.capture import Capture
from bcnet.space.labels import Links, Value, along
from bcnet.space.operators import Call
from bcnet.space.operators.base import Asked
from bcnet.space.operators.table import Operator, bind, find, name_of
from bcnet.space.torch_export import tensors_in

Dim = tuple[str, int]


class Walk:
    """Propagates labels through the graph, node by node.

    ``kernels`` are parameter dimensions that never vary; the ``links`` and ``labels`` (parameter dimension to labels)
    of an ``earlier`` walk are continued.
    """

    def __init__(
        self,
        capture: Capture,
        state: Mapping[str, Tensor],
        kernels: Collection[Dim] = (),
        earlier: Walk | None = None,
    ):
        self.capture, self.state, self.kernels = capture, state, kernels
        first: dict[int, str] = {}
        self.tied = {name: first.setdefault(id(tensor), name) for name, tensor in state.items()}
        self.links: Links = Links() if earlier is None else earlier.links
        self.labels: dict[Dim, Tensor] = {} if earlier is None else earlier.labels
        self.values: dict[fx.Node, Any] = {}

    def propagate(self) -> None:
        for node in self.capture.graph.nodes:
            if node.op == "placeholder":
                self.values[node] = self._placeholder(node)
            elif node.op == "call_function":
                self.values[node] = self._call(node)
            elif node.op == "get_attr":
                self.values[node] = None
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
            return Value(shape_of(val)) if isinstance(val, Tensor) else val
        shape = tuple(self.state[name].shape)
        layers = []
        for axis, n in enumerate(shape):
            if n > 1 and node.users and (name, axis) not in self.kernels:  # what nothing reads stays unchanged
                if (name, axis) not in self.labels:
                    self.labels[name, axis] = self.links.fresh(n)
                layers.append(along(self.labels[name, axis], axis, shape))
        whole = len(shape) == 1 and self.state[name].dtype in (torch.int64, torch.int32)
        return Value(shape, tuple(layers), (name, self.state[name].cpu()) if whole else None)

    def _call(self, node: fx.Node) -> Any:
        args: Any = fx.node.map_aggregate(node.args, self._resolve)
        kwargs: Any = fx.node.map_aggregate(node.kwargs, self._resolve)
        if node.target is operator.getitem:
            return args[0][args[1]]
        val = node.meta.get("val")
        outs = tuple(shape_of(v) for v in tensors_in(val))
        if not outs:
            number = isinstance(val, (int, float, bool, torch.SymInt, torch.SymFloat, torch.SymBool))
            return concrete(val) if number else None
        known, labelled = find(node.target), any(value.layers for value in values_in((args, kwargs)))
        if labelled or (known is not None and not known.taught):  # expanding or creating a tensor makes labels
            result = self._apply(node, args, kwargs, outs)
        else:
            result = [Value(shape) for shape in outs]
        values = result if isinstance(result, list) else [result]
        return values if isinstance(val, (list, tuple)) else values[0]

    def _apply(self, node: fx.Node, args: Any, kwargs: Any, outs: tuple[tuple[int, ...], ...]) -> Value | list[Value]:
        target: Any = node.target
        where = layer_of(node) or node.name
        named = bind(target, args, kwargs) if hasattr(target, "_schema") else {str(i): a for i, a in enumerate(args)}
        symbolic = "groups" in named and isinstance(bind(target, node.args, node.kwargs)["groups"], fx.Node)
        batch = self.capture.batch if symbolic and named["groups"] == self.capture.batch else 0
        call = Call(self.links, named, outs, where, lambda layer: target(layer, *args[1:], **kwargs), batch)
        known = find(target)
        if known is not None:
            return self._couple(known, call)
        if _pointwise(target):
            return call.together()
        warnings.warn(_unknown(target, call), stacklevel=2)
        return _keep(call, f"operator {name_of(target)} is unknown to bcnet")

    def _couple(self, known: Operator, call: Call) -> Value | list[Value]:
        """Apply the rule of the table; a call that it does not cover keeps its channels, and so does a tensor that the
        rule does not look at."""
        asked = Asked(call.args)
        try:
            result = known.couple(replace(call, args=asked))
        except (RuntimeError, ValueError, IndexError, KeyError, TypeError, AssertionError):
            return _keep(call, "it is called in a way that bcnet does not know")
        forgotten = call.args.keys() - asked.names
        for value in values_in([call.args[name] for name in forgotten]):
            call.fixed(value, "the operator's rule says nothing of it")
        return result

    def transposed(self) -> set[str]:
        """Names of the weights whose second axis is their layer's output."""
        calls = [n for n in self.capture.graph.nodes if "conv_transpose" in str(n.target)]
        return {name for n in calls if (name := self.parameter(n.args[1])) is not None}

    def _resolve(self, arg: Any) -> Any:
        return self.values[arg] if isinstance(arg, fx.Node) else arg


def _keep(call: Call, why: str) -> list[Value]:
    """Fix all channels that meet an operator whose rule cannot be applied."""
    for value in call.values():
        call.fixed(value, why)
    return [Value(shape) for shape in call.shapes]


def _unknown(target: Any, call: Call) -> str:
    name = name_of(target)
    tensor = next((key for key, value in call.args.items() if isinstance(value, Value)), "x")
    teach = f'register("{name}", couple=lambda call: call.carry(call.value("{tensor}")))'
    way = f"if it keeps channels apart, teach it with bcnet.space.{teach}"
    if not hasattr(target, "_schema"):
        way = "write that part with plain operators if its channels should vary"
    return (
        f"bcnet does not know the operator {name} (in {call.where}) and keeps the channels that meet it at their full "
        f"width; {way}"
    )


def _pointwise(target: Any) -> bool:
    """Whether torch tags the operator, or its out-of-place twin, as pointwise."""
    if torch.Tag.pointwise in getattr(target, "tags", ()):
        return True
    if not isinstance(target, torch._ops.OpOverload):
        return False
    space, _, name = target._schema.name.partition("::")
    twin = getattr(getattr(torch.ops, space), name.removesuffix("_"), None)
    return twin is not None and any(torch.Tag.pointwise in getattr(twin, o).tags for o in twin.overloads())


def values_in(tree: Any) -> Iterable[Value]:
    """All values in nested lists, tuples and dictionaries."""
    if isinstance(tree, Value):
        yield tree
    elif isinstance(tree, (list, tuple)):
        for item in tree:
            yield from values_in(item)
    elif isinstance(tree, dict):
        yield from values_in(list(tree.values()))


def concrete(value: Any) -> Any:
    """A number for a symbol: its value in the example, or 1 where it depends on the data (``nonzero``)."""
    if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return 1 if value.node.hint is None else value.node.hint
    return value


def shape_of(val: Any) -> tuple[int, ...]:
    return tuple(int(concrete(s)) for s in val.shape)


def layer_of(node: fx.Node) -> str:
    """The path of the module whose forward made this node."""
    stack = node.meta.get("nn_module_stack") or {}
    path = list(stack.values())[-1][0].removeprefix("L['self'].").removeprefix("L['self']") if stack else ""
    return "" if path.startswith("_empty_nn_module_stack") else str(path)
