"""Which engine trains, and why: all that keeps a network from the fused step is asked here."""

from __future__ import annotations

import importlib.util
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from bcnet.accel.fused_step.engine import FusedEngine
from bcnet.accel.fused_step.program import Unsupported, compile_program
from bcnet.accel.fused_step.proof import why_no_kernels
from bcnet.errors import BcnetError
from bcnet.supernet.supernet import Supernet
from bcnet.training import distributed

ENGINES = ("auto", "plain", "fused")


class Choice(NamedTuple):
    """The engine for :func:`bcnet.supernet.training.train_supernet`, None for autograd, and the choice in words."""

    engine: FusedEngine | None
    words: str


def choose_engine(net: Supernet, wanted: str = "auto", *, bf16: bool = True, own_distillation: bool = False) -> Choice:
    """``fused`` is faster on GPUs, ``plain`` trains everything, and ``auto`` picks fused wherever it can be used."""
    if wanted not in ENGINES:
        raise BcnetError(f"engine is {wanted!r:.40}, but it must be auto, plain or fused")
    if wanted == "plain":
        return Choice(None, "plain, as asked for")
    reason = why_not_fused(net, bf16, own_distillation)
    if not reason:
        return Choice(FusedEngine(net), "fused")
    if wanted == "fused":
        raise BcnetError(f"the fused engine cannot train this: {reason}; use the plain engine")
    return Choice(None, f"plain, not fused: {reason}")


def why_not_fused(net: Supernet, bf16: bool = True, own_distillation: bool = False) -> str:
    """Why the fused step cannot train this supernet, in half a sentence; empty if it can."""
    if own_distillation:
        return "paths teach each other by a loss of your own"
    if reason := why_not_here(net, bf16):
        return reason
    try:
        program = compile_program(net.space)
    except Unsupported as unsupported:
        return str(unsupported)
    return _frozen(net, {*program.weights, *program.affines}) or why_no_kernels(next(net.parameters()).device)


def why_not_plain(network: nn.Module, x: Tensor) -> str:
    """As :func:`why_not_fused`, for a plain network and a batch."""
    if reason := why_not_here(network, True, getattr(x, "device", None)) or _frozen(network):
        return reason
    averages = any(isinstance(m, _NormBase) and m.momentum is None for m in network.modules())
    return "a batch norm averages its statistics over all batches" if averages else why_no_kernels(x.device)


def why_not_here(network: nn.Module, bf16: bool = True, device: torch.device | None = None) -> str:
    """Why no network can use the fused step here, in half a sentence; empty if one may be tried."""
    parameters = list(network.parameters())
    device = parameters[0].device if device is None else device
    if device.type != "cuda":
        return f"it is on {device.type}, not on cuda"
    if not bf16:
        return "it computes in bf16, which was not asked for"
    if distributed.world()[1] > 1:
        return "there are several processes, whose batch norms share their statistics"
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    return "its parameters are not float32" if any(p.dtype != torch.float32 for p in parameters) else ""


def _frozen(network: nn.Module, used: set[str] | None = None) -> str:
    names = [n for n, p in network.named_parameters() if not p.requires_grad and (used is None or n in used)]
    return f"{names[0]} is frozen" if names else ""
