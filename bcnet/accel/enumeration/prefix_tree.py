"""Which work of a network is shared between widths: its captured graph as the levels of a tree.

The value of a kept channel depends on the width variables that were *contracted* (summed over by a dense
convolution or a linear layer) on the way to it; the variable of its own channels only slices it. Variables
are chosen one after the other, in the order in which they are first contracted, and a node stands at the
level where all variables its values depend on are chosen: there it is computed once for all widths that
agree so far, at the widest of the variables not chosen yet.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import fx

from bcnet.errors import BcnetError
from bcnet.space.axis import Axis, Segment, Size
from bcnet.space.coupling import bind, layer_of
from bcnet.space.network import NetworkSpace
from bcnet.space.operators.table import Sharing, find


@dataclass(frozen=True)
class Layout:
    """The dimension of a tensor that holds channels of width variables, and how it is made up of them."""

    dim: int
    axis: Axis


@dataclass(frozen=True)
class Work:
    """One node of the graph: the operator, its arguments by name, and where its result stands."""

    node: fx.Node
    kind: str
    args: dict[str, Any]
    level: int
    layout: Layout | None
    contracts: Axis | None = None
    dies: tuple[fx.Node, ...] = ()

    @property
    def name(self) -> str:
        return f"{self.kind} (in {layer_of(self.node) or self.node.name})"


@dataclass(frozen=True)
class Tree:
    """The graph in levels: ``order`` are the variables, level k has the first k of them chosen."""

    order: tuple[int, ...]
    levels: tuple[tuple[Work, ...], ...]
    output: fx.Node
    layouts: dict[fx.Node, Layout]
    level_of: dict[fx.Node, int]

    @cached_property
    def place(self) -> dict[int, int]:
        """The position of each variable in ``order``."""
        return {variable: i for i, variable in enumerate(self.order)}


@dataclass
class _Known:
    """What is known of a node's value: the variables it depends on, and the layout of its channels."""

    depends: frozenset[int] = frozenset()
    layout: Layout | None = None
    axes: tuple[Axis, ...] | None = None
    contracts: Axis | None = None


def grow_tree(space: NetworkSpace) -> Tree:
    """The levels of the network's graph, or a :class:`BcnetError` that names the operator in the way."""
    return _Grower(space).tree()


