"""A captured graph made fit for other widths and for training: blocks put in their place, sizes and axes named."""

from __future__ import annotations

import torch
from torch import Tensor, fx


def inline(module: fx.GraphModule) -> None:
    """Put the body of every block of ``no_grad`` or ``autocast`` in its place; no gradient leaves the former."""
    graph = module.graph
    for node in list(graph.nodes):
        name = str(node.target)
        if node.op != "call_function" or not name.startswith(("wrap_with_set_grad_enabled", "wrap_with_autocast")):
            continue
        place = next(i for i, a in enumerate(node.args) if isinstance(a, fx.Node) and a.op == "get_attr")
        part = node.args[place]
        body = getattr(module, part.target)
        inline(body)
        given = iter(node.args[place + 1 :])
        inner = {n: next(given) for n in body.graph.nodes if n.op == "placeholder"}
        with graph.inserting_before(node):
            for n in body.graph.nodes:
                if n.op == "call_function":
                    inner[n] = graph.node_copy(n, inner.__getitem__)
            (end,) = body.graph.find_nodes(op="output")
            outputs = [inner[n] for n in end.args[0]]
            if "grad" in name and not node.args[0]:
                outputs = [_detached(graph, output) for output in outputs]
        for user in list(node.users):
            user.replace_all_uses_with(outputs[user.args[1]])
            graph.erase_node(user)
        graph.erase_node(node)
        graph.erase_node(part)


def _detached(graph: fx.Graph, value: fx.Node) -> fx.Node:
    if not isinstance(value.meta.get("val"), Tensor):
        return value
    detached = graph.call_function(torch.ops.aten.detach.default, (value,))
    detached.meta = {"val": value.meta["val"], "nn_module_stack": value.meta.get("nn_module_stack")}
    return detached


def spell_out(graph: fx.Graph) -> None:
    """Name what a network leaves to the sizes at hand, which may be others at other widths: the sizes of unequal
    parts, and the axes that a squeeze removes."""
    aten = torch.ops.aten
    for node in list(graph.nodes):
        if node.target in (aten.chunk.default, aten.split.Tensor, aten.tensor_split.sections):
            dim = node.args[2] if len(node.args) > 2 else node.kwargs.get("dim", 0)
            sizes = [part.shape[dim] for part in node.meta["val"]]
            if all(isinstance(size, int) for size in sizes) and len(set(sizes)) > 1:
                node.target, node.args, node.kwargs = aten.split_with_sizes.default, (node.args[0], sizes, dim), {}
        elif node.target in (aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims):
            shape = node.args[0].meta["val"].shape
            asked = node.args[1] if len(node.args) > 1 else list(range(len(shape)))
            dims = [
                d for d in ([asked] if isinstance(asked, int) else asked) if type(shape[d]) is int and shape[d] == 1
            ]
            if dims:
                node.target, node.args = aten.squeeze.dims, (node.args[0], dims)
            else:
                node.replace_all_uses_with(node.args[0])
                graph.erase_node(node)


_SAVED = [
    f"aten::{name}"
    for name in [
        "exp",
        "sigmoid",
        "tanh",
        "softmax",
        "log_softmax",
        "sqrt",
        "rsqrt",
        "reciprocal",
        "relu",
        "elu",
        "selu",
    ]
]


def keep_saved(graph: fx.Graph) -> None:
    """Nothing is written into a result that autograd keeps: a forward may do that in evaluation, which was captured."""
    for node in graph.nodes:
        schema = getattr(node.target, "_schema", None)
        source = node.args[0] if node.args else None
        if schema is None or not schema.name.endswith("_") or not isinstance(source, fx.Node):
            continue
        saved = getattr(getattr(source.target, "_schema", None), "name", "") in _SAVED
        twin = getattr(getattr(torch.ops.aten, schema.name[6:-1], None), schema.overload_name or "default", None)
        if saved and twin is not None and all(user <= node for user in source.users):
            node.target = twin
