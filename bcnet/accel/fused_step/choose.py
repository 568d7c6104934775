"""Which engine trains a supernet, and why."""

from __future__ import annotations

import importlib.util
from typing import Literal, NamedTuple

import torch

from bcnet.accel.fused_step.engine import FusedEngine
from bcnet.accel.fused_step.program import Unsupported, compile_program
from bcnet.errors import BcnetError
from bcnet.supernet.supernet import Supernet
from bcnet.training import distributed

EngineName = Literal["auto", "plain", "fused"]
ENGINES = ("auto", "plain", "fused")


class Choice(NamedTuple):
    """The engine for :func:`bcnet.supernet.training.train_supernet`, None for autograd, and the choice in words."""

    engine: FusedEngine | None
    words: str


def choose_engine(net: Supernet, wanted: str = "auto", *, bf16: bool = True, own_distillation: bool = False) -> Choice:
    """``fused`` is faster on GPUs, ``plain`` trains everything, ``auto`` is fused where that can do what is asked."""
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
    """Half a sentence, or nothing."""
    if distributed.world()[1] > 1:
        return "there are several processes, whose batch norms share their statistics"
    if not bf16:
        return "it computes in bf16, which was not asked for"
    return "paths teach each other by a loss of your own" if own_distillation else _why_not_here(net)


def _why_not_here(net: Supernet) -> str:
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
