"""Engines: what a training step asks of a supernet, and two ways to do it.

``engine.step(x, y, paths)`` gives the loss of each path on one batch and adds the gradients of their weighted
sum to the parameters' ``.grad``. The plain engine is autograd on the supernet itself and runs every network.
The fused one is a hand-written way forwards and backwards in bfloat16 for CUDA; it computes the same function
to bfloat16 tolerance, and :func:`get_engine` says why where it cannot run.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import Protocol

import torch
import torch.nn.functional as F
from numpy.typing import ArrayLike
from torch import Tensor, nn

from bcnet.errors import BcnetError
from bcnet.supernet.fused.pack import Packing
from bcnet.supernet.fused.program import Program, Unsupported, compile_program
from bcnet.supernet.fused.tape import Tape
from bcnet.supernet.principle import Side
from bcnet.supernet.supernet import Supernet

Path = tuple[ArrayLike, Side]
ENGINES = ("auto", "plain", "fused")


class Engine(Protocol):
    """``name`` is plain or fused; ``reason`` says why an automatic choice is not the fused one."""

    name: str
    reason: str

    def step(
        self, x: Tensor, y: Tensor, paths: Sequence[Path], weights: Sequence[float] | None = None, smoothing: float = 0
    ) -> Tensor:
        """Losses (paths,) of images x (n, C, h, w) and labels y (n,); adds gradients of their sum by ``weights``
        (one for each path, the mean by default)."""


def get_engine(net: Supernet, kind: str = "auto", autocast: bool | None = None) -> Engine:
    """The engine ``kind`` of a supernet; ``auto`` is fused where it can run, and says why where it cannot.

    ``autocast`` has the plain engine compute in bfloat16, as the fused one always does; by default on CUDA only.
    """
    if kind not in ENGINES:
        raise BcnetError(f"engine is {kind!r}, but it must be auto, plain or fused")
    reason = "" if kind == "plain" else why_not_fused(net)
    if reason and kind == "fused":
        raise BcnetError(f"the fused engine cannot run this network: {reason}; use the plain engine")
    if kind == "plain" or reason:
        on_cuda = next(net.parameters()).device.type == "cuda"
        return PlainEngine(net, on_cuda if autocast is None else autocast, reason)
    return FusedEngine(net)


def why_not_fused(net: Supernet) -> str:
    """Half a sentence, or nothing."""
    device = next(net.parameters()).device
    if device.type != "cuda":
        return f"it is on {device.type}, not on cuda"
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    if any(p.dtype != torch.float32 for p in net.parameters()):
        return "its parameters are not float32"
    try:
        program = compile_program(net.space)
    except Unsupported as unsupported:
        return str(unsupported)
    used = {*program.weights, *program.affines}
    frozen = [n for n, p in net.named_parameters() if n in used and not p.requires_grad]
    return f"{frozen[0]} is frozen" if frozen else ""


class PlainEngine:
    """Autograd through the supernet, one path at a time, so that only one path's activations are held."""

    name = "plain"

    def __init__(self, net: Supernet, autocast: bool = False, reason: str = ""):
        self.net, self.autocast, self.reason = net, autocast, reason

    def step(
        self, x: Tensor, y: Tensor, paths: Sequence[Path], weights: Sequence[float] | None = None, smoothing: float = 0
    ) -> Tensor:
        losses = []
        for (widths, side), weight in zip(paths, _weights(weights, len(paths)), strict=True):
            with torch.autocast(x.device.type, torch.bfloat16, enabled=self.autocast):
                loss = F.cross_entropy(self.net(x, widths, side), y, label_smoothing=smoothing)
            (loss * weight).backward()
            losses.append(loss.detach())
        return torch.stack(losses)


