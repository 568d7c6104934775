"""Scores of a supernet's configurations by the fused step's kernels: in bf16, for CUDA."""

from __future__ import annotations

from collections.abc import Iterable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from bcnet.accel.enumeration.shared import SharedEvaluator
from bcnet.accel.fused_step.ahead import compile_ahead
from bcnet.accel.fused_step.choose import why_not_fused
from bcnet.accel.fused_step.engine import FusedEngine
from bcnet.accel.fused_step.program import Unsupported
from bcnet.data.source import Batch
from bcnet.errors import BcnetError, first_line
from bcnet.space.widths import Side, Widths
from bcnet.supernet.scoring import Evaluator, PathRun
from bcnet.supernet.supernet import Supernet
from bcnet.training.loop import out_of_memory


class FusedEvaluator(Evaluator):
    """As :class:`~bcnet.supernet.scoring.Evaluator`; ``kernels`` and ``dtype`` are those of :class:`FusedEngine`.
    :class:`Unsupported` is raised, with the reason, if configurations cannot be scored this way."""

    def __init__(
        self, *given: Any, kernels: ModuleType | None = None, dtype: torch.dtype = torch.bfloat16, **settings: Any
    ):
        super().__init__(*given, **settings)
        if self.recalibrate:
            raise Unsupported("statistics are recalibrated for every path")
        self._engine = FusedEngine(self.net, kernels, dtype)
        compile_ahead(self._engine, next(iter(self._loaded()))[0], answers="batch")

    def _run(self, widths: Widths, side: Side) -> PathRun:
        return PathRun(self.net.select(widths, side), [], None)

    @torch.no_grad()
    def _on_batch(self, run: PathRun, x: Tensor, y: Tensor) -> Tensor:
        tape = self._engine.tape(x.device, run.selection, "batch")
        return self._judged(tape.answers(x)[0], y)


def open_evaluator(
    net: Supernet, batches: Iterable[Batch], *more: Any, engine: str = "auto", bf16: bool = False, **settings: Any
) -> tuple[Evaluator, str]:
    """A scorer of configurations, by the fused kernels if they can score them and else by shared prefixes, and the
    choice in words. The arguments are those of :class:`~bcnet.supernet.scoring.Evaluator`."""
    kept = list(batches)
    reason = "as asked for" if engine == "plain" else why_not_fused(net, bf16)
    if not reason:
        try:
            fused = FusedEvaluator(net, kept, *more, bf16=bf16, **settings)
            fused.score(net.space.max)
            return fused, "fused"
        except (Unsupported, BcnetError, RuntimeError) as error:
            if isinstance(error, RuntimeError) and out_of_memory(error):
                raise  # smaller batches may do
            reason = first_line(error)
    return SharedEvaluator(net, kept, *more, bf16=bf16, **settings), f"plain, not fused: {reason}"
