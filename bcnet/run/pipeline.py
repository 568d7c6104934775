"""From a network and a budget to a slim network: the stages in their order, and the folder they leave.

trace → given → (train) → search → rate → race → retrain → compare → export → report; the paper's way has train, but
no given, rate and race. A run folder holds::

    recipe.yaml              the exact recipe: `bcnet run --recipe RUN/recipe.yaml` repeats the run
    run.json                 versions, command, seed, commit, machine, date, and the recipe again
    latency.json             the table of latencies that was measured, where a budget names latency
    trace.json               width variables, budgets, feasibility, widths and costs of the full and smallest network
    given.json               what the network knew as it was given, and after training where it knew nothing
    given.safetensors        its weights: where slim networks begin, and their teacher
    train.json               the supernet's method and history (epoch, loss, rate)
    train.safetensors        its weights (net.*) and the loss log (log.*: steps, widths, losses, normalised)
    search.json              best trial, Pareto front, prior, log-width model, scores of full and uniform, notes
    rate.json                the learning rate of fine-tuning, and the losses of the probes it was chosen by
    race.json                finalists, what each had on validation after every round, the winner's history
    race.safetensors         the winner's weights; race/ROUND-NAME.json are the rounds as they end
    trials.sqlite            every trial of the search, as it happened (bcnet.search.TrialStore)
    retrain/NAME.json        full, uniform, balanced, random, found: widths, score, loss, costs, history
    retrain/NAME.safetensors their weights, under the names of the given network
    retrain.json             which of them there are, and which ships (chosen)
    compare.json             one row per network: score, costs, latency_ms (and predicted_ms)
    export.json, export/     what was exported
    report.json, report.html the page to look at
    targets.json, targets/   with several targets, or after `bcnet pick`: a run folder for each
    checkpoints/             training that is not finished; removed when it is
    lock                     the process at work

A stage is done when its JSON is there, and it, its tensors and its files have the digests it keeps
(:mod:`bcnet.run.folder`); what is damaged or missing is made again, with a note (:mod:`bcnet.run.mending`). A run
that was stopped anywhere goes on with the first stage that is not done, and within training and search where the last
checkpoint or trial was; on a CPU it ends bit for bit as if never stopped.
"""

from __future__ import annotations

import errno
import shlex
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from bcnet.errors import BcnetError
from bcnet.latency.timing import threads
from bcnet.run.folder import RunFolder
from bcnet.run.mending import first_loss, mend, restore_start
from bcnet.run.recipe import PYTHON, Recipe
from bcnet.run.session import Run, limits_latency
from bcnet.run.stages import compare, given, race, rate, retrain, search, supernet, trace
from bcnet.run.stages.common import CHECKPOINTS
from bcnet.run.targets import FOLDER, SHARED, Target, folder_name, known_scores, open_target, target_row
from bcnet.search.store import TRIALS
from bcnet.training import distributed
from bcnet.utils.random_state import kept_random_state

STAGES: dict[str, tuple[Callable[[Run], None], str]] = {
    "trace": (trace.trace_network, "find the width variables"),
    "given": (given.score_given, "score the network as it is given"),
    "train": (supernet.train, "train the supernet"),
    "search": (search.find, "search widths within the budget"),
    "rate": (rate.choose, "choose the learning rate of fine-tuning"),
    "race": (race.race, "race the finalists"),
    "retrain": (retrain.retrain_all, "train the networks that are compared"),
    "targets": (lambda run: run_targets(run), "a slim network for every target"),
    "compare": (compare.compare, "measure and compare"),
    "export": (compare.export_network, "export the slim network"),
    "report": (compare.report_run, "write the report"),
}
TOGETHER = ("given", "train", "search", "rate", "race", "retrain", "targets")
"""Stages that several processes share; only the first process does the others."""


@kept_random_state()
def run_stages(run: Run, until: str = "report", again: bool = False) -> None:
    """Run every stage up to ``until`` that is not done yet or is damaged; ``again`` first forgets ``until`` and all
    after it.

    The caller holds ``run.lock()``.
    """
    distributed.decide(lambda: restore_start(run))
    names = stages_of(run.recipe)
    if until not in names:
        raise BcnetError(f"this run has no stage {until!r:.40}: it has {', '.join(names)}")
    distributed.decide(lambda: _mend(run, names))
    if again:
        distributed.decide(lambda: forget(run, until))
    for name in names[: names.index(until) + 1]:
        # One process decides for all: a late one would see what is made meanwhile.
        if distributed.decide(partial(run.done, name)):
            continue
        stage, about = STAGES[name]
        run.listener.stage(f"{run.recipe.budgets[0]}: {name}" if isinstance(run, Target) else name, about)
        with threads(run.recipe.threads), _clear_errors(run), _warnings_as_notes(run):
            if name in TOGETHER:
                stage(run)
            else:
                distributed.decide(partial(stage, run))


def _mend(run: Run, names: list[str]) -> None:
    """Forget what is damaged or lost in a run's own stages and in its targets."""
    mend(run, _own(names) if isinstance(run, Target) else names, forget)
    if not run.done("targets"):
        return
    lost = next((reason for budget in run.recipe.targets if (reason := _lost_of_target(run, budget))), None)
    if lost is not None:
        run.discard("targets")
        forget(run, "report")
        run.listener.note(f"{lost}: targets is done again, and so is what follows from it")


