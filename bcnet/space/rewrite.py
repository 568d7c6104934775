"""The captured graph at other widths: which of its constants are sizes, and how to replace them.

Export bakes sizes into the graph (``view(n, 2, 58, 28, 28)``, ``groups=96``). A *slot* is such a
constant that varies with the widths; with its slots filled the graph runs at any widths.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from bcnet.space.axis import Size
from bcnet.space.capture import Capture
from bcnet.space.coupling import Coupling
from bcnet.space.operators.products import drops_whole_groups
from bcnet.space.walk import bind, layer_of

_SHAPED = {"aten::view": "size", "aten::reshape": "shape", "aten::_unsafe_view": "size", "aten::expand": "size"}
INFERRED = Size(-1)  # the one size of a view that torch works out itself
_CONVOLUTIONS = tuple(f"aten::conv{t}{d}d" for t in ("", "_transpose") for d in (1, 2, 3))


@dataclass(frozen=True)
class Slot:
    """The argument ``name`` of ``node`` (item ``item`` of it, where it is a list) is ``size``."""

    node: fx.Node
    name: str
    item: int | None
    full: int
    size: Size

    @property
    def layer(self) -> str:
        return layer_of(self.node)

    @property
    def argument(self) -> Any:
        """The whole argument as it is in the captured graph."""
        return bind(self.node.target, self.node.args, self.node.kwargs)[self.name]


def slots(capture: Capture, coupling: Coupling) -> tuple[Slot, ...]:
    """All constants of the graph that vary with the widths."""
    found: list[Slot] = []
    for node in capture.graph.nodes:
        if node.op == "call_function" and isinstance(node.target, torch._ops.OpOverload):
            for name, item, full, size in _sizes_of(node, coupling):
                if size.terms or full < 0:
                    found.append(Slot(node, name, item, full, size))
    return tuple(found)


def _sizes_of(node: fx.Node, coupling: Coupling) -> Iterator[tuple[str, int | None, int, Size]]:
    """``(argument, item, constant, size)`` of the size constants of one node."""
    target: Any = node.target
    kind = target._schema.name
    args = bind(target, node.args, node.kwargs)
    rows = coupling.sizes[node.name]
    if kind in _SHAPED:
        wanted = args[_SHAPED[kind]]
        merged = [i for i, n in enumerate(wanted) if isinstance(n, fx.Node) and rows[0][i].terms]
        for i, n in enumerate(wanted):
            if i in merged:  # channels merged with the batch
                yield _SHAPED[kind], i, -1, INFERRED
            elif isinstance(n, int) and (n > 0 or merged):
                yield _SHAPED[kind], i, n, rows[0][i]
    elif kind == "aten::unflatten":
        dim = args["dim"] % len(coupling.sizes[args["self"].name][0])
        for i, n in enumerate(args["sizes"]):
            if isinstance(n, int) and n > 0:
                yield "sizes", i, n, rows[0][dim + i]
    elif kind in ("aten::split_with_sizes", "aten::split"):
        dim = args["dim"] % len(rows[0])
        if kind == "aten::split":
            yield "split_size", None, args["split_size"], rows[0][dim]
        else:
            for i, n in enumerate(args["split_sizes"]):
                yield "split_sizes", i, n, rows[i][dim]
    elif kind in ("aten::slice", "aten::narrow"):
        yield from _slice_sizes(kind, args, coupling)
    elif kind in _CONVOLUTIONS and isinstance(args["groups"], int) and args["groups"] > 1:
        inputs = args["input"].name
        per = (coupling.full(inputs, 1) // args["groups"], coupling.full(node.name, 1) // args["groups"])
        yield from _group_sizes("groups", args["groups"], coupling.sizes[inputs][0][1], per)
    elif kind == "aten::group_norm" and args["num_groups"] > 1:
        per_group = coupling.full(node.name, 1) // args["num_groups"]
        yield from _group_sizes("num_groups", args["num_groups"], rows[0][1], (per_group, per_group))
    elif kind in ("aten::layer_norm", "aten::rms_norm"):
        shape = args["normalized_shape"]
        for i, n in enumerate(shape):
            yield "normalized_shape", i, n, rows[0][len(rows[0]) - len(shape) + i]
    elif kind in ("aten::constant_pad_nd", "aten::pad"):
        yield from _pad_sizes(node, args["pad"], coupling)


def _slice_sizes(kind: str, args: Mapping[str, Any], coupling: Coupling) -> Iterator[tuple[str, int | None, int, Size]]:
    source = args["self"].name
    before = coupling.prefixes.get(source)
    axis = args["dim"] % len(coupling.sizes[source][0])
    length = coupling.full(source, axis)
    if before is None:
        return
    if kind == "aten::narrow":
        start, n = args["start"], args["length"]
        yield "start", None, start, before(axis, start)
        yield "length", None, n, before(axis, start + n) - before(axis, start)
        return
    for name in ("start", "end"):
        position = args[name]
        if isinstance(position, int) and position != 0 and abs(position) < length:
            place = position % length
            size = before(axis, place)
            yield name, None, position, size if position > 0 else size - before(axis, length)


def _group_sizes(
    name: str, groups: int, inputs: Size, per_group: tuple[int, int]
) -> Iterator[tuple[str, int | None, int, Size]]:
    if drops_whole_groups(groups, *per_group):
        yield name, None, groups, inputs // per_group[0]


def _pad_sizes(node: fx.Node, pad: Any, coupling: Coupling) -> Iterator[tuple[str, int | None, int, Size]]:
    before = coupling.prefixes.get(node.name)
    sizes = coupling.sizes[node.name][0]
    for i in range(0, len(pad), 2):
        axis = len(sizes) - 1 - i // 2
        if before is None or not sizes[axis].terms:
            continue
        n = coupling.full(node.name, axis)
        if pad[i]:
            yield "pad", i, pad[i], before(axis, pad[i])
        if pad[i + 1]:
            yield "pad", i + 1, pad[i + 1], before(axis, n) - before(axis, n - pad[i + 1])


Fill = Callable[[fx.Graph, Slot], Any]


def rewrite(
    capture: Capture, holes: tuple[Slot, ...], fill: Fill, state: Callable[[fx.Graph, str, str], fx.Node]
) -> fx.Graph:
    """A copy of the graph with every slot set to ``fill(graph, slot)`` and every parameter, buffer and
    constant placeholder replaced by ``state(graph, name, kind)``; the output is the network's own."""
    graph = fx.Graph()
    new: dict[fx.Node, Any] = {}
    by_node: dict[fx.Node, list[Slot]] = {}
    for slot in holes:
        by_node.setdefault(slot.node, []).append(slot)
    for node in capture.graph.nodes:
        if node.op == "placeholder" and node.name in capture.inputs:
            new[node] = graph.placeholder(node.name)
    for node in capture.graph.nodes:
        if node.op == "placeholder":
            if node.name in capture.inputs or not node.users:
                continue
            kind = "constant" if node.name in capture.constants else "state"
            new[node] = state(graph, capture.state_of.get(node.name, node.name), kind)
        elif node.op == "output":
            outputs = fx.node.map_arg(node.args[0], lambda n: new[n])
            graph.output(outputs[0] if len(outputs) == 1 else outputs)
        else:
            new[node] = graph.node_copy(node, lambda n: new[n])
            for slot in by_node.get(node, ()):
                with graph.inserting_before(new[node]):
                    value = fill(graph, slot)
                _set(new[node], slot, value)
    return graph


