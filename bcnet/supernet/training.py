"""Training a supernet: the paths of a path sampling, step by step, on the shared loop.

Every step runs its paths on one batch; each path's loss is logged with its widths.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path as FilePath
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from bcnet.data.source import Source
from bcnet.errors import BcnetError
from bcnet.space.widths import Side
from bcnet.supernet.gradients import PathGradients
from bcnet.supernet.loss_log import LossLog
from bcnet.supernet.paths import Path, PathSampling
from bcnet.supernet.supernet import Supernet
from bcnet.training.loop import Loop, Progress
from bcnet.training.optim import Optimisation
from bcnet.training.task import Task
from bcnet.utils.settings import Natural, NotNegative, checked

__all__ = ["Progress", "StepEngine", "SupernetTraining", "Trained", "train_supernet"]


class StepEngine(Protocol):
    """A faster way to run the paths of a step, such as :class:`bcnet.accel.fused_step.FusedEngine`."""

    def zero(self) -> None:
        """Set the gradients to zero."""

    def step(
        self,
        x: Tensor,
        y: Tensor,
        paths: Sequence[tuple[Any, Side]],
        weights: Sequence[float] | None = None,
        smoothing: float = 0,
        teachers: Sequence[int | None] | None = None,
        loss: Callable[[Tensor, Tensor], Tensor] | None = None,
    ) -> Tensor:
        """Losses (p,) of the paths, cross entropy or ``loss(logits, y)``; the gradients of their sum by ``weights`` are
        added to the parameters'."""


@checked
class SupernetTraining:
    """How a supernet is trained.

    ``backward``: ``path`` differentiates each path before the next one runs (least memory), ``step`` all
    together; the gradients are the same. ``checkpoint_minutes`` lie between checkpoints.
    """

    sampling: PathSampling = field(default_factory=PathSampling)
    optimisation: Optimisation = field(default_factory=Optimisation)
    seed: Natural = 0
    backward: Literal["path", "step"] = "path"
    checkpoint_minutes: NotNegative = 5.0
    channels_last: bool = True


@dataclass(frozen=True)
class Trained:
    """The outcome: the loss log, and per epoch (epoch, mean loss, rate)."""

    log: LossLog
    history: list[tuple[int, float, float]]


def train_supernet(
    net: Supernet,
    source: Source,
    config: SupernetTraining,
    task: Task | None = None,
    folder: str | FilePath | None = None,
    progress: Callable[[Progress], None] | None = None,
    engine: StepEngine | None = None,
) -> Trained:
    """Train ``net`` in place on ``source``; with ``folder``, checkpoints go there and a stopped run goes on.

    ``engine`` runs the steps, where there is a faster one than autograd (:func:`bcnet.accel.choose_engine`).
    """
    trainer = _Trainer(net, source, config, task, folder)
    trainer.fused = engine
    trainer.run(progress)
    trainer.finish()
    return Trained(trainer.log, trainer.history)


def _teachers(paths: list[Path]) -> list[int | None] | None:
    """For each path the number of the one it learns from: the last before it, on its side, that learns from labels."""
    if all(path.learns == "labels" for path in paths):
        return None
    last: dict[str, int] = {}
    found: list[int | None] = []
    for number, path in enumerate(paths):
        found.append(last[path.side] if path.learns == "teacher" else None)
        if path.learns == "labels":
            last[path.side] = number
    return found


class _Trainer(Loop):
    net: Supernet
    config: SupernetTraining

    def __init__(
        self,
        net: Supernet,
        source: Source,
        config: SupernetTraining,
        task: Task | None,
        folder: str | FilePath | None,
    ):
        super().__init__(net, source, config, folder)
        self.task = task or Task.classification(self.optimisation.label_smoothing)
        self.own_task = task is not None
        self.gradients = PathGradients(net)
        self.log = LossLog(len(net.space))
        self.trained: list[tuple[int, ...]] = []
        self.fused: StepEngine | None = None

    def learn(self, x: Tensor, y: Tensor) -> Tensor:
        paths = self.config.sampling.paths(self.step, self.config.seed, self.net.space, self.net.principle)
        (self.fused or self.gradients).zero()
        self.trained = [path.widths for path in paths]
        return torch.stack([self._run_paths(paths, *part) for part in self.split(x, y)]).sum(0)

    def record(self, losses: Tensor) -> None:
        self.log.append(self.step, self.trained, losses)

    @torch.no_grad()
    def check(self, x: Tensor, y: Tensor) -> None:
        wanted = tuple(self.net.space.example[0].shape[1:])
        if x.shape[1:2] != wanted[:1] or x.dim() != len(wanted) + 1:
            raise BcnetError(
                f"the network was traced on inputs of shape {wanted}, but the data gives {tuple(x.shape[1:])}: "
                "trace it on an example of this data, or change its first layer"
            )
        with self.autocast():
            output = self.net(x[:64], self.net.space.min)
        self.task.check(output, y[:64])
        if self.config.sampling.sandwich and self.task.distil is None:
            raise BcnetError("in-place distillation needs a task with a `distil` loss: give it, or use no sandwich")

    def _run_paths(self, paths: list[Path], x: Tensor, y: Tensor, share: float) -> Tensor:
        """Run all paths on a part of a batch; that part's share of their losses, (p,)."""
        if self.fused is not None:
            pairs, weights = [(p.widths, p.side) for p in paths], [p.weight * share for p in paths]
            own = self.task.loss if self.own_task else None
            return (
                self.fused.step(x, y, pairs, weights, self.optimisation.label_smoothing, _teachers(paths), own) * share
            )
        losses: list[Tensor] = []
        pending: list[Tensor] = []
        runs: list[tuple[Any, list[Tensor]]] = []
        teachers: dict[str, Any] = {}
        for path in paths:
            selection = self.net.select(path.widths, path.side)
            leaves = self.gradients.leaves(selection)
            with self.autocast():
                output = self.net.run(selection, x, leaves)
                loss = self.task.loss(output, y)
                learnt = loss
                if path.learns == "teacher" and self.task.distil is not None:
                    learnt = self.task.distil(output, teachers[path.side])
            if path.learns == "labels":
                teachers[path.side] = torch.utils._pytree.tree_map(lambda t: t.detach(), output)
            losses.append(loss.detach() * share)
            pending.append(learnt * (path.weight * share))
            runs.append((selection, leaves))
            if self.config.backward == "path" or path is paths[-1]:
                self.gradients.backward(torch.stack(pending).sum(), runs)
                pending, runs = [], []
        return torch.stack(losses).float()

    def identity(self) -> Any:
        return [self.net.principle.name, [list(v.candidates) for v in self.net.space.variables]]

    def extra(self) -> dict[str, Any]:
        return {"log": self.log.tensors()}

    def restore_extra(self, tree: dict[str, Any]) -> None:
        self.log = LossLog.from_tensors(tree["log"])