def _lost_of_target(run: Run, budget: str) -> str | None:
    target = RunFolder(run.path(FOLDER, folder_name(budget)))
    if target.glance("run") is None:
        return f"{target.path('run.json')} is damaged or missing"
    names = _own(stages_of(target.recipe))
    return first_loss(target, names[: names.index(_last(run)) + 1])


def _own(names: list[str]) -> list[str]:
    """The stages that a target does not share with its parent."""
    return [name for name in names if name not in SHARED]


def _last(run: Run) -> str:
    """The last stage of a target; a run from Python is exported and reported on demand."""
    return "compare" if run.recipe.model == PYTHON else "report"


def stages_of(recipe: Recipe) -> list[str]:
    """The stages of a run of this recipe, in order."""
    searches, trained = recipe.allot is None, recipe.start == "trained"
    wanted = {
        "given": trained,
        "train": searches and recipe.scorer == "supernet",
        "rate": trained and recipe.retrain.lr is None,
        "race": searches and trained and recipe.race is not None,
        "targets": bool(recipe.targets),
    }
    names = ["trace", "given", "train", "targets", "report"] if recipe.targets else list(STAGES)
    return [name for name in names if wanted.get(name, True)]


def run_targets(run: Run) -> None:
    """Search, race and train for every target in turn; each is a run of its own in RUN/targets."""
    rows = []
    for budget in run.recipe.targets:
        run.listener.note(f"target {budget}")
        target = open_target(run, budget, run.read("run")["command"])
        run_stages(target, _last(run))
        rows.append(target_row(target))
    run.write("targets", {"targets": rows})


def pick(run: Run, budget: str, widths: Sequence[int] | None = None) -> Target:
    """A slim network for one more budget: at ``widths`` (L,), or else chosen from the scores that ``run`` already has;
    nothing is repeated."""
    for name in SHARED:
        if run.done(name):
            run.check(name)
    scored, ranked_by = known_scores(run)
    if not scored:
        if run.recipe.allot is not None or run.done("search") or run.done("targets"):
            nothing = "searched nothing, so it has no scores to pick from"
            raise BcnetError(f"{run.folder} {nothing}: begin a run with --budget {budget}")
        again = f"`bcnet run --resume {shlex.quote(str(run.folder))}`"
        raise BcnetError(f"{run.folder} has no scores to pick from yet: {again} first")
    if limits_latency(budget) and not run.done("latency"):
        raise BcnetError(f"latency was not measured in {run.folder}: begin a run with --budget {budget}")
    within = run.within([budget])
    within.check()
    asked, changes = [], {}
    if widths is not None:
        if not within.feasible(run.space.check(widths)[None])[0]:
            raise BcnetError(f"these widths exceed {budget}: name a larger budget, or smaller widths")
        asked, changes = ["--widths", ",".join(map(str, widths))], {"race": None}  # whose winner might have others
    target = open_target(run, budget, ["bcnet", "pick", str(run.folder), "--budget", budget, *asked], **changes)
    run_stages(target, "trace")
    if not target.done("search"):
        search.choose_known(target, scored, ranked_by, widths)
    elif widths is not None and target.read("search")["best"]["widths"] != list(widths):
        raise BcnetError(f"{target.folder} holds other widths for {budget}: remove that folder, or name another budget")
    run_stages(target, stages_of(target.recipe)[-1])
    return target


def check_stage(name: str) -> None:
    """Raise a :class:`BcnetError` where no run has such a stage."""
    if name not in STAGES:
        raise BcnetError(f"there is no stage {name!r:.40}: there are {', '.join(STAGES)}")


def forget(run: Run, stage: str) -> None:
    """Remove the results of a stage and of all that build on it."""
    names = list(STAGES)
    for name in reversed(names[names.index(stage) :]):
        run.remove(name)
    for name in _checkpoints(run, names[names.index(stage) :]):
        run.remove(f"{CHECKPOINTS}/{name}")
    if names.index(stage) <= names.index("search"):
        for path in run.folder.glob(f"{TRIALS}*"):
            path.unlink()


def _checkpoints(run: Run, names: list[str]) -> list[str]:
    """The checkpoints of these stages; those of the compared networks are named after them."""
    found = [path.name for path in run.path(CHECKPOINTS).glob("*")]
    return [name for name in found if (name if name in STAGES else "retrain") in names]


@contextmanager
def _clear_errors(run: Run) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise BcnetError(f"no space is left for {run.folder}: free some and resume, what is there is kept") from None
    except RuntimeError as error:
        if not distributed.lost_another(error):
            raise
        raise BcnetError("another process of this run has ended: see why, and resume, what is there is kept") from None


@contextmanager
def _warnings_as_notes(run: Run) -> Iterator[None]:
    """Turn bcnet's own warnings into notes as they happen."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.simplefilter("always", UserWarning)

        def show(message: Warning | str, category: type[Warning], filename: str, *_: object, **__: object) -> None:
            if "bcnet" in filename:
                run.listener.note(" ".join(str(message).split()))

        # catch_warnings puts the old function back.
        warnings.showwarning = show
        yield
