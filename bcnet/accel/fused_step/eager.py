"""Operators that have no kernel of their own run as they are, under autograd, between those that have.

Each takes its inputs from the tape as leaves, and slices of the parameters themselves, so that whatever tracing
understands can stand in a program: biases, poolings, gates, concatenations, layer norms.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, fx

from bcnet.accel.enumeration.prefix_tree import functional
from bcnet.accel.kernels.values import Goal
from bcnet.space.coupling import bind
from bcnet.space.resize import sliced
from bcnet.supernet.gradients import places
from bcnet.supernet.supernet import Selection, Supernet

Statistics = Literal["batch", "tracked", "running"]
"""What batch norm goes by: the batch, as in a supernet; the batch, which its running statistics follow; or these."""


class Slices:
    """The slices of parameters that a group of paths uses in such operators, and their gradients."""

    def __init__(
        self, net: Supernet, selections: Sequence[Selection], dtype: torch.dtype, statistics: Statistics = "batch"
    ):
        self.net, self.selections, self.dtype, self.statistics = net, selections, dtype, statistics
        self.momentum: float | None = None  # in place of batch norm's own
        self._slots = {(s.node, s.name, s.item): s.size for s in net.space.slots}
        self._state = {
            **dict(net.named_parameters(remove_duplicate=False)),
            **dict(net.named_buffers(remove_duplicate=False)),
        }
        self._leaves: list[dict[str, Tensor]] = [{} for _ in selections]
        self._grads: list[dict[str, Tensor]] = [{} for _ in selections]

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
            return size.at(self.selections[side].units)
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
            selection, whole = self.selections[side], self._state[name]
            axes = self.net.space.coupling.axes.get(name)
            part = whole.detach()
            part = part if axes is None else sliced(part, axes, selection.units, self.net.total_units, selection.side)
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
        for selection, found in zip(self.selections, self._grads, strict=True):
            for name, grad in found.items():
                axes = self.net.space.coupling.axes.get(name)
                for target, source in places(gradients[name], grad, axes, selection, self.net.total_units):
                    target.add_(source)


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
