"""The answers of a teacher for a batch, as part of the step that learns from them.

A teacher does not change while it teaches. So its parameters are packed once and its batch norms are known before any
batch; what is left are the kernels of a forward pass, each of which normalises what it reads.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from bcnet.accel.fused_step.ahead import compile_ahead
from bcnet.accel.fused_step.engine import FusedEngine
from bcnet.accel.fused_step.program import Norm, Unsupported
from bcnet.accel.fused_step.tape import Tape
from bcnet.errors import BcnetError, first_line
from bcnet.space.network import NetworkSpace, trace
from bcnet.space.rewrite import put
from bcnet.supernet.supernet import Supernet

CHECKED = 32
"""Images of the first batch whose answers are compared."""
SLACK = 3.0, 0.02
"""How far they may be from float32: this many times as far as autocast, and a little more."""

_spaces: WeakKeyDictionary[nn.Module, NetworkSpace] = WeakKeyDictionary()
"""Of teachers: one teaches many networks, and tracing it takes longer than packing its weights."""


class Teacher:
    """``ask(x)`` gives the output of ``network`` for x in evaluation mode; call ``prepare(x)`` before that is recorded
    as part of a CUDA graph.

    If the fused kernels cannot run it, the network itself is run, with a warning.
    """

    def __init__(self, network: nn.Module, example: Tensor, kernels: ModuleType | None, dtype: torch.dtype):
        self.answer: Callable[[Tensor], Any]
        try:
            self.answer = FusedAnswers(network, example, kernels, dtype)
        except (Unsupported, BcnetError, RuntimeError) as error:
            warnings.warn(f"the teacher answers without fused kernels: {first_line(error)}", stacklevel=2)
            self.answer = partial(_as_it_is, network)

    def prepare(self, x: Tensor) -> None:
        if isinstance(self.answer, FusedAnswers):
            self.answer.tape(x)

    @torch.no_grad()
    def ask(self, x: Tensor) -> Any:
        return self.answer(x)


def _as_it_is(network: nn.Module, x: Tensor) -> Any:
    with torch.autocast(x.device.type, torch.bfloat16, enabled=x.is_cuda):
        return network(x)


class FusedAnswers:
    """The output of ``network``, as it is now, for x (n, C, h, w) in evaluation mode: (n, classes) in float32.

    ``kernels`` and ``dtype`` are those of :class:`FusedEngine`. :class:`Unsupported` is raised, with the reason,
    if that is not possible.
    """

    def __init__(self, network: nn.Module, example: Tensor, kernels: ModuleType | None, dtype: torch.dtype):
        if any(p.dtype != torch.float32 for p in network.parameters()):
            raise Unsupported("its parameters are not float32")
        twin = copy.deepcopy(network).eval().requires_grad_()  # its gradients are the engine's
        known = _spaces.get(network)
        if known is None or known.example[0].shape[1:] != example.shape[1:]:
            known = _spaces[network] = _traced(twin, example)
        net = as_supernet(twin, example, known).eval()
        self._engine = FusedEngine(net, kernels, dtype)
        if not any(isinstance(layer, Norm) for layer in self._engine.program.layers):
            raise Unsupported("no batch norm of it has a fused kernel")
        self._tapes: dict[torch.Size, Tape] = {}
        compile_ahead(self._engine, example, [net.space.max], answers="running")
        self._check(twin, example[:CHECKED])

    def tape(self, x: Tensor) -> Tape:
        """The tape for batches of this shape; each shape keeps its own, which a recorded step reads again."""
        if x.shape not in self._tapes:
            net = self._engine.net
            self._tapes[x.shape] = self._engine.tape(x.device, net.select(net.space.max, "left"), "running")
        return self._tapes[x.shape]

    @torch.no_grad()
    def __call__(self, x: Tensor) -> Tensor:
        return self.tape(x).answers(x)[0]

    @torch.no_grad()
    def _check(self, network: nn.Module, x: Tensor) -> None:
        exact = network(x.float())
        if not isinstance(exact, Tensor) or exact.dim() != 2:
            raise Unsupported("its output is not logits")
        with torch.autocast(x.device.type, torch.bfloat16):
            half = network(x).float()
        if not close_enough(self(x), half, exact):
            raise Unsupported("its answers by fused kernels are not its own")


def close_enough(fused: Tensor, half: Tensor, exact: Tensor) -> bool:
    """Whether answers are about as close to the exact ones as those of autocast, ``half``, are."""
    size = exact.norm().clamp_min(1e-6)
    times, more = SLACK
    return bool((fused - exact).norm() / size <= times * (half - exact).norm() / size + more)


def as_supernet(network: nn.Module, example: Tensor, space: NetworkSpace | None = None) -> Supernet:
    """The network's own parameters and buffers as a supernet that has no other widths; ``space`` where it is known."""
    net = Supernet(_traced(network, example) if space is None else space, "ua").to(example.device).train()
    own, held = (
        {**dict(n.named_parameters(remove_duplicate=False)), **dict(n.named_buffers(remove_duplicate=False))}
        for n in (network, net)
    )
    if any(name not in own or own[name].shape != tensor.shape for name, tensor in held.items()):
        raise Unsupported("its parameters are not those of its traced graph")
    for name in held:
        put(net, name, own[name])
    return net


def _traced(network: nn.Module, example: Tensor) -> NetworkSpace:
    return trace(copy.deepcopy(network).cpu(), example[:2].detach().float().cpu(), check=False)
