"""From a network and a budget to a slim network: the stages in their order, and the folder they leave.

trace → train → search → retrain → compare → export → report. A run folder holds::

    recipe.yaml              the exact recipe: `bcnet run --recipe RUN/recipe.yaml` repeats the run
    run.json                 versions, command, seed, commit, machine, date, and the recipe again
    latency.json             the table of latencies that was measured, where a budget names latency
    trace.json              width variables, budgets, feasibility, widths and costs of the full and smallest network
    train.json               the supernet's method and history (epoch, loss, rate)
    train.safetensors        its weights (net.*) and the loss log (log.*: steps, widths, losses, normalised)
    search.json              best trial, Pareto front, prior, log-width model, scores of full and uniform, notes
    trials.sqlite            every trial of the search, as it happened (bcnet.search.TrialStore)
    retrain/NAME.json        full, uniform, balanced, random, found: widths, score, loss, costs, history
    retrain/NAME.safetensors their weights, under the names of the given network
    retrain.json             which of them there are
    compare.json             one row per network: score, costs, latency_ms (and predicted_ms)
    export.json, export/     what was exported
    report.json, report.html the page to look at
    checkpoints/             training that is not finished; removed when it is
    lock                     the process at work

A stage is done when its JSON is there, and it, its tensors and its files have the digests it keeps
(:mod:`bcnet.run.folder`); what is damaged or missing is made again, with a note (:mod:`bcnet.run.mending`). A run
that was stopped anywhere goes on with the first stage that is not done, and within training and search where the last
checkpoint or trial was; on a CPU it ends bit for bit as if never stopped.
"""

from __future__ import annotations

import errno
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from bcnet.errors import BcnetError
from bcnet.run import stages
from bcnet.run.mending import mend
from bcnet.run.session import Run
from bcnet.utils.random_state import kept_random_state

STAGES: dict[str, tuple[Callable[[Run], None], str]] = {
    "trace": (stages.trace_network, "find the width variables"),
    "train": (stages.train, "train the supernet"),
    "search": (stages.find, "search widths within the budget"),
    "retrain": (stages.retrain_all, "train the networks from scratch"),
    "compare": (stages.compare, "measure and compare"),
    "export": (stages.export, "export the slim network"),
    "report": (stages.report, "write the report"),
}


@kept_random_state()
def run_stages(run: Run, until: str = "report", again: bool = False) -> None:
    """Run every stage up to ``until`` that is not done yet or is damaged; ``again`` forgets that one and all after it
    first.

    The caller holds ``run.lock()``.
    """
    check_stage(until)
    names = list(STAGES)
    mend(run, names, forget)
    if again:
        forget(run, until)
    for name in names[: names.index(until) + 1]:
        if not run.done(name):
            stage, about = STAGES[name]
            run.listener.stage(name, about)
            with _threads(run.recipe.threads), _clear_errors(run), _warnings_as_notes(run):
                stage(run)


def check_stage(name: str) -> None:
    """A :class:`BcnetError` where there is no such stage."""
    if name not in STAGES:
        raise BcnetError(f"there is no stage {name!r:.40}: there are {', '.join(STAGES)}")


def forget(run: Run, stage: str) -> None:
    """Remove the results of a stage and of all that stand on it."""
    names = list(STAGES)
    for name in reversed(names[names.index(stage) :]):
        run.remove(name)
        run.remove(f"{stages.CHECKPOINTS}/{name}")
    if names.index(stage) <= names.index("search"):
        for path in run.folder.glob("trials.sqlite*"):
            path.unlink()


@contextmanager
def _threads(number: int | None) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(number or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def _clear_errors(run: Run) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise BcnetError(f"no space is left for {run.folder}: free some and resume, what is there is kept") from None


@contextmanager
def _warnings_as_notes(run: Run) -> Iterator[None]:
    """Warnings of bcnet's own become notes as they happen."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.simplefilter("always", UserWarning)

        def show(message: Warning | str, category: type[Warning], filename: str, *_: object, **__: object) -> None:
            if "bcnet" in filename:
                run.listener.note(" ".join(str(message).split()))

        # catch_warnings puts the old function back.
        warnings.showwarning = show
        yield
