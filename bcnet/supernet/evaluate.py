"""Scores of widths on a trained supernet: the mean of both sides, with batch statistics.

Batch norm uses the statistics of large scoring batches (the paper: 2048), or statistics recalibrated for each
path on some training batches; never running averages of the supernet, which mix all widths.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from bcnet.errors import BcnetError
from bcnet.space.network import Side
from bcnet.supernet.supernet import Stats, Supernet
from bcnet.task import Task

Batches = Sequence[tuple[Tensor, Tensor]]
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Scores:
    """Of n widths: ``score`` (accuracy) and ``loss``, each (n,), the mean of the sides; ``by_side`` holds
    both for every side (n, sides); ``extra`` are the task's further scores, such as ``top5``."""

    score: Floats
    loss: Floats
    by_side: dict[str, Floats]
    extra: dict[str, Floats]


class Evaluator:
    """Scores widths of ``net`` on ``batches``; every widths is scored once, however often it is asked for.

    ``recalibrate`` are training batches for batch-norm statistics; without them the scoring batches' own
    statistics count. ``progress`` is called with (done, all) after every widths.
    """

    def __init__(
        self,
        net: Supernet,
        batches: Iterable[tuple[Tensor, Tensor]],
        task: Task | None = None,
        recalibrate: Iterable[tuple[Tensor, Tensor]] = (),
        bf16: bool = False,
    ):
        self.net, self.task, self.bf16 = net, task or Task.classification(), bf16
        self.batches: Batches = list(batches)
        self.recalibrate: Batches = list(recalibrate)
        if not self.batches:
            raise BcnetError("there is nothing to score on: the validation set is empty")
        self.evaluations = 0
        self._known: dict[bytes, NDArray[np.float64]] = {}

    def __call__(self, widths: ArrayLike) -> float:
        """The score of one widths (L,): the mean of both sides, higher is better."""
        return float(self.score(np.asarray(widths)[None]).score[0])

    def score_many(self, widths: ArrayLike) -> Floats:
        """The scores of widths (n, L): (n,)."""
        return self.score(widths).score

    def score(self, widths: ArrayLike, progress: Callable[[int, int], None] | None = None) -> Scores:
        """Everything known about widths (n, L)."""
        rows = np.atleast_2d(self.net.space.check(widths))
        found = []
        for i, row in enumerate(rows):
            key = row.tobytes()
            if key not in self._known:
                self._known[key] = np.stack([self._measure(row, side) for side in self.net.sides])
                self.evaluations += 1
            found.append(self._known[key])
            if progress is not None:
                progress(i + 1, len(rows))
        table = np.stack(found)  # (n, sides, measures)
        names = ("score", "loss", *(name for name, _ in self.task.extra))
        by_side = {name: table[:, :, k] for k, name in enumerate(names)}
        mean = {name: values.mean(axis=1) for name, values in by_side.items()}
        return Scores(mean["score"], mean["loss"], by_side, {name: mean[name] for name in names[2:]})

    @torch.no_grad()
    def _measure(self, widths: NDArray[np.int64], side: Side) -> NDArray[np.float64]:
        """Score, loss and extra scores of one path over all batches, weighted by their sizes."""
        net, mode = self.net, self.net.training
        plan = net.plan(widths, side)
        views = net.views(plan)
        stats = self._statistics(widths, side) if self.recalibrate else None
        net.eval()
        total = torch.zeros(2 + len(self.task.extra), dtype=torch.float64)
        count = 0
        try:
            for x, y in self.batches:
                with torch.autocast(x.device.type, torch.bfloat16, enabled=self.bf16):
                    output = net.run(plan, x, views, stats)
                measures = [
                    self.task.score(output, y).double().sum(),
                    self.task.loss(output, y).double() * len(x),
                    *(extra(output, y).double().sum() for _, extra in self.task.extra),
                ]
                total += torch.stack([m.cpu() for m in measures])
                count += len(x)
        finally:
            net.train(mode)
        return (total / count).numpy()

    def _statistics(self, widths: NDArray[np.int64], side: Side) -> Stats:
        """Batch-norm statistics of one path, the plain mean over the recalibration batches."""
        stats = self.net.fresh_stats(widths)
        mean = {name: torch.zeros_like(t) for name, t in stats.items()}
        mode = self.net.training
        self.net.train()
        plan = self.net.plan(widths, side)
        views = self.net.views(plan)
        try:
            for x, _ in self.recalibrate:
                # One forward pass moves fresh statistics by the momentum m: s = (1 - m) s0 + m * batch's.
                current = self.net.fresh_stats(widths)
                with torch.autocast(x.device.type, torch.bfloat16, enabled=self.bf16):
                    self.net.run(plan, x, views, current)
                for name, value in current.items():
                    mean[name] += value
        finally:
            self.net.train(mode)
        return self.net.undo_momentum({n: m / len(self.recalibrate) for n, m in mean.items()})
