"""The fused engine: a supernet's step forwards and backwards by hand, in bfloat16, for CUDA.

``engine.step(x, y, paths)`` gives the loss of each path on one batch and adds the gradients of their weighted
sum to the parameters' ``.grad``: the function that autograd computes, to bfloat16 tolerance.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from types import ModuleType

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from bcnet.accel.fused_step.ahead import compile_ahead
from bcnet.accel.fused_step.eager import Slices, Statistics
from bcnet.accel.fused_step.program import Program, compile_program
from bcnet.accel.fused_step.tape import Tape
from bcnet.accel.kernels.pack import ALIGN, Packed, Packing, Parameter, Places
from bcnet.accel.kernels.values import Goal
from bcnet.errors import BcnetError
from bcnet.space.widths import Side
from bcnet.supernet.supernet import Selection, Supernet
from bcnet.utils.modes import evaluation_mode

Channels = dict[str, tuple[int, int]]


class FusedEngine:
    """The supernet's graph as a program of fused kernels, several sides of equal widths at a time.

    ``kernels`` is the module of Triton kernels, or for tests one of the same functions in plain torch, which run on any
    device and in any ``dtype``.
    ``together`` False runs every path alone. With ``track`` the running statistics of batch norm follow the batches, as
    in the training of a plain network. Channels are rounded up to a ``multiple`` where every operator has a kernel of
    its own, which nobody sees but the clock. Gradients are kept in one buffer, of which each ``.grad`` is a view.
    """

    def __init__(
        self,
        net: Supernet,
        kernels: ModuleType | None = None,
        dtype: torch.dtype = torch.bfloat16,
        together: bool = True,
        track: bool = False,
        multiple: int = 8,
    ):
        self.net, self.dtype, self.together = net, dtype, together
        self.ready = False  # whether its kernels are compiled
        self.statistics: Statistics = "tracked" if track else "batch"
        self.kernels = _triton_kernels() if kernels is None else kernels
        self.program: Program = compile_program(net.space)
        self._multiple = 1 if self.program.eager else multiple
        self._half = [name for name in self.program.weights if name not in self.program.depthwise]
        self._full = [*self.program.depthwise, *self.program.affines]
        self._names = [*self._half, *self._full]
        parameters = dict(net.named_parameters())
        self._all = [*self._names, *(n for n, p in parameters.items() if n not in {*self._names} and p.requires_grad)]
        self._used = [parameters[name] for name in self._all]
        self._addresses = np.empty(0, dtype=np.int64)
        self.refresh()

    def on(self, net: Supernet) -> FusedEngine:
        """The same engine for another supernet."""
        tracks = self.statistics == "tracked"
        return FusedEngine(net, self.kernels, self.dtype, self.together, tracks, self._multiple)

    def zero(self) -> None:
        """Set all gradients to zero, in one launch."""
        self.refresh()
        self._flat.zero_()

    @torch.no_grad()
    def step(
        self,
        x: Tensor,
        y: Tensor,
        paths: Sequence[tuple[ArrayLike, Side]],
        weights: Sequence[float] | None = None,
        smoothing: float = 0,
        teachers: Sequence[int | None] | None = None,
        loss: Callable[[Tensor, Tensor], Tensor] | None = None,
    ) -> Tensor:
        """Losses (p,) of images x (n, C, h, w) and labels y (n,); adds the gradients of their sum by ``weights`` (p,),
        the mean by default. ``teachers`` are the numbers of earlier paths that paths learn from (None: labels).
        ``loss`` of logits (n, classes) and y takes the place of cross entropy."""
        if not self.ready:
            compile_ahead(self, x)
        self.refresh()
        image = x.to(self.dtype, memory_format=torch.channels_last)
        shares = _weights(weights, len(paths))
        members = self._groups(paths) if teachers is None else [[i] for i in range(len(paths))]
        selections = [[self.net.select(*paths[i]) for i in group] for group in members]
        groups = [self._places(some) for some in selections]
        grads = dict(zip(self._all, self._views, strict=True))
        packed, sizes = self._packed(groups, x.device)
        losses, rooms = self._zeros(sizes, groups, len(paths), x.device)
        found, taught = [], dict[int | None, Tensor]()
        for i, (group, room) in enumerate(zip(members, rooms, strict=True)):
            slices = Slices(self.net, selections[i], self.dtype, self.statistics)
            tape = Tape(self.program, self.kernels, self._given(packed, i), sizes[i], slices, room)
            logits = tape.forward(image)
            teacher = None if teachers is None else teachers[group[0]]
            if teachers is not None and group[0] in teachers:
                taught[group[0]] = tape.scores(logits)[0].softmax(1)
            own = None if loss is None else partial(_with_labels, loss, y)
            goal = Goal(group, [shares[j] for j in group], smoothing, taught.get(teacher), own)
            tape.backward(logits, y, goal, losses)
            slices.add_to(grads)
            if self.statistics == "tracked":
                tape.track()
            found.append([tape.found[name] for name in self._names])
        self.kernels.unpack(groups, found, self._views[: len(self._names)])
        return losses

    @torch.no_grad()
    def logits(self, x: Tensor, widths: ArrayLike, statistics: Statistics = "running") -> Tensor:
        """The logits of a left path for images x (n, C, h, w): (n, classes) in float32."""
        return self.tape(x.device, self.net.select(widths, "left"), statistics).answers(x)[0]

    @torch.no_grad()
    def recalibrate(self, batches: Iterable[Tensor], widths: ArrayLike) -> None:
        """Set the running statistics of a left path to the means of those of some batches, without dropout."""
        with evaluation_mode(self.net):
            for number, x in enumerate(batches, 1):
                tape = self.tape(x.device, self.net.select(widths, "left"), "tracked")
                tape.slices.momentum = 1 / number
                tape.forward(x.to(self.dtype, memory_format=torch.channels_last), keep=False)
                tape.track()

    def tape(self, device: torch.device, selection: Selection, statistics: Statistics) -> Tape:
        """A tape for the forward pass of one path; with running statistics it serves all batches of one shape."""
        self.refresh()
        groups = [self._places([selection])]
        packed, sizes = self._packed(groups, device)
        _, rooms = self._zeros(sizes, groups, 1, device)
        slices = Slices(self.net, [selection], self.dtype, statistics)
        return Tape(self.program, self.kernels, self._given(packed, 0), sizes[0], slices, rooms[0])

    def _places(self, selections: Sequence[Selection]) -> Places:
        return self._packing.places(selections[0].units, [selection.side for selection in selections], self._multiple)

    def _packed(self, groups: Sequence[Places], device: torch.device) -> tuple[Packed, list[Channels]]:
        """The parameters of all groups, and their channels."""
        packed = Packed(groups, self.dtype, device)
        self.kernels.pack(groups, self._tensors[: len(self._names)], packed)
        pairs = [zip(group.outer.tolist(), group.inner.tolist(), strict=True) for group in groups]
        return packed, [dict(zip(self._names, some, strict=True)) for some in pairs]

    def _given(self, packed: Packed, group: int) -> dict[str, Tensor]:
        half, full = packed.of(group)
        return dict(zip(self._names, (*half, *full), strict=True))

    def _groups(self, paths: Sequence[tuple[ArrayLike, Side]]) -> list[list[int]]:
        """Numbers of paths that run together: those of equal widths, at most two."""
        waiting: dict[tuple[int, ...], list[int]] = {}
        found = []
        for i, (widths, _) in enumerate(paths):
            key = tuple(np.asarray(widths).tolist())
            if self.together and key in waiting:
                waiting.pop(key).append(i)
            else:
                waiting[key] = [i]
                found.append(waiting[key])
        return found

    def _zeros(
        self, sizes: Sequence[Channels], groups: Sequence[Places], paths: int, device: torch.device
    ) -> tuple[Tensor, list[Sequence[Tensor]]]:
        """Losses (paths,) and the room of all tapes, zeroed by one launch."""
        counts = [Tape.room(self.program, s, g.sides) for s, g in zip(sizes, groups, strict=True)]
        losses = -(-paths // ALIGN) * ALIGN
        flat = torch.zeros(losses + sum(map(sum, counts)), dtype=torch.float32, device=device)
        first, *rest = flat.split([losses, *(n for group in counts for n in group)])
        return first[:paths], [rest[i * len(counts[0]) : (i + 1) * len(counts[0])] for i in range(len(groups))]

    def refresh(self) -> None:
        """Follow the parameters where they moved, and give them gradients where they have none."""
        addresses = np.array([p.data_ptr() for p in self._used], dtype=np.int64)
        if not np.array_equal(addresses, self._addresses):
            self._bind()
            self._addresses = addresses
        if any(p.grad is not grad for p, grad in zip(self._used, self._views, strict=True)):
            self._attach()

    def _bind(self) -> None:
        axes = self.net.space.coupling.axes
        self._tensors = [p.detach() for p in self._used]
        full = len(self._half)
        parameters = [
            Parameter(tensor, axes.get(name), i >= full, name in self.program.depthwise)
            for i, (name, tensor) in enumerate(zip(self._names, self._tensors, strict=False))
        ]
        self._packing = Packing(parameters, self.net.total_units)
        counts = [p.numel() for p in self._used]
        self._flat = torch.zeros(sum(counts), device=self._used[0].device)
        pieces = self._flat.split(counts)
        self._views = [piece.as_strided(p.shape, p.stride()) for p, piece in zip(self._used, pieces, strict=True)]

    def _attach(self) -> None:
        """Make the views of the one buffer the parameters' gradients, with the values those have."""
        kept = [None if p.grad is None else p.grad.clone() for p in self._used]
        self._flat.zero_()
        for p, view, grad in zip(self._used, self._views, kept, strict=True):
            if grad is not None:
                view.copy_(grad)
            p.grad = view


def _with_labels(loss: Callable[[Tensor, Tensor], Tensor], y: Tensor, logits: Tensor) -> Tensor:
    return loss(logits, y)


def _weights(weights: Sequence[float] | None, count: int) -> Sequence[float]:
    if weights is None:
        return [1 / count] * count
    if len(weights) != count:
        raise BcnetError(f"there are {count} paths but {len(weights)} weights")
    return weights


def _triton_kernels() -> ModuleType:
    from bcnet.accel.kernels import fused as kernels

    return kernels
