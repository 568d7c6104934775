"""Operators that have no kernel of their own run as they are, under autograd, between those that have.

Each takes its inputs from the tape as leaves, and slices of the parameters themselves, so that whatever tracing
understands can stand in a program: biases, poolings, gates, concatenations, layer norms.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, fx

from bcnet.accel.enumeration.prefix_tree import functional
from bcnet.accel.fused_step.convolutions import channels_last, size_of
from bcnet.accel.fused_step.program import Eager
from bcnet.accel.kernels.values import Goal, Rows
from bcnet.space.coupling import bind
from bcnet.space.resize import sliced
from bcnet.supernet.gradients import places
from bcnet.supernet.supernet import Plan, Supernet

if TYPE_CHECKING:
    from bcnet.accel.fused_step.tape import Tape

Statistics = Literal["batch", "tracked", "running"]
"""What batch norm goes by: the batch, as in a supernet; the batch, which its running statistics follow; or these."""


class Slices:
    """The slices of parameters that a group of paths uses in such operators, and their gradients."""

    def __init__(self, net: Supernet, plans: Sequence[Plan], dtype: torch.dtype, statistics: Statistics = "batch"):
        self.net, self.plans, self.dtype, self.statistics = net, plans, dtype, statistics
        self.momentum: float | None = None  # in place of batch norm's own
        self._slots = {(s.node, s.name, s.item): s.size for s in net.space.slots}
        self._state = {
            **dict(net.named_parameters(remove_duplicate=False)),
            **dict(net.named_buffers(remove_duplicate=False)),
        }
        self._leaves: list[dict[str, Tensor]] = [{} for _ in plans]
        self._grads: list[dict[str, Tensor]] = [{} for _ in plans]

    def call(self, node: fx.Node, given: dict[fx.Node, Any], side: int) -> Any:
        """The operator at ``node``; what it takes of the tape is ``given``."""
        target: Any = node.target
        if not isinstance(target, torch._ops.OpOverload):
            return target(*[self._resolve(a, node, "", None, given, side) for a in node.args])
        named = bind(target, node.args, node.kwargs)
        args = {name: self._resolve(a, node, name, None, given, side) for name, a in named.items()}
        kind = target._schema.name
        if kind == "aten::batch_norm":
            args["training"] = self.statistics != "running" or args["running_mean"] is None
            args["momentum"] = args["momentum"] if self.momentum is None else self.momentum
            if self.statistics == "batch":
                args |= {"running_mean": None, "running_var": None, "momentum": 0.0}
        elif "dropout" in kind:
            args["train"] = self.net.training and self.statistics != "running"
        elif "conv" in kind or kind == "aten::linear":
            args |= {k: args[k].to(self.dtype) for k in ("weight", "bias") if isinstance(args.get(k), Tensor)}
        only = {a.name for a in target._schema.arguments if a.kwarg_only}
        kwargs = {k: a for k, a in args.items() if k in only}
        return functional(target)(*[a for k, a in args.items() if k not in only], **kwargs)

    def _resolve(
        self, arg: Any, node: fx.Node, name: str, item: int | None, given: dict[fx.Node, Any], side: int
    ) -> Any:
        size = self._slots.get((node, name, item))
        if size is not None:
            return size.at(self.plans[side].units)
        if isinstance(arg, (list, tuple)):
            return [self._resolve(a, node, name, i, given, side) for i, a in enumerate(arg)]
        if not isinstance(arg, fx.Node):
            return arg
        if arg in given:
            return given[arg]
        graph = self.net.space.graph
        if arg.name in graph.constants:
            return graph.constants[arg.name].to(next(self.net.parameters()).device)
        return self.of(graph.state_of[arg.name], side)

    def of(self, name: str, side: int) -> Tensor:
        """The slice of a parameter or buffer, a leaf."""
        if name not in self._leaves[side]:
            plan, whole = self.plans[side], self._state[name]
            axes = self.net.space.coupling.axes.get(name)
            part = whole.detach()
            part = part if axes is None else sliced(part, axes, plan.units, self.net.total_units, plan.side)
            self._leaves[side][name] = part.detach().requires_grad_(whole.requires_grad)
        return self._leaves[side][name]

    def differentiate(self, y: Tensor, gradient: Tensor, inputs: Sequence[Tensor], side: int) -> list[Tensor | None]:
        """The gradients of ``inputs``; those of slices are added up here."""
        leaves = {name: leaf for name, leaf in self._leaves[side].items() if leaf.requires_grad}
        found = torch.autograd.grad(y, [*inputs, *leaves.values()], gradient, allow_unused=True)
        for name, grad in zip(leaves, found[len(inputs) :], strict=True):
            if grad is not None:
                before = self._grads[side].get(name)
                self._grads[side][name] = grad if before is None else before + grad
        return list(found[: len(inputs)])

    def add_to(self, gradients: dict[str, Tensor]) -> None:
        """Add what was found to its places in the gradients of the whole parameters."""
        for plan, found in zip(self.plans, self._grads, strict=True):
            for name, grad in found.items():
                axes = self.net.space.coupling.axes.get(name)
                for target, source in places(gradients[name], grad, axes, plan, self.net.total_units):
                    target.add_(source)


def run(tape: Tape, layer: Eager) -> None:
    """Under autograd, one side after the other; tensors join the tape as rows."""
    graphs: list[tuple[Any, list[Tensor]]] = []
    for s in range(tape.sides):
        given = {node: _given(tape, node, number, s) for node, number in layer.inputs}
        leaves = [t for t in given.values() if isinstance(t, Tensor) and t.requires_grad]
        with torch.set_grad_enabled(not tape.recalls):
            y = tape.slices.call(layer.node, given, s)
            if isinstance(y, Tensor) and y.is_floating_point():
                y = y.to(tape.x.dtype)
                y = channels_last(y) if y.dim() == 4 else y.contiguous()
        graphs.append((y, leaves))
    tape.graphs[layer.out] = graphs
    found = [y.detach() if isinstance(y, Tensor) else y for y, _ in graphs]
    tape.plain[layer.out] = found
    if isinstance(found[0], Tensor) and found[0].dim() == 4:
        tape.values[layer.out], tape.spaces[layer.out] = Rows.apart(found), size_of(found[0])
    elif isinstance(found[0], Tensor) and found[0].dim() == 2:
        tape.values[layer.out] = Rows.whole(torch.stack(found))
        tape.spaces[layer.out] = (len(found[0]), 1, 1)


def _given(tape: Tape, node: fx.Node, number: int, side: int) -> Any:
    """A value of the tape as an operator of the graph takes it, a leaf where it has a gradient."""
    if number == tape.program.source:
        return tape.x
    if number in tape.plain:
        value = tape.plain[number][side]
    elif len(node.meta["val"].shape) == 4:
        value = tape.values[number].image(side, tape.spaces[number])
    else:
        value = tape.values[number].of(side)
    floats = isinstance(value, Tensor) and value.is_floating_point()
    return value.detach().requires_grad_() if floats else value


def run_back(tape: Tape, layer: Eager) -> None:
    graphs, arrived = tape.graphs.pop(layer.out), tape.grads.pop(layer.out, [])
    others = tape.plain_grads.pop(layer.out, [[] for _ in graphs])
    tape.plain.pop(layer.out)
    tape.values.pop(layer.out, None)
    numbers = [number for _, number in layer.inputs if number != tape.program.source]
    given: dict[int, list[Tensor]] = {}
    for s, (y, leaves) in enumerate(graphs):
        parts = [_shaped(g.repeated(s), y) for g in arrived] + others[s]
        if not parts or not isinstance(y, Tensor) or not y.requires_grad:
            continue
        gradient = torch.stack([part.to(y.dtype) for part in parts]).sum(0)
        floats = [n for n in numbers if n in tape.values or isinstance((tape.plain.get(n) or [0])[0], Tensor)]
        for number, leaf, found in zip(floats, leaves, tape.slices.differentiate(y, gradient, leaves, s), strict=True):
            given.setdefault(number, []).append(torch.zeros_like(leaf) if found is None else found)
    for number, gradients in given.items():
        if number in tape.graphs:
            rows = tape.plain_grads.setdefault(number, [[] for _ in gradients])
            for row, one in zip(rows, gradients, strict=True):
                row.append(one)
        elif gradients[0].dim() == 4:
            tape.give(number, Rows.apart([channels_last(one) for one in gradients]))
        else:
            tape.give(number, Rows.whole(torch.stack(gradients)))


def _shaped(rows: Tensor, y: Tensor) -> Tensor:
    """Rows (M, C) in the shape of an operator's result."""
    return rows if y.dim() == 2 else rows.view(len(y), y.shape[2], y.shape[3], -1).permute(0, 3, 1, 2)


def slope_of(
    loss: Callable[[Tensor], Tensor], logits: Tensor, bias: Tensor | None, goal: Goal, found: Tensor, losses: Tensor
) -> Tensor:
    """As the kernel ``entropy``, for any loss of logits (n, classes): by autograd."""
    sides, _, classes = logits.shape
    values = logits.float() if bias is None else logits.float() + bias[: sides * classes].view(sides, 1, classes)
    with torch.enable_grad():
        leaf = values.detach().requires_grad_()
        each = [loss(side) for side in leaf]
        total = torch.stack([one * share for one, share in zip(each, goal.shares, strict=True)]).sum()
        (slope,) = torch.autograd.grad(total, leaf)
    for slot, one in zip(goal.slots, each, strict=True):
        losses[slot].copy_(one.detach())
    found[: sides * classes] = slope.sum(1).flatten()
    return slope.to(logits.dtype)
