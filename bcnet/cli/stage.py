"""A stage of a run as a command of its own, and what every command that works on a run does."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from contextlib import closing, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from bcnet.cli import options
from bcnet.cli.console import console, interruptible, print_json, table
from bcnet.errors import BcnetError

if TYPE_CHECKING:
    from bcnet.run.recipe import Recipe
    from bcnet.run.session import Run

STAGES = {
    "trace": "Find the layers of a run's network whose widths can vary, and check its budgets.",
    "given": "Score the network of a run as it is given, and train it first where it has learnt nothing.",
    "train": "Train the supernet of a run: one network whose weights all widths share, by which they are scored.",
    "search": "Search for the widths that score best within the budget of a run.",
    "rate": "Choose the learning rate that networks of a run are fine-tuned at, by short probes.",
    "race": "Train the best few that a run's search found side by side, until one is left.",
    "retrain": "Train the slim network of a run to the end, and those that it is compared with.",
    "targets": "Find a slim network for every target of a run, that is, for each of its budgets.",
    "compare": "Put the scores, costs and measured latencies of a run's networks side by side.",
}
"""Stages and what their commands do; export and report have commands of their own."""


def stage_command(name: str) -> Callable[..., None]:
    """The command of a stage."""

    def command(
        run: Annotated[Path, options.RUN],
        again: Annotated[bool, options.AGAIN] = False,
        device: Annotated[str | None, options.DEVICE] = None,
        trust: Annotated[bool, options.TRUST] = False,
        as_json: Annotated[bool, options.JSON] = False,
    ) -> None:
        work(open_run(run, device, trust), name, as_json, again=again)

    command.__name__ = name
    command.__doc__ = f"{STAGES[name]}\n\nEarlier stages are done first where they are missing."
    return command


def open_run(folder: Path, device: str | None, trust: bool) -> Run:
    """A run that was begun before, on this machine or on somebody else's."""
    from bcnet.run.folder import RunFolder
    from bcnet.run.session import Run

    run = Run(RunFolder.open(folder).folder, device)
    require_trust(run.recipe, trust)
    return run


def require_trust(recipe: Recipe, trust: bool) -> None:
    """Raise a :class:`BcnetError` where a recipe names a Python file that the user has not agreed to run."""
    if recipe.python_file is not None and not trust:
        raise BcnetError(f"this would run the Python file {recipe.python_file}: add --trust if you know what it does")


def work(run: Run, until: str, as_json: bool, *, again: bool = False, log: str = "", planned: bool = False) -> None:
    """Run the stages up to ``until`` and print what there is; ``planned`` says first how long that will take."""
    from bcnet.run.pipeline import run_stages
    from bcnet.run.plan import tell_plan
    from bcnet.training import distributed
    from bcnet.utils.progress import Listener, TensorBoard, terminal_listener

    first = distributed.main_process()
    screens = terminal_listener() if first else nullcontext(Listener())
    how = f"go on with `bcnet run --resume {_there(run)}`"
    with interruptible(how), screens as screen, run.lock():
        run.listener = TensorBoard(screen, run.path(log)) if log and first else screen
        with closing(run.listener):
            if planned:
                tell_plan(run, until)
            run_stages(run, until, again)
    if first:
        print_run(run, until, as_json)


def print_run(run: Run, until: str, as_json: bool) -> None:
    """Print what a run has come to, for people or as JSON."""
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
    from bcnet.report import words
    from bcnet.run.report import report_data

    out = console()
    if run.done("targets"):
        _print_targets(run)
        return
    if not run.done("compare"):
        out.print(f"{until} is done: {run.folder}{_next_step(run, until)}", soft_wrap=True)
        return
    compared, data = run.read("compare"), report_data(run)
    predicted = all("predicted_ms" in row for row in compared["networks"])
    rows = [
        (
            f"{row['name']} (ships)" if row["name"] == compared["chosen"] else row["name"],
            words.score(data, row["score"]),
            row["costs"]["flops"],
            row["costs"]["params"],
            *([f"{row['predicted_ms']:.3g} ms"] if predicted else []),
            f"{row['latency_ms']:.3g} ms",
        )
        for row in compared["networks"]
    ]
    budgets = ", ".join(run.recipe.budgets)
    table(
        f"{run.recipe.model} within {budgets}, {_began(run)}; {data.metric} on {data.scored_on}",
        [
            "network",
            data.metric,
            "FLOPs",
            "parameters",
            *(["latency, predicted", "latency, measured"] if predicted else ["latency"]),
        ],
        rows,
    )
    for sentence in words.closing(data):
        out.print(" ".join(sentence.split()), soft_wrap=True, highlight=False)
    _print_end(run, run.folder)


def _print_end(run: Run, slim: Path) -> None:
    """Where the results lie, and what to type next: how to export the network of the run in ``slim``."""
    from bcnet.run.recipe import PYTHON

    report = _report_path(run) if run.done("report") else None
    console().print(f"report: {report}" if report else f"run: {run.folder}", soft_wrap=True)
    form = "" if run.recipe.model == PYTHON else " --to onnx"  # which needs the network's own code
    console().print(f"next: bcnet export {_there(run, slim)}{form}", soft_wrap=True)


def _next_step(run: Run, until: str) -> str:
    """What to type next."""
    from bcnet.run.pipeline import stages_of

    names = stages_of(run.recipe)
    following = names[names.index(until) + 1 :]
    if not following:
        return ""
    return f" (next: `bcnet {following[0]} {_there(run)}`, or all: `bcnet run --resume {_there(run)}`)"


def _there(run: Run, folder: Path | None = None) -> str:
    """A run's folder, or another one of it, as a command to copy names it; a Python file was trusted already."""
    return shlex.quote(str(folder or run.folder)) + (" --trust" if run.recipe.python_file else "")


def _began(run: Run) -> str:
    return "weights inherited" if run.recipe.start == "trained" else "trained from scratch"


def _print_targets(run: Run) -> None:
    """One line for every target: what ships, and uniform scaling beside it."""
    from bcnet.report import words

    rows, targets = [], run.read("targets")["targets"]
    for target in targets:
        slim, uniform = target["networks"][target["chosen"]], target["networks"].get("uniform")
        figures = [words.figure(target["metric"], network["score"]) if network else "-" for network in (slim, uniform)]
        rows.append((target["budget"], target["chosen"], *figures, slim["costs"]["flops"], slim["costs"]["params"]))
    title = f"{run.recipe.model}, {_began(run)}: a slim network for every target"
    table(title, ["target", "ships", targets[0]["metric"]["name"], "uniform", "FLOPs", "parameters"], rows)
    _print_end(run, run.folder / targets[0]["folder"])
