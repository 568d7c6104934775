"""A stage of a run as a command of its own, and what every command that works on a run does."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from bcnet.cli import options
from bcnet.cli.console import console, interruptible, print_json, table

if TYPE_CHECKING:
    from bcnet.run.session import Run

STAGES = {
    "trace": "Find the width variables of a run's network, and check its budgets.",
    "train": "Train the supernet of a run.",
    "search": "Search the widths of a run.",
    "retrain": "Train what a run found, and what it is compared with.",
    "compare": "Measure the networks of a run side by side.",
    "report": "Write the report of a run.",
}
"""Stages and what their commands do; exporting has options of its own (:mod:`bcnet.cli.export`)."""


def stage_command(name: str) -> Callable[..., None]:
    """The command of a stage."""

    def command(
        run: Annotated[Path, options.RUN],
        again: Annotated[bool, options.AGAIN] = False,
        device: Annotated[str | None, options.DEVICE] = None,
        as_json: Annotated[bool, options.JSON] = False,
    ) -> None:
        from bcnet.run.session import Run

        work(Run(run, device), name, as_json, again)

    command.__doc__ = f"{STAGES[name]}\n\nEarlier stages that are not done yet are done first."
    return command


def work(run: Run, until: str, as_json: bool, again: bool = False, log: str = "") -> None:
    """Run the stages up to ``until`` and print what there is."""
    from bcnet.run.folder import RunFolder
    from bcnet.run.pipeline import run_stages
    from bcnet.utils.progress import TensorBoard, shown

    RunFolder.open(run.folder)
    with interruptible(f"go on with `bcnet run --resume {run.folder}`"), shown() as screen, run.lock():
        run.listener = TensorBoard(screen, run.path(log)) if log else screen
        with closing(run.listener):
            run_stages(run, until, again)
    if as_json:
        print_json(_summary(run))
    else:
        _print_summary(run, until)


def _summary(run: Run) -> dict[str, Any]:
    from bcnet.run.pipeline import STAGES

    result: dict[str, Any] = {"run": str(run.folder), "done": [name for name in STAGES if run.done(name)]}
    if run.done("compare"):
        result |= {key: run.read("compare")[key] for key in ("scored_on", "networks")}
    if run.done("report"):
        result["report"] = _report_path(run)
    return result


def _report_path(run: Run) -> str | None:
    path = run.read("report")["path"]
    return None if path is None else str(run.folder / path)


def _print_summary(run: Run, until: str) -> None:
    from bcnet.report.words import comparison
    from bcnet.run.report import report_data

    out = console()
    if not run.done("compare"):
        out.print(f"{until} is done: {run.folder}", soft_wrap=True)
        return
    compared = run.read("compare")
    score = "accuracy" if "top5" in compared["networks"][0] else "score"
    predicted = all("predicted_ms" in row for row in compared["networks"])
    rows = [
        (
            row["name"],
            f"{row['score']:.2%}" if score == "accuracy" else f"{row['score']:.6g}",
            row["costs"]["flops"],
            row["costs"]["params"],
            *([f"{row['predicted_ms']:.3g} ms"] if predicted else []),
            f"{row['latency_ms']:.3g} ms",
        )
        for row in compared["networks"]
    ]
    budgets = ", ".join(run.recipe.budgets)
    images = "test" if compared["scored_on"] == "test" else "validation"
    table(
        f"{run.recipe.model} within {budgets}, trained from scratch; {score} on {images} images",
        [
            "network",
            score,
            "FLOPs",
            "parameters",
            *(["latency, predicted", "latency, measured"] if predicted else ["latency"]),
        ],
        rows,
    )
    for sentence in comparison(report_data(run)):
        out.print(" ".join(sentence.split()), soft_wrap=True, highlight=False)
    report = _report_path(run) if run.done("report") else None
    out.print(f"report: {report}" if report else f"run: {run.folder}", soft_wrap=True)
