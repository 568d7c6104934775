"""A race of finalists: fine-tuned side by side, the worse half stopped after each round, the winner to the end.

Whatever chose the finalists, what ships has been trained and measured against the others on held-out images; so it is,
but for noise, never worse than any of them. All finalists follow the schedule of the whole training, which makes their
measurements comparable and lets the winner go on with what it has learnt.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from torch import nn

from bcnet.data.source import Data
from bcnet.training.loop import History, Progress
from bcnet.training.retraining import FastStep, Retraining, evaluate, open_training
from bcnet.training.task import Task
from bcnet.utils.settings import Count, checked


@checked
@dataclass(frozen=True)
class RaceConfig:
    """``finalists`` begin; after each of ``rounds`` the better half goes on, after the last one alone. The rounds take
    ``epochs`` of the training (half of it where left out), each twice as long as the one before."""

    finalists: Count = 6
    rounds: Count = 3
    epochs: Count | None = None

    def milestones(self, epochs: int) -> list[int]:
        """The epochs, rising, at whose ends the rounds of a training of ``epochs`` end; none after its last epoch."""
        last = min(self.epochs or max(1, epochs // 2), epochs)
        return sorted({max(1, math.ceil(last / 2 ** (self.rounds - number))) for number in range(1, self.rounds + 1)})

    def survivors(self, alive: int, last: bool) -> int:
        return 1 if last else math.ceil(alive / 2)

    def work(self, epochs: int) -> int:
        """The epochs that all finalists of a training of ``epochs`` are trained for, together."""
        alive, begun, total = self.finalists, 0, 0
        milestones = self.milestones(epochs)
        for end in milestones:
            total += alive * (end - begun)
            alive, begun = self.survivors(alive, last=end == milestones[-1]), end
        return total + epochs - begun


class Results(Protocol):
    """Where the measurements of a race are kept, so that a stopped one goes on with them."""

    def known(self, name: str) -> dict[str, Any] | None: ...

    def keep(self, name: str, result: dict[str, Any]) -> None: ...


@dataclass
class Entry:
    """A finalist: its network as it starts, and what was measured after each round it ran in."""

    name: str
    build: Callable[[], nn.Module]
    rounds: list[dict[str, Any]] = field(default_factory=list)


@dataclass
class Winner:
    """The network that won, trained to the end, its name and its history."""

    name: str
    network: nn.Module
    history: History


class Racing:
    """``by`` is what decides: the lowest held-out ``loss`` or the highest ``score``."""

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

    def run(
        self,
        entries: Sequence[Entry],
        folder: Path,
        results: Results,
        progress: Callable[[str, Progress], None] | None = None,
    ) -> Winner:
        """Race ``entries``; their checkpoints lie in ``folder``, from which a stopped race goes on."""
        alive = list(entries)
        milestones = self.race.milestones(self.config.optimisation.epochs)
        for number, epochs in enumerate(milestones, 1):
            if len(alive) == 1:
                break
            for entry in alive:
                entry.rounds.append(self._round(entry, number, epochs, folder, results, progress))
            left = self.race.survivors(len(alive), last=number == len(milestones))
            alive = sorted(alive, key=lambda entry: self.rank(entry.rounds[-1]))[:left]
        return self._finish(alive[0], folder, progress)

    def rank(self, measured: dict[str, Any]) -> float:
        """What is sorted by: lower is better."""
        return float(measured["loss"]) if self.by == "loss" else -float(measured["score"])

    def _round(
        self,
        entry: Entry,
        number: int,
        epochs: int,
        folder: Path,
        results: Results,
        progress: Callable[[str, Progress], None] | None,
    ) -> dict[str, Any]:
        key = f"{number}-{entry.name}"
        known = results.known(key)
        if known is not None:
            return known
        network = entry.build()
        training = self._training(entry, network, folder)
        training.run(_named(progress, entry.name), epochs)
        measured = evaluate(network, self.data.val, training.task, bf16=self.config.optimisation.bf16)
        result = {"round": number, "name": entry.name, "epochs": epochs, **measured}
        results.keep(key, result)
        return result

    def _finish(self, entry: Entry, folder: Path, progress: Callable[[str, Progress], None] | None) -> Winner:
        network = entry.build()
        training = self._training(entry, network, folder)
        training.run(_named(progress, entry.name))
        training.finish()
        return Winner(entry.name, network, training.history)

    def _training(self, entry: Entry, network: nn.Module, folder: Path) -> Any:
        return open_training(
            network, self.data.train, self.config, self.task, self.teacher, folder / entry.name, self.fast
        )


def _named(progress: Callable[[str, Progress], None] | None, name: str) -> Callable[[Progress], None] | None:
    return None if progress is None else lambda state: progress(name, state)
