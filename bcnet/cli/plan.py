"""What a run will take, printed alone: ``bcnet run --plan``."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from bcnet.cli.console import console, print_json, table
from bcnet.utils.progress import Lines, Listener

LONG = 3600.0
"""Seconds from which on a plan says what would take less."""

if TYPE_CHECKING:
    from bcnet.run.recipe import Recipe


class _Notes(Listener):
    """Prints notes, and nothing of the steps that are only tried."""

    def note(self, text: str) -> None:
        Lines().note(text)


def print_plan(recipe: Recipe, device: str | None, as_json: bool) -> None:
    """Measure some steps of what ``recipe`` asks for and print the plan; nothing is left behind."""
    from bcnet.run.pipeline import STAGES, run_stages
    from bcnet.run.plan import make_plan
    from bcnet.run.session import Run, command_line, facts
    from bcnet.search.constraints import format_cost
    from bcnet.utils.progress import duration

    with tempfile.TemporaryDirectory(prefix="bcnet-plan-") as folder:
        run = Run(Path(folder) / "run", device)
        run.listener = _Notes()
        Run.create(run.folder, recipe, facts(command_line(), recipe, str(run.device)))
        with run.lock():
            run_stages(run, "trace")
            plan = make_plan(run)
    if as_json:
        print_json(plan.to_dict())
        return
    rows = [(name, STAGES[name][1], duration(seconds)) for name, seconds in plan.seconds.items()]
    table(f"{recipe.model} on {recipe.data}: about {duration(plan.total)}", ["stage", "what for", "time"], rows)
    memory = f"memory: {format_cost('memory', plan.memory)}, " if plan.memory else ""
    disk = f"disk: {format_cost('memory', plan.disk)}"
    console().print(f"{memory}{disk}; from some steps on this machine, as busy as it is now", soft_wrap=True)
    if plan.advice:
        console().print(plan.advice, soft_wrap=True)
    if plan.total > LONG:
        console().print("shorter: --effort quick, --compare none, smaller images (loading.image_size)", soft_wrap=True)