def _set(node: fx.Node, slot: Slot, value: Any) -> None:
    """Replace one argument of a copied node."""
    target: Any = node.target
    names = [a.name for a in target._schema.arguments]
    position = names.index(slot.name)
    in_args = position < len(node.args)
    old = node.args[position] if in_args else node.kwargs[slot.name]
    if slot.item is not None:
        items = list(old)  # type: ignore[arg-type]
        items[slot.item] = value
        value = items
    if in_args:
        node.update_arg(position, value)
    else:
        node.update_kwarg(slot.name, value)


def graph_network(
    capture: Capture, holes: tuple[Slot, ...], units: Any, tensors: Mapping[str, Tensor | nn.Parameter]
) -> fx.GraphModule:
    """The network at ``units`` per variable as a module of the rewritten graph; state names are the user's."""
    root = nn.Module()
    for name, tensor in tensors.items():
        put(root, name, tensor)
    for name, constant in capture.constants.items():
        root.register_buffer(f"constant_{name}", constant, persistent=False)

    def state(graph: fx.Graph, name: str, kind: str) -> fx.Node:
        return graph.get_attr(f"constant_{name}" if kind == "constant" else name)

    graph = rewrite(capture, holes, lambda _, slot: slot.size.at(units), state)
    follow_training_mode(graph)
    module = fx.GraphModule(root, graph, class_name="GraphNetwork")
    kept = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    for name, tensor in tensors.items():
        if name not in kept:  # what the graph does not read (a counter of batches, a head for training) stays too
            put(module, name, tensor)
    return module.train()


def follow_training_mode(graph: fx.Graph) -> None:
    """Let batch norm and dropout follow ``module.training``, which export had frozen."""
    nodes = [n for n in graph.nodes if n.op == "call_function" and isinstance(n.target, torch._ops.OpOverload)]
    flagged = [(n, flag) for n in nodes if (flag := _training_flag(n)) is not None]
    if not flagged:
        return
    first = next(n for n in graph.nodes if n.op != "placeholder")
    with graph.inserting_before(first):
        mode = graph.create_node("get_attr", "training")
    for node, name in flagged:
        position = [a.name for a in node.target._schema.arguments].index(name)
        args = bind(node.target, node.args, node.kwargs)
        if name == "training" and args.get("running_mean") is None:
            continue
        node.args = tuple(args.values())[: position + 1]
        rest = dict(list(args.items())[position + 1 :])
        node.update_arg(position, mode)
        node.kwargs = rest


def _training_flag(node: fx.Node) -> str | None:
    name = node.target._schema.name  # type: ignore[union-attr]
    if name == "aten::batch_norm":
        return "training"
    return "train" if name in ("aten::dropout", "aten::dropout_", "aten::feature_dropout") else None


def put(root: nn.Module, name: str, tensor: Tensor | nn.Parameter | None) -> None:
    """Set the parameter or buffer ``name`` of ``root``, making modules on the way."""
    path, _, leaf = name.rpartition(".")
    module = root
    for part in path.split(".") if path else ():
        if part not in module._modules:
            module.add_module(part, nn.Module())
        module = module._modules[part]  # type: ignore[assignment]
    if isinstance(tensor, nn.Parameter):
        module.register_parameter(leaf, tensor)
    else:
        module.register_buffer(leaf, tensor)
