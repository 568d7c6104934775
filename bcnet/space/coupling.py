"""From the graph of any network to its width variables.

Labels (see :mod:`bcnet.space.labels`) are propagated through the graph; labels that must share their
fate form classes; classes that touch the same parameter dimensions form a width variable.
"""

from __future__ import annotations

import fnmatch
import operator
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from scipy.sparse import coo_matrix
from torch import Tensor, fx

from bcnet.errors import BcnetError
from bcnet.space.axis import Axis, Size, parse
from bcnet.space.capture import Capture
from bcnet.space.labels import Links, Value, along, settle, shrink, varying, vector
from bcnet.space.operators import RULES, Call

Dim = tuple[str, int]


@dataclass(frozen=True)
class Coupled:
    """One width variable as the graph shows it: ``count`` units of ``unit`` channels."""

    name: str
    count: int
    unit: int
    layers: tuple[str, ...]


@dataclass(frozen=True)
class Coupling:
    """Width variables of a network, the axes of its parameters, and the sizes in its graph."""

    variables: tuple[Coupled, ...]
    axes: Mapping[str, tuple[Axis, ...]]
    sizes: Mapping[str, tuple[tuple[Size, ...], ...]]
    prefixes: Mapping[str, Callable[[int, int], Size]]
    fixed: tuple[tuple[str, str], ...]

    def full(self, node: str, axis: int) -> int:
        """The size of an axis of a node's output in the captured network."""
        return self.sizes[node][0][axis].at([v.count for v in self.variables])


def couple(
    capture: Capture, state: Mapping[str, Tensor], ignore: Iterable[str] = (), training: Capture | None = None
) -> Coupling:
    """Find the width variables of a captured network.

    ``state`` are its parameters and buffers by name; ``ignore`` holds names of layers (or patterns such
    as ``stem.*``) whose output width must not change; ``training`` is the graph of the training mode,
    where that has layers of its own (auxiliary heads).
    """
    walk = _Walk(capture, state)
    walk.propagate()
    if training is not None:
        also = _Walk(training, state, walk.links, walk.labels)
        also.propagate()
    _fix_ignored(walk, tuple(ignore))
    return _Grouping(walk).result()


class _Walk:
    """Propagates labels through the graph, node by node."""

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
                for value in _tensors(fx.node.map_aggregate(node.args, self._resolve)):
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
        tensors = list(_tensors((args, kwargs)))
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


def _tensors(tree: Any) -> Iterable[Value]:
    if isinstance(tree, Value):
        yield tree
    elif isinstance(tree, (list, tuple)):
        for item in tree:
            yield from _tensors(item)
    elif isinstance(tree, dict):
        yield from _tensors(list(tree.values()))


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


def _fix_ignored(walk: _Walk, ignore: tuple[str, ...]) -> None:
    used = dict.fromkeys(ignore, False)
    for (name, axis), labels in walk.labels.items():
        layer = name.rpartition(".")[0]
        for pattern in ignore:
            if fnmatch.fnmatchcase(layer, pattern) or fnmatch.fnmatchcase(name, pattern):
                used[pattern] = True
                if axis == 0:
                    walk.links.fix(labels, f"{layer} is ignored")
    for pattern, found in used.items():
        if not found:
            raise BcnetError(f"ignore names {pattern!r}, but no layer of the network is called so")