class FusedEngine:
    """The supernet's graph as a program of fused kernels, several sides of equal widths at a time.

    ``kernels`` is the module of Triton kernels, or ``reference`` for tests on any device and in any ``dtype``.
    ``together`` False runs every path alone. Gradients are kept in one buffer, of which each ``.grad`` is a view.
    """

    name = "fused"
    reason = ""

    def __init__(
        self,
        net: Supernet,
        kernels: ModuleType | None = None,
        dtype: torch.dtype = torch.bfloat16,
        together: bool = True,
    ):
        self.net, self.dtype, self.together = net, dtype, together
        self.kernels = _triton_kernels() if kernels is None else kernels
        self.program: Program = compile_program(net.space)
        self._places: tuple[int, ...] = ()
        self._refresh()

    def step(
        self, x: Tensor, y: Tensor, paths: Sequence[Path], weights: Sequence[float] | None = None, smoothing: float = 0
    ) -> Tensor:
        self._refresh()
        image = x.to(self.dtype, memory_format=torch.channels_last)
        target: Tensor | None = None
        shares = _weights(weights, len(paths))
        losses: list[Tensor] = [x.new_empty(0)] * len(paths)
        with torch.no_grad():
            for members in self._groups(paths):
                tape = self._tape([paths[i] for i in members])
                logits = tape.forward(image)
                if target is None:
                    target = soft_labels(y, logits.shape[-1], smoothing)
                group, dlogits = cross_entropy(logits, target, [shares[i] for i in members])
                tape.backward(dlogits)
                self._collect(tape)
                for i, loss in zip(members, group.unbind(0), strict=True):
                    losses[i] = loss
        return torch.stack(losses)

    def _groups(self, paths: Sequence[Path]) -> Iterator[list[int]]:
        """Numbers of paths that run together: those of equal widths, at most two."""
        waiting: dict[tuple[int, ...], int] = {}
        for i, (widths, _) in enumerate(paths):
            key = tuple(int(w) for w in widths)  # type: ignore[union-attr]
            if not self.together:
                yield [i]
            elif key in waiting:
                yield [waiting.pop(key), i]
            else:
                waiting[key] = i
        for i in waiting.values():
            yield [i]

    def _tape(self, paths: Sequence[Path]) -> Tape:
        """A tape on the packed slices of some paths of equal widths."""
        plans = [self.net.plan(widths, side) for widths, side in paths]
        sides = [plan.side for plan in plans]
        self._at = [packing.places(plans[0].units, sides) for packing in self._packings]
        packed = []
        for names, tensors, places, dtype in zip(
            self._names, self._tensors, self._at, (self.dtype, torch.float32), strict=True
        ):
            flat = torch.empty(int(places.offset[-1]), dtype=dtype, device=tensors[0].device)
            segments = [s for side in range(len(sides)) for s in places.segments(tensors, side)]
            self.kernels.pack(segments, flat)
            packed.append(dict(zip(names, places.views(flat, len(sides)), strict=True)))
        affines = {name: t.view(len(sides), -1) for name, t in packed[1].items()}
        return Tape(self.program, self.kernels, packed[0], affines)

    def _collect(self, tape: Tape) -> None:
        """Add what a tape found to the gradients, one side after the other: their channels may overlap."""
        for names, places, grads in zip(self._names, self._at, self._grads, strict=True):
            for side in range(tape.sides):
                segments = places.segments(grads, side)
                by_dtype: dict[torch.dtype, list[int]] = {}
                sources = [tape.found[name][side] for name in names]
                for i, source in enumerate(sources):
                    by_dtype.setdefault(source.dtype, []).append(i)
                for chosen in by_dtype.values():
                    self.kernels.unpack([segments[i] for i in chosen], [sources[i] for i in chosen])

    def _refresh(self) -> None:
        """Follow the parameters where they moved, and give them gradients where they have none."""
        parameters = dict(self.net.named_parameters())
        self._names = [self.program.weights, self.program.affines]
        used = [parameters[name] for names in self._names for name in names]
        places = tuple(p.data_ptr() for p in used)
        if places != self._places:
            self._bind(used)
            self._places = places
        if any(p.grad is not grad for p, grad in zip(used, self._views, strict=True)):
            self._attach(used)

    def _bind(self, used: list[nn.Parameter]) -> None:
        count = len(self.program.weights)
        self._tensors = [[p.detach() for p in used[:count]], [p.detach() for p in used[count:]]]
        axes = self.net.space.coupling.axes
        total = self.net.total_units
        self._packings = [
            Packing(tensors, [axes.get(name) for name in names], total)
            for names, tensors in zip(self._names, self._tensors, strict=True)
        ]
        self._flat = torch.zeros(sum(p.numel() for p in used), device=used[0].device)
        pieces = self._flat.split([p.numel() for p in used])
        self._views = [piece.as_strided(p.shape, p.stride()) for p, piece in zip(used, pieces, strict=True)]
        self._grads = [self._views[:count], self._views[count:]]

    def _attach(self, used: list[nn.Parameter]) -> None:
        """Make the views of the one buffer the parameters' gradients, with the values those have."""
        self._flat.zero_()
        for p, view in zip(used, self._views, strict=True):
            if p.grad is not None:
                view.copy_(p.grad)
            p.grad = view


def soft_labels(y: Tensor, classes: int, smoothing: float) -> Tensor:
    """(n, classes): 1 − smoothing at the label, and smoothing spread over all classes."""
    labels = F.one_hot(y, classes).float()
    return labels if not smoothing else labels.mul_(1 - smoothing).add_(smoothing / classes)


def cross_entropy(logits: Tensor, target: Tensor, weights: Sequence[float]) -> tuple[Tensor, Tensor]:
    """Mean losses (S,) of logits (S, n, classes), and the gradient of their weighted sum."""
    log = torch.log_softmax(logits, -1)
    loss = (log * target).sum((1, 2)).div_(-len(target))
    slope = log.exp_().sub_(target)
    if len(set(weights)) == 1:
        return loss, slope.mul_(weights[0] / len(target))
    share = torch.tensor(weights, device=logits.device).view(-1, 1, 1)
    return loss, slope.mul_(share / len(target))


def _weights(weights: Sequence[float] | None, count: int) -> Sequence[float]:
    if weights is None:
        return [1 / count] * count
    if len(weights) != count:
        raise BcnetError(f"there are {count} paths but {len(weights)} weights")
    return weights


def _triton_kernels() -> ModuleType:
    from bcnet.supernet.fused import kernels

    return kernels


__all__ = ["Engine", "FusedEngine", "PlainEngine", "get_engine", "why_not_fused"]
