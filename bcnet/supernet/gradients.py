"""Gradients of a path without autograd's slicing: leaves are views, their gradients are added in place.

Autograd would fill a zero tensor of the whole parameter for every slice of every path. Instead a path runs on
detached views, and the gradient of each is added to its place in the parameter's own gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import torch
from torch import Tensor, nn

from bcnet.space.axis import Axis
from bcnet.supernet.supernet import Selection, Supernet


class PathGradients:
    """Runs paths of ``net`` and adds up their gradients in ``parameter.grad``."""

    def __init__(self, net: Supernet):
        self.net = net
        self.parameters: list[nn.Parameter | None] = [
            tensor if isinstance(tensor, nn.Parameter) and tensor.requires_grad else None for tensor in net.state()
        ]
        self._axes = net.axes()

    def zero(self) -> None:
        """Gradients to zero, allocated once."""
        live = [p for p in self.parameters if p is not None]
        for p in live:
            if p.grad is None:
                p.grad = torch.zeros_like(p, memory_format=torch.preserve_format)
        torch._foreach_zero_([p.grad for p in live if p.grad is not None])

    def leaves(self, selection: Selection) -> list[Tensor]:
        """The path's views, those of parameters as leaves that take a gradient."""
        with torch.no_grad():
            views = self.net.views(selection)
        return [view if p is None else view.requires_grad_() for view, p in zip(views, self.parameters, strict=True)]

    def add(self, selection: Selection, gradients: Sequence[Tensor | None]) -> None:
        """Add the gradients of a path's leaves (None where there is none) to their places."""
        targets: list[Tensor] = []
        sources: list[Tensor] = []
        blocks = dict(zip(self.net.varying, self.net.blocks(selection), strict=True))
        for number, (parameter, gradient) in enumerate(zip(self.parameters, gradients, strict=True)):
            whole = None if parameter is None else parameter.grad
            if whole is None or gradient is None:
                continue
            block = blocks.get(number, ())
            if block is not None:
                targets.append(whole[block])
                sources.append(gradient)
                continue
            for target, source in places(whole, gradient, self._axes[number], selection, self.net.total_units):
                targets.append(target)
                sources.append(source)
        torch._foreach_add_(targets, sources)

    def backward(self, loss: Tensor, runs: Sequence[tuple[Selection, Sequence[Tensor]]]) -> None:
        """Differentiate ``loss`` with respect to the leaves of all ``runs`` and add the gradients."""
        wanted = [[leaf for leaf in leaves if leaf.requires_grad] for _, leaves in runs]
        found = iter(torch.autograd.grad(loss, [leaf for row in wanted for leaf in row], allow_unused=True))
        with torch.no_grad():
            for selection, leaves in runs:
                self.add(selection, [next(found) if leaf.requires_grad else None for leaf in leaves])


def places(
    whole: Tensor, part: Tensor, axes: tuple[Axis, ...] | None, selection: Selection, total: Sequence[int]
) -> list[tuple[Tensor, Tensor]]:
    """Where the pieces of a sliced gradient belong in the whole one: pairs of views."""
    if axes is None:
        return [(whole, part)]
    pieces = [
        axis.pieces(selection.units, total, selection.side) if axis.variables else ((0, whole.shape[dim]),)
        for dim, axis in enumerate(axes)
    ]
    if all(len(p) == 1 for p in pieces):
        for dim, ((start, length),) in enumerate(pieces):
            whole = whole.narrow(dim, start, length)
        return [(whole, part)]
    found = []
    for combination in product(*(_with_offsets(p) for p in pieces)):
        target, source = whole, part
        for dim, (start, length, offset) in enumerate(combination):
            target, source = target.narrow(dim, start, length), source.narrow(dim, offset, length)
        found.append((target, source))
    return found


def _with_offsets(pieces: Sequence[tuple[int, int]]) -> list[tuple[int, int, int]]:
    offset, found = 0, []
    for start, length in pieces:
        found.append((start, length, offset))
        offset += length
    return found
