"""Scores of widths on a trained supernet: the mean of both sides, with batch statistics.

Batch norm uses the statistics of large scoring batches (the paper: 2048), or statistics recalibrated for each
path on some training batches; never running averages of the supernet, which mix all widths. A batch is loaded once
for many widths, and several processes share the widths among them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from bcnet.data.source import Batch, Source
from bcnet.errors import BcnetError
from bcnet.space.widths import Floats, Side, Widths
from bcnet.supernet.supernet import Selection, Stats, Supernet
from bcnet.training import distributed
from bcnet.training.allocator import tune_allocator
from bcnet.training.task import Task
from bcnet.utils.modes import evaluation_mode


@dataclass(frozen=True)
class Scores:
    """The scores of n configurations: ``score`` (accuracy) and ``loss``, each (n,), the mean of the sides; ``by_side``
    holds both for every side (n, sides); ``extra`` are the task's further scores, such as ``top5``."""

    score: Floats
    loss: Floats
    by_side: dict[str, Floats]
    extra: dict[str, Floats]


@dataclass(frozen=True)
class PathRun:
    """One path that is being scored."""

    selection: Selection
    views: list[Tensor]
    stats: Stats | None


class Evaluator:
    """Scores configurations of ``net`` on ``batches``, each once, however often it is asked for.

    ``batches`` is a source, which is loaded anew as often as needed (validation data of any size), or batches
    that are kept. ``recalibrate`` are some training batches for batch-norm statistics; without them the scoring
    batches' own statistics count. It ranks by the task's ``score`` or by its ``loss``, which is less noisy on few
    images. A search takes it as its scorer. Several processes must be given the same batches and ask for the same
    configurations, which they divide among themselves.
    """

    together = 64
    """Configurations that see a batch before the next one is loaded; for so many, recalibrated statistics are kept."""

    def __init__(
        self,
        net: Supernet,
        batches: Source | Iterable[Batch],
        task: Task | None = None,
        recalibrate: Iterable[Batch] = (),
        bf16: bool = False,
        by: Literal["score", "loss"] = "score",
    ):
        self.net, self.task, self.bf16, self.by = net, task or Task.classification(), bf16, by
        tune_allocator()
        self.device = next(net.parameters()).device
        self.batches: Source | list[Batch] = self._kept(batches) if isinstance(batches, Iterable) else batches
        self.recalibrate = self._kept(recalibrate)
        if not len(self.batches):
            raise BcnetError("there is nothing to score on: the validation set is empty")
        self.evaluations = 0
        self._known: dict[bytes, Floats] = {}
        self._checked = False

    def score(self, widths: ArrayLike) -> float:
        """The score of one configuration (L,), or its negated loss: the mean of both sides, higher is better."""
        return float(self.score_many(np.asarray(widths)[None])[0])

    def score_many(self, widths: ArrayLike) -> Floats:
        """The same for configurations (n, L): (n,)."""
        found = self.measure(widths)
        return found.score if self.by == "score" else -found.loss

    def measure(self, widths: ArrayLike, progress: Callable[[int, int], None] | None = None) -> Scores:
        """Everything known about configurations (n, L). ``progress`` is called with (done, all)."""
        rows = np.atleast_2d(self.net.space.check(widths))
        if not len(rows):
            raise BcnetError("there are no widths to score")
        with evaluation_mode(self.net):
            self._measure_new(rows, progress)
        return self._scores(np.stack([self._known[row.tobytes()] for row in rows]))

    def _measure_new(self, rows: Widths, progress: Callable[[int, int], None] | None) -> None:
        """Measure those of ``rows`` (n, L) that are not known, each process its share."""
        new = self._arranged(list({row.tobytes(): row for row in rows if row.tobytes() not in self._known}.values()))
        rank, world = distributed.world()
        done = len(rows) - len(new)
        for first in range(0, len(new), self.together * world):
            chunk = new[first : first + self.together * world]
            mine = slice(rank * len(chunk) // world, (rank + 1) * len(chunk) // world)
            table = np.zeros((len(chunk), len(self.net.sides), 2 + len(self.task.extra)))
            for share in self._measure(chunk[mine], table[mine]):
                if progress is not None:
                    progress(done + int(share * len(chunk)), len(rows))
            table = distributed.add_up(table, self.device)
            self._known |= {row.tobytes(): found for row, found in zip(chunk, table, strict=True)}
            self.evaluations += len(chunk)
            done += len(chunk)

    def _arranged(self, rows: list[Widths]) -> list[Widths]:
        """The order in which configurations are measured."""
        return rows

    def _scores(self, table: Floats) -> Scores:
        """The scores in a table (n, sides, measures)."""
        names = ("score", "loss", *(name for name, _ in self.task.extra))
        by_side = {name: table[:, :, k] for k, name in enumerate(names)}
        mean = {name: values.mean(axis=1) for name, values in by_side.items()}
        return Scores(mean["score"], mean["loss"], by_side, {name: mean[name] for name in names[2:]})

    def _measure(self, rows: Sequence[Widths], table: Floats) -> Iterator[float]:
        """Score, loss and extra scores of ``rows`` over all batches, weighted by their sizes, into ``table``.

        Gives the share that is done after every batch.
        """
        if not rows:
            return
        runs = [self._run(row, side) for row in rows for side in self.net.sides]
        total = torch.zeros(len(runs), table.shape[2], dtype=torch.float64, device=self.device)
        count = 0
        for number, (x, y) in enumerate(self._loaded(), 1):
            total += len(x) * torch.stack([self._on_batch(run, x, y) for run in runs])
            count += len(x)
            yield number / len(self.batches)
        table[:] = (total / count).cpu().numpy().reshape(table.shape)

    @torch.no_grad()
    def _on_batch(self, run: PathRun, x: Tensor, y: Tensor) -> Tensor:
        """Mean score, loss and extra scores of a path on a batch: (measures,)."""
        with self._autocast():
            output = self.net.run(run.selection, x, run.views, run.stats)
        return self._judged(output, y)

    def _judged(self, output: Any, y: Tensor) -> Tensor:
        """Mean score, loss and extra scores of a network's output: (measures,)."""
        if not self._checked:
            self.task.check(output, y)
            self._checked = True
        scores = [self.task.score, *(extra for _, extra in self.task.extra)]
        first, *others = [score(output, y).double().mean() for score in scores]
        return torch.stack([first, self.task.loss(output, y).double(), *others])

    @torch.no_grad()
    def _run(self, widths: Widths, side: Side) -> PathRun:
        """A path with its batch-norm statistics: the mean over the recalibration batches, if there are any."""
        selection = self.net.select(widths, side)
        views = self.net.views(selection)
        if not self.recalibrate:
            return PathRun(selection, views, None)
        total: Stats = {}
        for x, _ in self.recalibrate:
            with self._autocast():
                found = self.net.statistics(selection, x, views)
            total = {name: total.get(name, 0) + value for name, value in found.items()}
        return PathRun(selection, views, {name: value / len(self.recalibrate) for name, value in total.items()})

    def _autocast(self) -> torch.autocast:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.bf16)

    def _loaded(self) -> Iterator[Batch]:
        if isinstance(self.batches, list):
            return iter(self.batches)
        return ((self._laid_out(x), y) for x, y in self.batches.batches(0, 0, self.device))

    def _kept(self, batches: Iterable[Batch]) -> list[Batch]:
        return [(self._laid_out(x.to(self.device)), y.to(self.device)) for x, y in batches]

    def _laid_out(self, x: Tensor) -> Tensor:
        """Channels last on a CPU, where batch norm with batch statistics is then several times faster.

        A copy, since ``contiguous`` leaves images of one channel as they are, and convolutions then take them for
        channels first.
        """
        return torch.empty_like(x, memory_format=torch.channels_last).copy_(x) if x.dim() == 4 and not x.is_cuda else x
