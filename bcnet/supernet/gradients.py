"""Gradients of a path without autograd's slicing: leaves are views, their gradients are added in place.

Autograd would fill a zero tensor of the whole parameter for every slice of every path. Instead a path runs on
detached views, and the gradient of each is added to its place in the parameter's own gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from operator import itemgetter
from typing import NamedTuple

import torch
from torch import Tensor, nn

from bcnet.space.axis import Axis
from bcnet.supernet.supernet import Cut, Selection, Supernet

MOST = 2**14
"""How many slices are remembered."""


class _Slice(NamedTuple):
    """A slice of a parameter and of its gradient (None where it is not a single block), as long as these stay where
    they are."""

    view: Tensor | None
    pointer: int
    target: Tensor | None
    whole: Tensor | None


class PathGradients:
    """Runs paths of ``net`` and adds up their gradients in ``parameter.grad``.

    Slices are remembered: to make them anew for every path took 3 % of a step of a tiny network on a CPU.
    """

    def __init__(self, net: Supernet):
        self.net = net
        self.parameters: list[nn.Parameter | None] = [
            tensor if isinstance(tensor, nn.Parameter) and tensor.requires_grad else None for tensor in net.state()
        ]
        self._axes = net.axes()
        self._slices: dict[tuple[object, ...], _Slice] = {}
        self._units_of = [itemgetter(*variables) if variables else itemgetter(slice(0)) for *_, variables in net.cuts]
        self._latest: tuple[Selection | None, list[_Slice | None]] = (None, [])

    def zero(self) -> None:
        """Gradients to zero, allocated once."""
        live = [p for p in self.parameters if p is not None]
        for p in live:
            if p.grad is None:
                p.grad = torch.zeros_like(p, memory_format=torch.preserve_format)
        torch._foreach_zero_([p.grad for p in live if p.grad is not None])

    @torch.no_grad()
    def leaves(self, selection: Selection) -> list[Tensor]:
        """The path's views, those of parameters as leaves that take a gradient."""
        found = self.net.state()
        slices: list[_Slice | None] = [None] * len(found)
        for cut, units in zip(self.net.cuts, self._units_of, strict=True):
            number, axes, _ = cut
            known = slices[number] = self._slice(selection, cut, units(selection.units), found[number])
            view = self.net.sliced(found[number], axes, selection) if known.view is None else known.view
            found[number] = view if self.parameters[number] is None else view.requires_grad_()
        self._latest = selection, slices
        return found

    def _slice(self, selection: Selection, cut: Cut, units: object, tensor: Tensor) -> _Slice:
        key, parameter = (cut[0], selection.side, units), self.parameters[cut[0]]
        whole, pointer = None if parameter is None else parameter.grad, tensor.data_ptr()
        known = self._slices.get(key)
        if known is None or known.whole is not whole or known.pointer != pointer:
            block = self.net.block(selection, cut)
            view = None if block is None else tensor.detach()[block]
            target = None if block is None or whole is None else whole[block]
            if len(self._slices) >= MOST:
                self._slices.clear()
            known = self._slices[key] = _Slice(view, pointer, target, whole)
        return known

    @torch.no_grad()
    def add(self, selection: Selection, gradients: Sequence[Tensor | None]) -> None:
        """Add the gradients of a path's leaves (None where there is none) to their places."""
        if self._latest[0] is not selection:
            self.leaves(selection)
        targets: list[Tensor] = []
        sources: list[Tensor] = []
        for number, (parameter, gradient, known) in enumerate(
            zip(self.parameters, gradients, self._latest[1], strict=True)
        ):
            whole = None if parameter is None else parameter.grad
            if whole is None or gradient is None:
                continue
            own = whole if known is None else known.target if known.whole is whole else None
            if own is not None:
                targets.append(own)
                sources.append(gradient)
                continue
            for target, source in places(whole, gradient, self._axes[number], selection, self.net.total_units):
                targets.append(target)
                sources.append(source)
        torch._foreach_add_(targets, sources)

    def backward(self, loss: Tensor, runs: Sequence[tuple[Selection, Sequence[Tensor]]]) -> None:
        """Differentiate ``loss`` with respect to the leaves of all ``runs`` and add the gradients."""
        wanted = {id(leaf): leaf for _, leaves in runs for leaf in leaves if leaf.requires_grad}
        found = torch.autograd.grad(loss, list(wanted.values()), allow_unused=True)
        left = dict(zip(wanted, found, strict=True))  # that of a leaf in several runs is of all of them: added once
        for selection, leaves in runs:
            self.add(selection, [left.pop(id(leaf), None) for leaf in leaves])


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
