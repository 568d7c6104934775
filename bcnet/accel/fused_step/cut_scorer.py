"""Scores of inherited networks by the fused step: each is a path of one supernet, so that its widths cost nothing.

A network of new shapes costs libraries seconds before its first step on a GPU, more than the steps themselves
(docs/results/plain-step.md). A path takes the first channels of every variable, and the weights of a slim network are
written there.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from bcnet.accel.fused_step.choose import why_not_here
from bcnet.accel.fused_step.engine import FusedEngine
from bcnet.accel.fused_step.program import Unsupported
from bcnet.accel.fused_step.proof import why_no_kernels
from bcnet.data.source import Batch
from bcnet.errors import first_line
from bcnet.space.importance import Keep
from bcnet.space.network import NetworkSpace
from bcnet.space.resize import sliced
from bcnet.space.widths import Floats, Widths
from bcnet.supernet.supernet import Supernet
from bcnet.training.inherit import CutScorer, Healing
from bcnet.training.loop import out_of_memory
from bcnet.training.task import Task


class FusedCutScorer(CutScorer):
    """As :class:`~bcnet.training.inherit.CutScorer`; ``kernels`` and ``dtype`` are those of :class:`FusedEngine`.
    :class:`Unsupported` is raised, with the reason, for a network that cannot be scored this way."""

    def __init__(
        self, *given: Any, kernels: ModuleType | None = None, dtype: torch.dtype = torch.bfloat16, **settings: Any
    ):
        super().__init__(*given, **settings)
        axes = [axis for some in self.space.coupling.axes.values() for axis in some]
        if any(len(axis.segments) > 1 for axis in axes):
            raise Unsupported("channels of a concatenation do not lie in one piece")
        self._net = Supernet(self.space, "ua").to(self.device).train()
        self._engine = FusedEngine(self._net, kernels, dtype, track=True)
        parameters, buffers = self._net.named_parameters(), self._net.named_buffers()
        self._whole: dict[str, Tensor] = {**dict(parameters), **dict(buffers)}

    def _measured(self, widths: Widths) -> Floats:
        self._load(widths)
        if self.healing.steps:
            self._fine_tune(self._net, partial(self._learn, widths))
        self._engine.recalibrate((x for x, _ in self._calibration), widths)
        return self._measure(partial(self._engine.logits, widths=widths))

    def _learn(self, widths: Widths, x: Tensor, y: Tensor, taught: Any) -> None:
        self._engine.zero()
        self._engine.step(x, y, [(widths, "left")], loss=lambda logits, labels: self._loss(logits, labels, taught))

    @torch.no_grad()
    def _load(self, widths: Widths) -> None:
        """Write the network at ``widths`` (L,) into the supernet."""
        state = self._inherit(widths, self.keep).state_dict()
        torch._foreach_zero_(list(self._whole.values()))
        units, total, axes = self.space.units(widths), self._net.total_units, self.space.coupling.axes
        for name, tensor in self._whole.items():
            place = sliced(tensor, axes[name], units, total, "left") if name in axes else tensor
            place.copy_(state[name])


def open_cut_scorer(
    space: NetworkSpace,
    network: nn.Module,
    keep: Keep,
    train: Iterable[Batch],
    val: Iterable[Batch],
    task: Task | None = None,
    *,
    engine: str = "auto",
    **settings: Any,
) -> tuple[CutScorer, str]:
    """A scorer of inherited networks, by the fused step if it can score them, and the choice in words. The arguments
    are those of :class:`~bcnet.training.inherit.CutScorer`."""
    given = (space, network, keep, list(train), list(val), task)  # a second scorer reads the batches again
    if engine == "plain":
        return CutScorer(*given, **settings), "plain, as asked for"
    healing = settings.get("healing") or Healing()
    reason = why_not_here(network, healing.optimisation.bf16) or why_no_kernels(next(network.parameters()).device)
    if not reason:
        try:
            fused = FusedCutScorer(*given, **settings)
            fused.score(fused.space.max)
            return fused, "fused"
        except (Unsupported, RuntimeError) as error:
            if isinstance(error, RuntimeError) and out_of_memory(error):
                torch.cuda.empty_cache()
            reason = first_line(error)
    return CutScorer(*given, **settings), f"plain, not fused: {reason}"