@dataclass
class _Grower:
    space: NetworkSpace
    known: dict[fx.Node, _Known] = field(default_factory=dict)
    order: dict[int, None] = field(default_factory=dict)

    def tree(self) -> Tree:
        nodes = [n for n in self.space.graph.graph.nodes if n.op != "output"]
        for node in nodes:
            self.known[node] = self._placeholder(node) if node.op == "placeholder" else self._call(node)
            self.order.update(dict.fromkeys(sorted(self.known[node].depends)))
        self.order.update(dict.fromkeys(range(len(self.space.variables))))
        place = {v: i for i, v in enumerate(self.order)}
        level_of = {n: max((place[v] + 1 for v in k.depends), default=0) for n, k in self.known.items()}
        output = self._output()
        used = _ancestors(output)
        calls = [n for n in nodes if n.op == "call_function" and n in used]
        levels = [[n for n in calls if level_of[n] == i] for i in range(len(self.order) + 1)]
        works = tuple(tuple(self._work(n, level_of, row, output) for n in row) for row in levels)
        layouts = {n: k.layout for n, k in self.known.items() if k.layout is not None}
        return Tree(tuple(self.order), works, output, layouts, level_of)

    def _output(self) -> fx.Node:
        (node,) = (n for n in self.space.graph.graph.nodes if n.op == "output")
        outputs = [n for n in node.args[0] if isinstance(n, fx.Node)]
        if len(outputs) != 1 or len(node.args[0]) != 1:
            raise BcnetError("only networks with one output, the logits, can be scored all at once: score one by one")
        return outputs[0]

    def _work(self, node: fx.Node, level_of: dict[fx.Node, int], row: Sequence[fx.Node], output: fx.Node) -> Work:
        """``dies`` are nodes of the same level that nothing needs after this one."""
        later = set(row[row.index(node) + 1 :])
        dies = tuple(
            used
            for used in node.all_input_nodes
            if used.op == "call_function"
            and used is not output
            and level_of[used] == level_of[node]
            and not any(user in later or level_of.get(user, 0) > level_of[node] for user in used.users)
        )
        known = self.known[node]
        args = bind(node.target, node.args, node.kwargs) if _is_operator(node) else {"args": node.args}
        return Work(node, _kind(node), args, level_of[node], known.layout, known.contracts, dies)

    def _placeholder(self, node: fx.Node) -> _Known:
        axes = self.space.coupling.axes.get(self.space.graph.state_of.get(node.name, ""))
        varying = [(d, a) for d, a in enumerate(axes or ()) if a.variables]
        return _Known(layout=Layout(*varying[0]) if len(varying) == 1 else None, axes=axes)

    def _call(self, node: fx.Node) -> _Known:
        inputs = [self.known[n] for n in node.all_input_nodes]
        depends = frozenset().union(*(k.depends for k in inputs))
        if not any(k.layout or k.axes for k in inputs):
            found = _Known(depends)
        else:
            entry = find(node.target)
            rule = _RULES[entry.shares] if entry and entry.shares else _pointwise if _is_pointwise(node) else None
            if rule is None or _mutates_shared(node):
                raise _unsupported(node)
            found = rule(self, node, bind(node.target, node.args, node.kwargs))
            found.depends |= depends
        self._verify(node, found.layout)
        return found

    def _verify(self, node: fx.Node, layout: Layout | None) -> None:
        """The sizes that the tracing of the space found must be those of the layout."""
        for row in self.space.coupling.sizes.get(node.name, ()):
            for dim, size in enumerate(row):
                mine = layout.axis.size if layout is not None and layout.dim == dim else Size(size.constant)
                if mine != size:
                    raise _unsupported(node)

    def of(self, arg: Any) -> _Known:
        return self.known[arg] if isinstance(arg, fx.Node) else _Known()


def _unsupported(node: fx.Node) -> BcnetError:
    return BcnetError(
        f"widths cannot share the work of the operator {_kind(node)} (in {layer_of(node) or node.name}): "
        "score them one by one"
    )


def _is_operator(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload)


def _kind(node: fx.Node) -> str:
    target: Any = node.target
    return target._schema.name.removesuffix("_") if _is_operator(node) else str(target)


def _is_pointwise(node: fx.Node) -> bool:
    return _is_operator(node) and torch.Tag.pointwise in functional(node.target).tags


def functional(target: Any) -> Any:
    """The operator, or the twin of an in-place one that leaves its input alone."""
    space, _, name = target._schema.name.partition("::")
    twin = getattr(getattr(torch.ops, space), name.removesuffix("_"), None) if name.endswith("_") else None
    overload = getattr(twin, target._overloadname or "default", None) if twin is not None else None
    return target if overload is None else overload


def _mutates_shared(node: fx.Node) -> bool:
    """Whether an in-place operator changes a value that others read too."""
    changed = [n for n in node.all_input_nodes[:1] if functional(node.target) is not node.target]
    return any(len(n.users) > 1 for n in changed)


def _ancestors(node: fx.Node) -> set[fx.Node]:
    found, todo = {node}, [node]
    while todo:
        for used in todo.pop().all_input_nodes:
            if used not in found:
                found.add(used)
                todo.append(used)
    return found


def shape_of(node: fx.Node) -> tuple[int, ...]:
    val = node.meta["val"]
    return tuple(int(s.node.hint if isinstance(s, torch.SymInt) else s) for s in val.shape)


