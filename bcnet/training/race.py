"""A race of finalists: fine-tuned side by side, the worse half stopped after each round, the winner to the end.

Whatever chose the finalists, what ships has been trained and measured against the others on held-out images; so it is,
but for noise, never worse than any of them. All finalists follow the schedule of the whole training, which makes their
measurements comparable and lets the winner go on with what it has learnt. A finalist is stopped only if it is worse by
more than the held-out images leave to chance: all see the same ones, so their differences part by part tell. In the end
the first of the list that lies within a standard error of the best wins. The held-out images should be some that chose
no finalist.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from bcnet.data.source import Batch, Data, First, Source
from bcnet.space.state import duplicate
from bcnet.training import distributed
from bcnet.training.loop import History, Loop, Progress
from bcnet.training.retraining import FastStep, Retrainer, Retraining, evaluate, retrain
from bcnet.training.task import Task
from bcnet.utils.settings import Count, checked

CLEAR = 2.0
"""Standard errors of a paired difference from which on a finalist is worse by more than chance."""
TIED = 1.0
"""Standard errors up to which, in the end, the finalist listed first is preferred to the best."""
SETTLING = 30
"""Steps in which the rate falls to zero before a finalist is measured."""
PARTS = 40
"""The fewest parts of the held-out images whose losses finalists are compared by."""


@checked
class RaceConfig:
    """After the last round one goes on alone: the first that lies within a standard error of the best. Before that, at
    most as many as the better half go on with it because they are too close to call. Every round is twice as long as
    the one before."""

    finalists: Annotated[Count, "configurations that begin the race"] = 4
    rounds: Annotated[Count, "after each, the worse half drops out, except those too close to call"] = 2
    epochs: Annotated[Count | None, "epochs that the rounds take together; left out: a quarter of the training"] = None

    def milestones(self, epochs: int) -> list[int]:
        """The epochs, rising, at whose ends the rounds of a training of ``epochs`` end; none after its last epoch."""
        last = min(self.epochs or max(1, epochs // 4), epochs)
        return sorted({max(1, math.ceil(last / 2 ** (self.rounds - number))) for number in range(1, self.rounds + 1)})

    def survivors(self, alive: int, last: bool) -> int:
        return 1 if last else math.ceil(alive / 2)

    def work(self, epochs: int) -> tuple[int, int]:
        """The epochs that all finalists of a training of ``epochs`` are trained for, together, and how often one is
        measured after a round, where no two of them are too close to call."""
        alive, begun, total, measured = self.finalists, 0, 0, 0
        milestones = self.milestones(epochs)
        for end in milestones:
            total, measured = total + alive * (end - begun), measured + alive
            alive, begun = self.survivors(alive, last=end == milestones[-1]), end
        return total + epochs - begun, measured


class Measurements(Protocol):
    """Where the measurements of a race are kept, so that a stopped one goes on with them."""

    def known(self, name: str) -> dict[str, Any] | None: ...

    def keep(self, name: str, result: dict[str, Any]) -> None: ...


@dataclass
class Finalist:
    """A finalist: its network as it starts, and what was measured after each round it ran in."""

    name: str
    build: Callable[[], nn.Module]
    rounds: list[dict[str, Any]] = field(default_factory=list)


@dataclass
class Winner:
    """The network that won, trained to the end; ``curve`` is what held-out images said of it since the last round."""

    name: str
    network: nn.Module
    history: History
    curve: list[dict[str, Any]]


class Racing:
    """A race that is decided ``by`` the lowest held-out ``loss`` or the highest ``score``."""

    def __init__(
        self,
        race: RaceConfig,
        data: Data,
        config: Retraining,
        *,
        task: Task | None = None,
        teacher: nn.Module | None = None,
        by: str = "loss",
        fast: FastStep | None = None,
    ):
        self.race, self.data, self.config, self.by = race, data, config, by
        self.task, self.teacher, self.fast = task, teacher, fast
        self._built: dict[str, nn.Module] = {}

    def run(
        self,
        entries: Sequence[Finalist],
        folder: Path,
        results: Measurements,
        progress: Callable[[str, Progress], None] | None = None,
    ) -> Winner:
        """Race ``entries``, the most trusted first; their checkpoints lie in ``folder``, from which a stopped race goes
        on."""
        alive = list(entries)
        milestones = self.race.milestones(self.config.optimisation.epochs)
        for number, epochs in enumerate(milestones, 1):
            if len(alive) == 1:
                break
            for entry in alive:
                entry.rounds.append(self._round(entry, number, epochs, folder, results, progress))
            alive = self.stay(alive, last=number == len(milestones))
            self._built = {entry.name: self._built[entry.name] for entry in alive if entry.name in self._built}
        training, curve = self._trained(alive[0], folder, progress)
        training.finish()
        return Winner(alive[0].name, training.net, training.history, curve)

    def stay(self, alive: list[Finalist], last: bool) -> list[Finalist]:
        """Those that go on, in the order they were listed in: the better half, and who is worse than it by no more than
        chance, as many again at the most. After the last round, the first that lies within a standard error of the
        best."""
        ranked = sorted(alive, key=lambda entry: self.rank(entry.rounds[-1]))
        left = self.race.survivors(len(alive), last)
        worst = ranked[left - 1].rounds[-1]
        most, errors = (len(ranked), TIED) if last else (2 * left, CLEAR)
        gone = [entry for entry in ranked[left:most] if _worse(entry.rounds[-1], worst, errors)] + ranked[most:]
        stay = [entry for entry in alive if entry not in gone]
        return stay[:1] if last else stay

    def rank(self, measured: dict[str, Any]) -> float:
        """The key that finalists are sorted by: lower is better."""
        return float(measured["loss"]) if self.by == "loss" else -float(measured["score"])

    def _measure(self, network: nn.Module) -> dict[str, Any]:
        """Loss and scores on the held-out images, and in ``parts`` what decides, of some images at a time."""
        task, parts = self.task or Task.classification(self.config.optimisation.label_smoothing), []

        def loss(output: Any, target: Any) -> Tensor:
            value = task.loss(output, target)
            told = value if self.by == "loss" else -task.score(output, target).double().mean()
            parts.append(float(told))
            return value

        bf16 = self.config.optimisation.bf16
        measured = evaluate(network, _InParts(self.data.val), replace(task, loss=loss), bf16=bf16)
        return {**measured, "parts": parts}

    def _round(
        self,
        entry: Finalist,
        number: int,
        epochs: int,
        folder: Path,
        results: Measurements,
        progress: Callable[[str, Progress], None] | None,
    ) -> dict[str, Any]:
        key = f"{number}-{entry.name}"
        known = results.known(key)
        if known is not None:
            return known
        training, curve = self._trained(entry, folder, progress, epochs)
        settled = self._settled(training.net, epochs * training.per_epoch, training.per_epoch)
        measured = distributed.decide(lambda: self._measure(settled))  # one says who stays, for all processes
        result = {"round": number, "name": entry.name, "epochs": epochs, **measured, "curve": curve}
        results.keep(key, result)
        return result

    def _settled(self, network: nn.Module, step: int, per_epoch: int) -> nn.Module:
        """A copy of ``network`` after some steps more, in which its rate falls from that of ``step`` to zero; after the
        last step the network itself.

        In the middle of a training the losses of one network differ more from seed to seed than those of different
        networks do; once the rate has fallen they do not (docs/results/rivals.md).
        """
        given = self.config.optimisation
        if step >= given.epochs * per_epoch:
            return network
        rate = given.rate(step, per_epoch)
        short = replace(given, epochs=1, lr=rate, warmup=0.0, schedule="cosine", final_lr=0.0, ema=0.0)
        twin = duplicate(network)
        retrain(
            twin,
            First(self.data.train, SETTLING),
            replace(self.config, optimisation=short),
            self.task,
            teacher=self.teacher,
            fast=self.fast,
        )
        return twin

    def _trained(
        self,
        entry: Finalist,
        folder: Path,
        progress: Callable[[str, Progress], None] | None,
        epochs: int | None = None,
    ) -> tuple[Loop, list[dict[str, Any]]]:
        """The training of ``entry``, run to its end or to that of its first ``epochs``, with its validation curve.

        Its network is built once: what it learnt in earlier rounds comes from its checkpoint.
        """
        if entry.name not in self._built:
            self._built[entry.name] = entry.build()
        network, curve = self._built[entry.name], list[dict[str, Any]]()
        training = Retrainer(
            network, self.data.train, self.config, self.task, self.teacher, folder / entry.name, self.fast
        )
        training.run(self._watched(entry.name, training, curve, progress), epochs)
        return training, curve

    def _watched(
        self,
        name: str,
        training: Loop,
        curve: list[dict[str, Any]],
        progress: Callable[[str, Progress], None] | None,
    ) -> Callable[[Progress], None]:
        """``progress`` of one finalist, which also adds to ``curve`` what the network has on the held-out images after
        every epoch but the last, which is measured anyway."""

        def told(state: Progress) -> None:
            if progress is not None:
                progress(name, state)
            if state.step % training.per_epoch == 0 and state.step < state.steps:
                found = evaluate(training.net, self.data.val, self.task, bf16=self.config.optimisation.bf16)
                measured = {"score": found["score"], "loss": found["loss"]}
                curve.append({"name": name, "epochs": state.step // training.per_epoch, **measured})

        return told


@dataclass(frozen=True)
class _InParts:
    """``source`` in batches so small that there are :data:`PARTS` of them, if there are as many inputs."""

    source: Source

    def __len__(self) -> int:
        return len(self.source)

    def batches(self, epoch: int, start: int = 0, device: torch.device | str | None = None) -> Iterator[Batch]:
        each = -(-PARTS // len(self.source))
        for x, y in self.source.batches(epoch, start, device):
            yield from zip(x.chunk(each), y.chunk(each), strict=True)


def _worse(one: dict[str, Any], other: dict[str, Any], errors: float) -> bool:
    """Whether ``one`` is worse by more than this many standard errors; it counts as worse where measurements
    have too few parts to tell, or different ones."""
    parts = [np.array(measured.get("parts", ())) for measured in (one, other)]
    if len(parts[0]) < 2 or len(parts[0]) != len(parts[1]):
        return True
    difference = parts[0] - parts[1]
    return bool(difference.mean() > errors * difference.std(ddof=1) / len(difference) ** 0.5)
