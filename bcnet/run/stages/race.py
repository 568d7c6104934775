"""The race of finalists: what ships has been trained beside its rivals."""

from __future__ import annotations

import time
from dataclasses import replace
from functools import partial
from typing import Any

from bcnet.run.session import Run
from bcnet.run.stages.budgets import holding
from bcnet.run.stages.common import CHECKPOINTS, fast_step, rows_of
from bcnet.run.stages.configurations import finalists
from bcnet.run.stages.retrain import fine_tuning
from bcnet.training.race import Finalist, Racing
from bcnet.utils.progress import training_steps

SPARE = 2
"""How many more than race are measured, where a budget is of latency."""


class _InFolder:
    """The measurements of a race as results of the run: RUN/race/ROUND-NAME.json."""

    def __init__(self, run: Run):
        self.run = run

    def known(self, name: str) -> dict[str, Any] | None:
        if not self.run.done(f"race/{name}"):
            return None
        return {key: value for key, value in self.run.read(f"race/{name}").items() if key != "version"}

    def keep(self, name: str, result: dict[str, Any]) -> None:
        self.run.write(f"race/{name}", result)


def _admitted(run: Run, most: int) -> dict[str, list[int]]:
    """The first of those that may race, without those that a measured budget of latency excludes: what wins, ships.
    Where it excludes all, which the search has told, all race."""
    some = dict(list(finalists(run).items())[: most + SPARE])
    held = holding(run, "finalists", some)
    slow = [name for name in list(some)[:most] if name not in held]
    if slow and held:
        run.listener.note(f"slower than the budget when measured, so left out of the race: {', '.join(slow)}")
    return {name: some[name] for name in (held or list(some))[:most]}


def race(run: Run) -> None:
    """Fine-tune the finalists side by side; the winner, trained to the end, is what was found."""
    r, start = run.recipe, time.monotonic()
    assert r.race is not None
    widths = _admitted(run, r.race.finalists)
    if len(widths) == 1:
        run.listener.note("there is one finalist, so there is nothing to race against")
    config, teacher = fine_tuning(run)
    data = replace(run.data, val=run.judged)
    racing = Racing(r.race, data, config, task=run.task_given, teacher=teacher, by=r.rank_by, fast=fast_step(run))
    entries = [Finalist(name, partial(run.inherited, chosen)) for name, chosen in widths.items()]
    told = {name: training_steps(run.listener, f"race: {name}") for name in widths}
    winner = racing.run(
        entries,
        run.path(CHECKPOINTS, "race"),
        _InFolder(run),
        progress=lambda name, state: told[name](state),
    )
    measured = [dict(row) for entry in entries for row in entry.rounds]
    curve = [point for row in measured for point in row.pop("curve", [])] + winner.curve
    seconds = time.monotonic() - start
    result = {"winner": winner.name, "by": r.rank_by, "finalists": widths, "rounds": measured, "seconds": seconds}
    run.write("race", {**result, "curve": curve, "history": rows_of(winner.history)}, winner.network.state_dict())
    run.remove(f"{CHECKPOINTS}/race")