def merged(segments: Sequence[Segment]) -> Axis:
    """An axis of ``segments``, neighbouring fixed ones joined."""
    rows: list[Segment] = []
    for s in segments:
        if rows and s.variable is None and rows[-1].variable is None:
            rows[-1] = Segment(None, rows[-1].repeat + s.repeat)
        else:
            rows.append(s)
    return Axis(tuple(rows))


def _same(node: fx.Node, x: _Known, axis: Axis, dim: int) -> None:
    """The channels of ``x`` must be those that the parameter's ``axis`` has."""
    if axis.variables and (x.layout is None or x.layout != Layout(dim, axis)):
        raise _unsupported(node)
    if not axis.variables and x.layout is not None:
        raise _unsupported(node)


def _sums(grower: _Grower, node: fx.Node, args: dict[str, Any]) -> _Known:
    """A convolution or a linear layer; grouped convolutions treat channels apart."""
    x, axes = grower.of(args["input"]), grower.of(args["weight"]).axes
    if axes is None:
        raise _unsupported(node)
    dim = 1 if "groups" in args else len(shape_of(node)) - 1
    layout = Layout(dim, axes[0]) if axes[0].variables else None
    if args.get("groups", 1) == 1:
        _same(node, x, axes[1], dim)
        return _Known(axes[1].variables, layout, contracts=axes[1])
    if axes[1].variables or (x.layout is None) != (layout is None):
        raise _unsupported(node)
    return _Known(layout=layout)


def _channels(grower: _Grower, node: fx.Node, args: dict[str, Any]) -> _Known:
    """Each channel apart, as batch norm and pooling do: the channels are those of the first tensor, in dimension 1."""
    layout = grower.of(node.all_input_nodes[0]).layout
    if layout is not None and (layout.dim != 1 or len(shape_of(node)) < 2):
        raise _unsupported(node)
    return _Known(layout=layout)


def _elements(grower: _Grower, node: fx.Node, args: dict[str, Any]) -> _Known:
    """Elements are moved or reduced behind the channels, or joined with them: an axis whose segments are repeated."""
    x, before, after = grower.of(args["self"]).layout, shape_of(args["self"]), shape_of(node)
    if x is None or len(after) <= x.dim or before[: x.dim] != after[: x.dim] or after[x.dim] % before[x.dim]:
        raise _unsupported(node)
    times = after[x.dim] // before[x.dim]
    return _Known(layout=Layout(x.dim, merged([Segment(s.variable, s.repeat * times) for s in x.axis.segments])))


def _joins(grower: _Grower, node: fx.Node, args: dict[str, Any]) -> _Known:
    dim = args["dim"] % len(shape_of(node))
    parts = [(grower.of(n), shape_of(n)) for n in args["tensors"]]
    if any(known.layout is not None and known.layout.dim != dim for known, _ in parts):
        raise _unsupported(node)
    segments: list[Segment] = []
    for known, shape in parts:
        segments.extend(known.layout.axis.segments if known.layout else [Segment(None, shape[dim])])
    return _Known(layout=Layout(dim, merged(segments)))


def _pointwise(grower: _Grower, node: fx.Node, args: dict[str, Any]) -> _Known:
    """Channels meet channels of the same layout, counted from the last dimension, or something without any."""
    rank = len(shape_of(node))
    found: set[Layout] = set()
    for n in node.all_input_nodes:
        known = grower.of(n)
        if known.layout is None and known.axes is not None and any(a.variables for a in known.axes):
            raise _unsupported(node)
        if known.layout is not None:
            found.add(Layout(known.layout.dim + rank - len(shape_of(n)), known.layout.axis))
    if len(found) > 1:
        raise _unsupported(node)
    return _Known(layout=found.pop() if found else None)


_RULES: dict[Sharing, Callable[[_Grower, fx.Node, dict[str, Any]], _Known]] = {
    "sums": _sums,
    "channels": _channels,
    "elements": _elements,
    "joins": _joins,
}
"""By the column ``shares`` of the table of operators."""
