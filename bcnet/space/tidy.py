"""A captured graph prepared for other widths and for training: blocks inlined, sizes and axes made explicit."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping
from math import prod
from typing import Any

import torch
from torch import Tensor, fx


def tidy(module: fx.GraphModule) -> None:
    """All steps, in the order in which they build on each other."""
    inline(module)
    for step in (keep_contents, spell_out, keep_saved, free_groups, mix_kernels):
        step(module.graph)


def inline(module: fx.GraphModule) -> None:
    """Inline the body of every ``no_grad`` or ``autocast`` block; no gradient leaves the former."""
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


def keep_contents(graph: fx.Graph) -> None:
    """Do not empty tensors to free their memory (``x.set_()``): a graph frees what it no longer needs. Nor hold any to
    the precision of an ``autocast`` that is gone."""
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten._assert_tensor_metadata.default):
        graph.erase_node(node)
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten.set_.default):
        node.replace_all_uses_with(node.args[0])
        graph.erase_node(node)


def _detached(graph: fx.Graph, value: fx.Node) -> fx.Node:
    if not isinstance(value.meta.get("val"), Tensor):
        return value
    detached = graph.call_function(torch.ops.aten.detach.default, (value,))
    detached.meta = {"val": value.meta["val"], "nn_module_stack": value.meta.get("nn_module_stack")}
    return detached


def spell_out(graph: fx.Graph) -> None:
    """Make explicit what otherwise follows from the actual sizes, which may differ at other widths: the sizes of
    unequal parts, and the axes that a squeeze removes."""
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


def lift_numbers(graph: fx.Graph, constants: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Turn the indices of channels that the forward itself writes down, ``x[:, [1, 0]]``, into placeholders; returns
    what they hold, by the placeholder's name."""
    found: dict[str, Tensor] = {}
    for node in list(graph.nodes):
        for pick, size in _picks(node):
            val = pick.meta.get("val")
            if not isinstance(val, Tensor) or val.dim() != 1 or val.dtype not in (torch.int64, torch.int32):
                continue
            numbers = _known(pick, constants)
            if numbers is not None and len(numbers) > 1:
                with graph.inserting_before(next(iter(graph.nodes))):
                    lifted = graph.placeholder("channel_numbers")
                lifted.meta["val"] = val
                node.replace_input_with(pick, lifted)
                found[lifted.name] = numbers % size
    return found


def _picks(node: fx.Node) -> Iterator[tuple[fx.Node, int]]:
    """The indices by which a node picks elements, and the size of the axis they are picked from."""
    aten, args = torch.ops.aten, tuple[Any, ...](node.args)
    if node.target is aten.index.Tensor:
        axes = {axis: pick for axis, pick in enumerate(args[1]) if pick is not None}
    elif node.target is aten.index_select.default:
        axes = {args[1]: args[2]}
    else:
        return
    shape = args[0].meta["val"].shape
    for axis, pick in axes.items():
        if len(axes) == 1 and type(shape[axis]) is int:
            yield pick, shape[axis]


def _known(node: fx.Node, constants: Mapping[str, Tensor]) -> Tensor | None:
    """The value of a node that depends on constants alone; None for any other."""
    if node.name in constants:
        return constants[node.name].clone()
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or torch.Tag.nondeterministic_seeded in target.tags:
        return None
    inputs = {n: _known(n, constants) for n in node.all_input_nodes}
    if any(value is None for value in inputs.values()):
        return None
    args, kwargs = fx.node.map_arg(node.args, inputs.get), fx.node.map_arg(node.kwargs, inputs.get)
    result: Tensor = target(*args, **kwargs)
    return result


def free_groups(graph: fx.Graph) -> None:
    """Compute a number of groups that depends on the batch, as every image has its own kernels, from the channels."""
    size = torch.ops.aten.sym_size.int
    for node in list(graph.nodes):
        name = str(node.target)
        if not name.startswith("aten.conv") or "transpose" in name or len(node.args) < 7:
            continue
        x, weight, groups = node.args[0], node.args[1], node.args[6]
        if not isinstance(groups, fx.Node):
            continue
        shape, kernel = (n.meta["val"].shape for n in (x, weight))
        axis = len(shape) - len(kernel) + 1
        with graph.inserting_before(node):
            channels, each = graph.call_function(size, (x, axis)), graph.call_function(size, (weight, 1))
            number = graph.call_function(operator.floordiv, (channels, each))
        for made, val in ((channels, shape[axis]), (each, kernel[1]), (number, groups.meta["val"])):
            made.meta["val"] = val
        node.update_arg(6, number)


def mix_kernels(graph: fx.Graph) -> None:
    """Rewrite ``(routes @ kernels.flatten(1)).view(...)``, a mixture of kernels for every image, without flattening: in
    a flattened axis only one of the two kinds of channels could vary."""
    aten = torch.ops.aten
    views = (aten.view.default, aten.reshape.default)
    for node in [n for n in graph.nodes if n.target in (aten.matmul.default, aten.mm.default)]:
        routes, flat = node.args
        if flat.target not in (*views, aten.flatten.using_ints) or len(routes.meta["val"].shape) != 2:
            continue
        kernels = flat.args[0]
        experts, *inner = kernels.meta["val"].shape
        flattened = len(inner) > 1 and tuple(flat.meta["val"].shape) == (experts, prod(inner))
        rows = [list(user.meta["val"].shape)[1 - len(inner) :] for user in node.users if user.target in views]
        if not flattened or rows != [inner[1:]] * len(node.users):
            continue
        letters = "abcdfghi"[: len(inner)]
        with graph.inserting_before(node):
            mixed = graph.call_function(aten.einsum.default, (f"ne,e{letters}->n{letters}", [routes, kernels]))
        mixed.meta = {**node.meta, "val": node.meta["val"].reshape(-1, *inner)}
        node.replace_all_uses_with(mixed)
        for old in (node, flat):
            if not old.users:
                graph.erase_node(old)


_SAVED = ["exp", "sigmoid", "tanh", "softmax", "log_softmax", "sqrt", "rsqrt", "reciprocal", "relu", "elu", "selu"]


def keep_saved(graph: fx.Graph) -> None:
    """Do not write into results that autograd keeps: a forward may do so in evaluation mode, which was captured."""
    for node in graph.nodes:
        schema = getattr(node.target, "_schema", None)
        source = node.args[0] if node.args else None
        if schema is None or not schema.name.endswith("_") or not isinstance(source, fx.Node):
            continue
        saved = getattr(getattr(source.target, "_schema", None), "name", "").removeprefix("aten::") in _SAVED
        twin = getattr(getattr(torch.ops.aten, schema.name[6:-1], None), schema.overload_name or "default", None)
        if saved and twin is not None and all(user <= node for user in source.users):
            node.target = twin