class _Grouping:
    """Turns classes of labels into variables, axes and sizes; fixes what is too irregular to vary."""

    def __init__(self, walk: _Walk):
        self.walk = walk
        self.order = self._first_uses()

    def result(self) -> Coupling:
        for _ in range(len(self.walk.labels) + 1):
            self.classes = self.walk.links.classes()
            self._group()
            spoiled = self._spoiled()
            if not spoiled:
                break
            for variable, where in spoiled.items():
                members = np.flatnonzero(self.member[:, 0] == variable)
                self.walk.links.fix(torch.from_numpy(members), f"its channels are mixed in {where}")
        if not self.counts:
            raise BcnetError(
                "this network has no channel dimension that could vary; is it a convolutional network, "
                "and are its layers not all ignored?"
            )
        return Coupling(self._variables(), self._axes, self._sizes(), self._prefixes(), self._fixed())

    def _first_uses(self) -> list[Dim]:
        """Parameter dimensions in the order of first use in the forward pass."""
        order: dict[Dim, None] = {}
        for node in self.walk.capture.graph.nodes:
            for used in node.all_input_nodes:
                name = self.walk.parameter(used)
                if name is not None:
                    order.update({(name, a): None for a in range(8) if (name, a) in self.walk.labels})
        order.update(dict.fromkeys(self.walk.labels))
        return list(order)

    def _group(self) -> None:
        """``member`` (labels, 2): variable and unit of every label, -1 where fixed; ``counts``: units."""
        rows = [self.classes[self.walk.labels[dim].numpy()] for dim in self.order]
        where = np.repeat(np.arange(len(rows)), [len(row) for row in rows])
        used = np.concatenate([np.zeros(0, dtype=np.int64), *rows])
        classes, first = np.unique(used, return_index=True)
        shape = (self.classes.max() + 1, max(1, len(rows)))
        uses = coo_matrix((np.ones(len(where), dtype=np.int64), (used, where)), shape).tocsr()
        groups: dict[bytes, list[int]] = {}
        for c in classes[np.argsort(first)].tolist():
            if c:
                span = slice(uses.indptr[c], uses.indptr[c + 1])
                groups.setdefault(uses.indices[span].tobytes() + uses.data[span].tobytes(), []).append(c)
        kept = [g for g in groups.values() if len(g) > 1]
        self.counts = [len(g) for g in kept]
        place_of = np.full((self.classes.max() + 1, 2), -1, dtype=np.int64)
        for variable, members in enumerate(kept):
            for unit, c in enumerate(members):
                place_of[c] = variable, unit
        self.member = place_of[self.classes]
        self.places = torch.from_numpy(place_of[:, 0] * (len(place_of) + 1) + place_of[:, 1])[self.classes]

    def _spoiled(self) -> dict[int, str]:
        """Variables some axis cannot be described with, and where."""
        spoiled: dict[int, str] = {}
        axes: dict[str, list[Axis]] = {}
        for (name, axis), labels in sorted(self.walk.labels.items()):
            found = parse(self.member[labels.numpy()], self.counts)
            if isinstance(found, int):
                spoiled.setdefault(found, name)
            else:
                shape = self.walk.state[name].shape
                row = axes.setdefault(name, [parse(np.full((n, 2), -1), []) for n in shape])  # type: ignore[misc]
                row[axis] = found
        for node, value in self.walk.values.items():
            for v in _tensors(value):
                for axis in range(len(v.shape)):
                    size = self._size(v, axis)
                    if isinstance(size, int):
                        spoiled.setdefault(size, layer_of(node) or node.name)
        self._axes = {name: tuple(axes[first]) for name, first in self.walk.tied.items() if first in axes}
        return spoiled

    def _size(self, value: Value, axis: int) -> Size | int:
        """The size of an axis, or the variable of which it holds only a part or that shares it with another."""
        rows = [row for layer in value.layers if (row := self._row(layer, axis)) is not None]
        places = self.places.numpy()
        if any(not np.array_equal(places[rows[0]], places[row]) for row in rows[1:]):
            return int(max(self.member[rows[-1], 0]))
        return self._count(rows[0]) if rows else Size(value.shape[axis])

    def _row(self, layer: Tensor, axis: int) -> np.ndarray | None:
        """The labels of a layer along an axis, or None where their variables and units do not differ along it."""
        if axis not in varying(layer):
            return None
        small = shrink(layer)[0]
        if axis not in varying(settle(self.places[small])):
            return None
        return vector(small, axis).numpy()

    def _count(self, labels: np.ndarray) -> Size | int:
        variables, numbers = np.unique(self.member[labels, 0], return_counts=True)
        constant, terms = 0, []
        for v, n in zip(variables.tolist(), numbers.tolist(), strict=True):
            if v < 0:
                constant = n
            elif n % self.counts[v]:
                return int(v)
            else:
                terms.append((v, n // self.counts[v]))
        return Size(constant, tuple(terms))

    def _sizes(self) -> dict[str, tuple[tuple[Size, ...], ...]]:
        """Node name to the sizes of its output axes (one row per output tensor)."""
        sizes = {}
        for node, value in self.walk.values.items():
            rows = [tuple(self._size(v, a) for a in range(len(v.shape))) for v in _tensors(value)]
            sizes[node.name] = tuple(rows)
        return sizes  # type: ignore[return-value]

    def _prefixes(self) -> dict[str, Callable[[int, int], Size]]:
        """Node name to a function (axis, position) -> how many channels lie before that position."""
        found: dict[str, Callable[[int, int], Size]] = {}
        for node, value in self.walk.values.items():
            if isinstance(value, Value) and value.layers:
                found[node.name] = partial(self._prefix, value)
        return found

    def _prefix(self, value: Value, axis: int, position: int) -> Size:
        for layer in value.layers:
            if axis in varying(layer):
                size = self._count(vector(layer, axis).numpy()[:position])
                if isinstance(size, Size):
                    return size
        return Size(position)

    def _variables(self) -> tuple[Coupled, ...]:
        layers: list[dict[str, None]] = [{} for _ in self.counts]
        unit = [0] * len(self.counts)
        names: list[str] = [""] * len(self.counts)
        for name, axis in self.order:
            found = self._axes[name][axis]
            for v in found.variables:
                layer = name.rpartition(".")[0] or name
                layers[v][layer] = None
                names[v] = names[v] or layer
                channels = sum(s.repeat for s in found.segments if s.variable == v)
                unit[v] = min(unit[v], channels) if unit[v] else channels
        unique: dict[str, int] = {}
        for i, name in enumerate(names):
            unique[name] = unique.get(name, 0) + 1
            names[i] = name if unique[name] == 1 else f"{name}#{unique[name]}"
        return tuple(Coupled(names[v], n, unit[v], tuple(layers[v])) for v, n in enumerate(self.counts))

    def _fixed(self) -> tuple[tuple[str, str], ...]:
        """Layers whose output was fixed, with the reason; the network's output itself is not listed."""
        owners = [(int(labels[0]), int(labels[-1]), dim) for dim, labels in self.walk.labels.items()]
        rows: dict[str, str] = {}
        for label, why in self.walk.links.reasons:
            name, axis = next((dim for low, high, dim in owners if low <= label <= high), ("", 1))
            if axis == 0 and "kernel" not in why:
                layer, _, leaf = name.rpartition(".")
                rows.setdefault(layer if layer and leaf in ("weight", "bias") else name, why)
        return tuple(rows.items())
