"""Training a supernet: paths of a strategy, step by step, with nothing lost on the way.

Every step runs the strategy's paths on one batch; each path's loss is logged with its widths. A step is a
function of the seed, its number and the weights, so a run that was stopped anywhere goes on from its last
checkpoint and ends, on a CPU bit for bit, as if it had never stopped.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path as FilePath
from typing import Any, Literal

import torch
from torch import Tensor

from bcnet.data.source import Source
from bcnet.errors import BcnetError
from bcnet.optim import Average, Optimisation, make_optimizer, set_rate
from bcnet.supernet import checkpoint, distributed
from bcnet.supernet.allocator import tune_allocator
from bcnet.supernet.gradients import PathGradients
from bcnet.supernet.losslog import LossLog
from bcnet.supernet.strategy import Path, Strategy, step_rng
from bcnet.supernet.supernet import Supernet
from bcnet.task import Task

CHECK_EVERY = 50
"""Steps between looks at whether the loss is still finite: each look waits for the device."""


@dataclass(frozen=True)
class SupernetTraining:
    """How a supernet is trained.

    ``backward``: ``path`` differentiates each path before the next one runs (least memory), ``step`` all
    together (the paper's form, and what in-place distillation has a teacher for either way).
    """

    strategy: Strategy = field(default_factory=Strategy)
    optimisation: Optimisation = field(default_factory=Optimisation)
    seed: int = 0
    backward: Literal["path", "step"] = "path"
    checkpoint_minutes: float = 5.0
    channels_last: bool = True


@dataclass
class Progress:
    """What a callback sees after a step; ``loss`` waits for the device when it is read."""

    step: int
    steps: int
    epoch: int
    rate: float
    images: int
    losses: Tensor

    @property
    def loss(self) -> float:
        return float(self.losses.mean())


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
) -> Trained:
    """Train ``net`` in place on ``source``; with ``folder``, checkpoints go there and a stopped run goes on."""
    return _Trainer(net, source, config, task, folder).run(progress)


class _Trainer:
    def __init__(
        self,
        net: Supernet,
        source: Source,
        config: SupernetTraining,
        task: Task | None,
        folder: str | FilePath | None,
    ):
        self.net, self.source, self.config = net, source, config
        self.recipe = config.optimisation
        self.task = task or Task.classification(self.recipe.label_smoothing)
        self.folder = None if folder is None else FilePath(folder)
        self.device = next(net.parameters()).device
        tune_allocator()
        if config.channels_last:
            net.to(memory_format=torch.channels_last)
        distributed.same_start(net)
        self.gradients = PathGradients(net)
        self.optimizer = make_optimizer(net, self.recipe)
        self.average = Average(net.parameters(), self.recipe.ema) if self.recipe.ema else None
        self.log = LossLog(len(net.space))
        self.history: list[tuple[int, float, float]] = []
        self.sum, self.step = torch.zeros((), dtype=torch.float64, device=self.device), 0
        self.per_epoch = len(source)
        if not self.per_epoch:
            raise BcnetError("the training set gives no batch: it is empty or smaller than one batch")

    def run(self, progress: Callable[[Progress], None] | None) -> Trained:
        if self.folder is not None and checkpoint.exists(self.folder):
            self._restore()
        torch.manual_seed(self.config.seed + self.step)
        self.net.train()
        steps, saved = self.recipe.epochs * self.per_epoch, time.monotonic()
        recent: list[Tensor] = []
        for x, y in self._batches(steps):
            rate = self.recipe.rate(self.step, self.per_epoch)
            set_rate(self.optimizer, rate)
            torch.manual_seed(self.config.seed + self.step)
            losses = self._step(x, y)
            self.step += 1
            recent.append(losses)
            if self.step % CHECK_EVERY == 0 or self.step == steps:
                self._check_finite(torch.cat(recent))
                recent.clear()
            if self.step % self.per_epoch == 0:
                self._end_epoch(rate)
            if progress is not None:
                progress(Progress(self.step, steps, (self.step - 1) // self.per_epoch, rate, len(x), losses))
            due = time.monotonic() - saved > 60 * self.config.checkpoint_minutes
            if self.folder is not None and (due or self.step == steps):
                self._check_finite(torch.cat([losses, *recent]))
                self._save()
                saved = time.monotonic()
        if self.average is not None:
            self.average.swap()
        return Trained(self.log, self.history)

    def _batches(self, steps: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Batches from the current step to the last; a loader may not give fewer than it said."""
        while self.step < steps:
            epoch, start = divmod(self.step, self.per_epoch)
            before = self.step
            for x, y in self.source.batches(epoch, start, self.device):
                if self.config.channels_last and x.dim() == 4:
                    x = x.contiguous(memory_format=torch.channels_last)
                yield x, y
            if self.step != before + self.per_epoch - start:
                raise BcnetError(
                    f"the training loader promised {self.per_epoch} batches an epoch but gave {self.step - before}"
                )

    def _step(self, x: Tensor, y: Tensor) -> Tensor:
        """One optimizer step; the unweighted losses of its paths, (p,)."""
        rng = step_rng(self.config.seed, self.step)
        paths = self.config.strategy.paths(self.step, rng, self.net.space, self.net.principle)
        self.gradients.zero()
        losses = self._run_paths(paths, x, y)
        distributed.share_gradients(self.net.parameters())
        if self.recipe.clip:
            torch.nn.utils.clip_grad_norm_(self.net.parameters(), self.recipe.clip)
        self.optimizer.step()
        if self.average is not None:
            self.average.update()
        self.log.append(self.step, [p.widths for p in paths], losses)
        self.sum += losses.mean()
        return losses

    def _run_paths(self, paths: list[Path], x: Tensor, y: Tensor) -> Tensor:
        losses: list[Tensor] = []
        pending: list[Tensor] = []
        runs: list[tuple[Any, list[Tensor]]] = []
        teacher: Any = None
        for path in paths:
            plan = self.net.plan(path.widths, path.side)
            leaves = self.gradients.leaves(plan)
            with self._autocast():
                output = self.net.run(plan, x, leaves)
                loss = self.task.loss(output, y)
                learnt = loss if path.learns == "labels" or teacher is None else self._distil(output, teacher)
            if path.learns == "labels":
                teacher = torch.utils._pytree.tree_map(lambda t: t.detach(), output)
            losses.append(loss.detach())
            pending.append(learnt * path.weight)
            runs.append((plan, leaves))
            if self.config.backward == "path" or path is paths[-1]:
                self.gradients.backward(torch.stack(pending).sum(), runs)
                pending, runs = [], []
        return torch.stack(losses).float()

    def _distil(self, output: Any, teacher: Any) -> Tensor:
        if self.task.distil is None:
            raise BcnetError("in-place distillation needs a task with a `distil` loss: give it, or use no sandwich")
        return self.task.distil(output, teacher)

    def _autocast(self) -> Any:
        return torch.autocast(self.device.type, torch.bfloat16) if self.recipe.bf16 else nullcontext()

    def _end_epoch(self, rate: float) -> None:
        mean = float(self.sum) / self.per_epoch
        self.sum.zero_()
        self.history.append((self.step // self.per_epoch, mean, rate))

    def _check_finite(self, losses: Tensor) -> None:
        if not bool(torch.isfinite(losses).all()):
            kept = "nothing was saved yet" if self.folder is None else f"the last good checkpoint is in {self.folder}"
            rate = self.recipe.rate(self.step - 1, self.per_epoch)
            raise BcnetError(
                f"the loss became infinite or no number by step {self.step} (learning rate {rate:.4g}): {kept}; "
                "lower lr, add warmup or clip the gradient"
            )

    def _tree(self) -> dict[str, Any]:
        average = self.average
        return {
            "step": self.step,
            "sum": float(self.sum),
            "history": [list(row) for row in self.history],
            "net": {k: v for k, v in self.net.state_dict().items()},
            "optimizer": self.optimizer.state_dict(),
            "average": None if average is None else {"updates": average.updates, "values": average.values},
            "log": self.log.tensors(),
            "shape": [self.net.principle.name, [list(v.candidates) for v in self.net.space.variables]],
        }

    def _save(self) -> None:
        if distributed.world()[0] == 0 and self.folder is not None:
            checkpoint.save(self.folder, *checkpoint.pack(self._tree()))

    def _restore(self) -> None:
        assert self.folder is not None
        tree = checkpoint.unpack(*checkpoint.load(self.folder))
        if tree.get("shape") != self._tree()["shape"]:
            raise BcnetError(f"the checkpoint in {self.folder} is of another supernet: choose another folder")
        self.net.load_state_dict(tree["net"])
        self.optimizer.load_state_dict(tree["optimizer"])
        self.step, self.history = tree["step"], [(int(e), a, b) for e, a, b in tree["history"]]
        self.sum.fill_(tree["sum"])
        self.log = LossLog.from_tensors(tree["log"])
        if self.average is not None and tree["average"] is not None:
            self.average.updates = tree["average"]["updates"]
            for mine, kept in zip(self.average.values, tree["average"]["values"], strict=True):
                mine.copy_(kept)
