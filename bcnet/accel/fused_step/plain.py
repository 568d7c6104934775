"""The fused step for plain networks: a network is the widest path of its own supernet.

The engine works on the network's own parameters and gradients, and its running statistics follow the batches, so a
training loop sees nothing of it but its speed. On a GPU the step is recorded as a CUDA graph.
"""

from __future__ import annotations

import copy
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from bcnet.accel.fused_step.ahead import compile_ahead
from bcnet.accel.fused_step.choose import why_not_plain
from bcnet.accel.fused_step.engine import FusedEngine
from bcnet.accel.fused_step.program import Norm, Unsupported
from bcnet.accel.fused_step.teacher import CHECKED, Teacher, as_supernet, close_enough
from bcnet.errors import BcnetError, first_line
from bcnet.training.cuda_graph import CudaGraphStep
from bcnet.training.retraining import Loss


class PlainStep:
    """``step(x, y)`` sets the gradients of ``network`` to those of ``loss(output, y, taught)`` and gives the loss,
    (1,); ``taught`` is the output of ``teacher`` for x, None without one.

    ``kernels`` and ``dtype`` are those of :class:`FusedEngine`. :class:`Unsupported` says why a network cannot run.
    """

    def __init__(
        self,
        network: nn.Module,
        example: Tensor,
        loss: Loss,
        teacher: nn.Module | None = None,
        kernels: ModuleType | None = None,
        dtype: torch.dtype = torch.bfloat16,
    ):
        self._loss = loss
        net = as_supernet(network, example)
        self._widths = net.space.max
        self._counters = [b for name, b in network.named_buffers() if name.endswith("num_batches_tracked")]
        self.engine = FusedEngine(net, kernels, dtype, track=True)
        if not any(isinstance(layer, Norm) for layer in self.engine.program.layers):
            raise Unsupported("no batch norm of it has a fused kernel")
        compile_ahead(self.engine, example, [self._widths])
        self._check(network, example[:CHECKED])
        self._teacher = None if teacher is None else Teacher(teacher, example, kernels, dtype)
        self._recorded = CudaGraphStep(self._learn) if example.is_cuda else self._learn

    def __call__(self, x: Tensor, y: Tensor) -> Tensor:
        self.engine.refresh()  # a replayed step writes into the buffer that gradients must be views of
        if self._teacher is not None:
            self._teacher.prepare(x)
        return self._recorded(x, y)

    def _learn(self, x: Tensor, y: Tensor) -> Tensor:
        self.engine.zero()
        if self._counters:
            torch._foreach_add_(self._counters, 1)
        taught = None if self._teacher is None else self._teacher.ask(x)
        return self.engine.step(x, y, [(self._widths, "left")], loss=partial(self._learnt, taught))

    def _learnt(self, taught: Any, logits: Tensor, y: Tensor) -> Tensor:
        with torch.autocast(logits.device.type, torch.bfloat16, enabled=logits.is_cuda):
            return self._loss(logits, y, taught)

    @torch.no_grad()
    def _check(self, network: nn.Module, x: Tensor) -> None:
        """The network in training may be another than the traced one: its answers are compared, dropout left out."""
        twin = copy.deepcopy(network).train()
        for module in twin.modules():
            if isinstance(module, _DropoutNd):
                module.eval()
        with torch.random.fork_rng([x.device] if x.is_cuda else []):
            before = _random_state(x.device)
            exact = twin(x.float())
            if not torch.equal(before, _random_state(x.device)):
                raise Unsupported("it draws random numbers in training beside dropout's")
        if not isinstance(exact, Tensor) or exact.dim() != 2:
            raise Unsupported("its output in training is not logits")
        with torch.autocast(x.device.type, torch.bfloat16):
            half = twin(x).float()
        self.engine.net.eval()  # no dropout
        fused = self.engine.logits(x, self._widths, statistics="batch")
        self.engine.net.train()
        if not close_enough(fused, half, exact):
            raise Unsupported("its answers in training are not those of its traced graph")


def _random_state(device: torch.device) -> Tensor:
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


def plain_step(
    network: nn.Module, x: Tensor, loss: Loss, teacher: nn.Module | None = None
) -> tuple[PlainStep | None, str]:
    """The fused step of ``network`` on batches like ``x``, and the choice in words; None where it cannot run."""
    reason = why_not_plain(network, x)
    if not reason:
        try:
            return PlainStep(network, x, loss, teacher), "fused"
        except (Unsupported, BcnetError, RuntimeError) as error:  # a kernel that does not compile here, too
            reason = first_line(error)
    return None, f"plain, not fused: {reason}"
