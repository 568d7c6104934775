"""The captured graph at other widths: which of its constants are sizes, and how to replace them.

Export bakes sizes into the graph (``view(n, 2, 58, 28, 28)``, ``groups=96``). A *slot* is such a
constant that varies with the widths; with its slots filled the graph runs at any widths.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import TreeSpec, tree_unflatten

from bcnet.errors import BcnetError
from bcnet.space.axis import Size
from bcnet.space.capture import Capture
from bcnet.space.coupling import Coupling
from bcnet.space.handwritten import call_functions
from bcnet.space.operators.table import Site, bind, find, name_of
from bcnet.space.walk import layer_of

CONSTANT = "constant_"  # begins the names of buffers for tensors that the forward creates from numbers
STRUCTURED = "bcnet_structured"


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
        entry = find(node.target) if node.op == "call_function" else None
        if entry is not None and entry.sizes is not None:
            for name, item, full, size in entry.sizes(Site(node, coupling)):
                if isinstance(full, int) and (size.terms or full < 0):  # otherwise it depends on the batch
                    found.append(Slot(node, name, item, full, size))
    return tuple(found)


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
            graph.output(outputs[0] if capture.output.is_leaf() else outputs)
        else:
            new[node] = graph.node_copy(node, lambda n: new[n])
            new[node].meta["captured"] = node.name
            for slot in by_node.get(node, ()):
                with graph.inserting_before(new[node]):
                    _fill(new[node], slot, fill(graph, slot))
            if node.target is torch.ops.aten.view.default:  # a slice of a weight need not be contiguous
                new[node].target = torch.ops.aten.reshape.default
    call_functions(graph, capture.functions, new)
    return graph


def _fill(node: fx.Node, slot: Slot, value: Any) -> None:
    """Fill a slot of a copied node."""
    if slot.item is None:
        _set(node, slot.name, value)
    else:
        items = list(bind(node.target, node.args, node.kwargs)[slot.name])
        items[slot.item] = value
        _set(node, slot.name, items)


def _set(node: fx.Node, name: str, value: Any) -> None:
    """Replace one argument of a node."""
    target: Any = node.target
    position = [a.name for a in target._schema.arguments].index(name)
    if position < len(node.args):
        node.update_arg(position, value)
    else:
        node.update_kwarg(name, value)


def graph_network(
    capture: Capture,
    holes: tuple[Slot, ...],
    units: Any,
    tensors: Mapping[str, Tensor | nn.Parameter],
    frozen: bool = False,
) -> fx.GraphModule:
    """The network at ``units`` per variable as a module of the rewritten graph; state names are the user's. Where it
    is ``frozen`` its layers stay in the mode that they were captured in."""
    root = nn.Module()
    for name in {name.partition(".")[0] for name in tensors} & _TAKEN:
        raise BcnetError(f"a network built from a graph cannot have a part called {name!r}: rename it in the model")
    for name, tensor in tensors.items():
        put(root, name, tensor)
    for name, part in capture.parts.items():
        root.add_module(name, part)
    for name, constant in capture.constants.items():
        root.register_buffer(CONSTANT + name, constant, persistent=False)

    def state(graph: fx.Graph, name: str, kind: str) -> fx.Node:
        return graph.get_attr(CONSTANT + name if kind == "constant" else name)

    graph = rewrite(capture, holes, lambda _, slot: slot.size.at(units), state)
    if not frozen:
        follow_training_mode(graph)
    if not is_plain(capture.output):
        root.add_module(STRUCTURED, Structured(capture.output))
        (end,) = graph.find_nodes(op="output")
        with graph.inserting_before(end):
            end.args = (graph.call_module(STRUCTURED, tuple(end.args[0])),)
    module = GraphNetwork(root, graph, class_name="GraphNetwork")
    kept = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    for name, tensor in tensors.items():
        if name not in kept:  # what the graph does not read (a batch counter, a head for training) is kept, too
            put(module, name, tensor)
    return module.train()


def _own_names() -> set[str]:
    """The attributes that torch gives a module of a graph, beyond those of every module."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        own = fx.GraphModule(nn.Module(), fx.Graph())
    return set(dir(own)) - set(dir(nn.Module()))


_TAKEN = _own_names() - {"code"}


class GraphNetwork(fx.GraphModule):
    """A module of the captured graph; a layer called ``code`` takes precedence over the attribute of that name."""

    def __getattribute__(self, name: str) -> Any:
        if name == "code":
            inside = super().__getattribute__("__dict__")
            return inside.get("_modules", {}).get(name, inside.get("_code"))
        return super().__getattribute__(name)


class Structured(nn.Module):
    """Puts the outputs of a graph together as the network's own forward returns them."""

    def __init__(self, spec: TreeSpec):
        super().__init__()
        self.spec = spec

    def forward(self, *outputs: Any) -> Any:
        return tree_unflatten(outputs, self.spec)


def is_plain(spec: TreeSpec) -> bool:
    """Whether outputs are a tensor or a tuple of tensors, which a graph returns anyway."""
    return spec.is_leaf() or (spec.type is tuple and all(child.is_leaf() for child in spec.children()))


def follow_training_mode(graph: fx.Graph) -> None:
    """Let batch norm and dropout follow ``module.training``, which export had frozen."""
    flagged = [(n, flag) for n in graph.nodes if (flag := _training_flag(n)) is not None]
    if not flagged:
        return
    first = next(n for n in graph.nodes if n.op != "placeholder")
    with graph.inserting_before(first):
        mode = graph.create_node("get_attr", "training")
    for node, name in flagged:
        _set(node, name, mode)


def _training_flag(node: fx.Node) -> str | None:
    """The argument that says whether a dropout, or a batch norm with running statistics, is in training mode."""
    name = name_of(node.target)
    if name == "aten::batch_norm":
        return "training" if bind(node.target, node.args, node.kwargs)["running_mean"] is not None else None
    return "train" if name in ("aten::dropout", "aten::dropout_", "aten::feature_dropout") else None


def put(root: nn.Module, name: str, tensor: Tensor | nn.Parameter | None) -> None:
    """Set the parameter or buffer ``name`` of ``root``, creating modules on the way.

    Names do not collide with attributes that ``root`` itself has: a network may have a layer called ``state``.
    """
    *path, leaf = name.split(".")
    module: Any = root
    for part in path:
        module = module._modules.setdefault(part, nn.Module())
    (module._parameters if isinstance(tensor, nn.Parameter) else module._buffers)[leaf] = tensor


def held_by(root: nn.Module, name: str) -> tuple[dict[str, Any], str]:
    """The dictionary that holds a parameter or buffer of ``root``, and its key: survives ``root.to(...)``."""
    *path, leaf = name.split(".")
    module: Any = root
    for part in path:
        module = module._modules[part]
    return (module._parameters if leaf in module._parameters else module._buffers), leaf
