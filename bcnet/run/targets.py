"""Several budgets from one start: each target is a run of its own in RUN/targets that shares what no budget changes.

The given network, the table of latencies and the supernet are the parent's. A target has its own recipe (the parent's
with its budget), search, race, networks, export and report, so it can be exported and viewed like any run. ``bcnet
pick`` adds a target later, chosen from the scores that already exist.
"""

from __future__ import annotations

import re
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import Tensor

from bcnet.errors import BcnetError
from bcnet.run.folder import RunFolder
from bcnet.run.session import Run, facts
from bcnet.search.store import TRIALS
from bcnet.search.trial import Trial
from bcnet.training import distributed

SHARED = ("given", "latency", "train")
FOLDER = "targets"


class Target(Run):
    """The run for one budget of ``parent``."""

    def __init__(self, folder: str | Path, parent: Run):
        super().__init__(folder, str(parent.device))
        self.parent = parent
        self.listener = parent.listener
        self.give(parent.original, parent.data, parent.task_given)
        self._spaces = parent._spaces  # traced once

    def done(self, name: str) -> bool:
        return super().done(name) or (name in SHARED and self.parent.done(name))

    def read(self, name: str) -> dict[str, Any]:
        return self.parent.read(name) if self._is_shared(name) else super().read(name)

    def check(self, name: str) -> None:
        return self.parent.check(name) if self._is_shared(name) else super().check(name)

    def tensors(self, name: str) -> dict[str, Tensor]:
        return self.parent.tensors(name) if self._is_shared(name) else super().tensors(name)

    @cached_property
    def fingerprint(self) -> dict[str, str]:
        return self.parent.fingerprint

    def _is_shared(self, name: str) -> bool:
        """Whether a result is the parent's; a table of latencies that the parent did not need is the target's own."""
        return name in SHARED and self.parent.done(name)


def open_target(parent: Run, budget: str, command: list[str], **changes: Any) -> Target:
    """The target of ``parent`` for ``budget``, created if it is new, with the parent's recipe but for ``changes``."""
    folder = parent.path(FOLDER, folder_name(budget))
    distributed.decide(lambda: _begin(folder, parent, command, {**changes, "budgets": [budget], "targets": []}))
    target = Target(folder, parent)
    if list(target.recipe.budgets) != [budget]:
        held = ", ".join(target.recipe.budgets)
        raise BcnetError(f"{folder} holds the target {held}: remove that folder, or choose another budget")
    return target


def _begin(folder: Path, parent: Run, command: list[str], changes: dict[str, Any]) -> None:
    """Write the start of a target; all of it follows from the parent, so a lost one is written again."""
    target = RunFolder(folder)
    if target.glance("run") is None:
        recipe = parent.recipe.changed(**changes)
        target.begin(recipe.to_yaml(), facts(command, recipe, str(parent.device)))


def folder_name(budget: str) -> str:
    """``flops=50%`` as the name of a folder: ``flops-50pc``."""
    return re.sub(r"[^a-z0-9.]+", "-", budget.strip().lower().replace("%", "pc")).strip("-")


def targets_of(run: Run) -> list[Path]:
    """The folders of all targets that ``run`` has, in the order of their names."""
    return sorted(path.parent for path in run.path(FOLDER).glob("*/run.json"))


def known_scores(run: Run) -> tuple[list[Trial], str]:
    """The scored trials of a run and of its targets, and by what they are ranked: accuracies and losses cannot be
    compared, so they are those of which there are more. Of a configuration that was scored twice, the first counts."""
    found: dict[str, dict[tuple[int, ...], Trial]] = {run.recipe.rank_by: {}}
    for folder in [run.folder, *targets_of(run)]:
        if (folder / TRIALS).is_file():
            searched = RunFolder(folder)
            known = found.setdefault(searched.ranked_by, {})
            for trial in searched.trials():
                if trial.score is not None:
                    known.setdefault(tuple(trial.widths), trial)
    ranked_by = max(found, key=lambda by: len(found[by]))
    return list(found[ranked_by].values()), ranked_by


def target_row(target: Run) -> dict[str, Any]:
    """What a page says of a finished target: the network that ships, and uniform scaling beside it."""
    compared = target.read("compare")
    rows = {row["name"]: row for row in compared["networks"]}
    kept = {name: {key: rows[name][key] for key in ("score", "loss", "costs", "latency_ms")} for name in rows}
    if "uniform-8" in kept:  # of uniform scalings, the better one stands for both
        sign = 1 if compared["metric"]["higher_is_better"] else -1
        kept["uniform"] = max(
            kept.get("uniform", kept["uniform-8"]), kept["uniform-8"], key=lambda n: sign * n["score"]
        )
    return {
        "budget": target.recipe.budgets[0],
        "folder": str(Path(FOLDER) / target.folder.name),
        "chosen": compared["chosen"],
        "metric": compared["metric"],
        "networks": kept,
    }
