"""A resumed run begins with what is intact: what is damaged or missing is made again.

Each stage builds on those before it, so where one has lost something, it and all after it are done again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from bcnet.errors import BcnetError
from bcnet.run.folder import DamagedResult, RunFolder
from bcnet.run.recipe import Recipe
from bcnet.run.schema import SCHEMAS
from bcnet.run.session import Run, command_line, facts
from bcnet.run.stages.common import CHECKPOINTS
from bcnet.search.store import TRIALS, DamagedTrials, TrialStore
from bcnet.utils.files import UNFINISHED

SEARCH = "search"
FILES = (".json", ".safetensors", ".sqlite", ".yaml", ".html", ".md", ".onnx", ".pt2")
"""How the names of a run's files end; none of its folders is named like that."""


def restore_start(run: Run) -> None:
    """Make run.json and recipe.yaml agree again; each can be restored from the other.

    The caller holds ``run.lock()``, so unfinished files are those of processes that have ended.
    """
    for path in sorted(run.folder.rglob("*")):
        if path.name.startswith(UNFINISHED) and path.is_file():
            path.unlink(missing_ok=True)
        if path.suffix in FILES and path.is_dir():
            raise BcnetError(f"{path} is a folder, but a file belongs there: move it away and resume the run")
    if run.glance("run") is None:
        run.begin(run.recipe_text, facts(command_line(), run.recipe, str(run.device)))
        run.listener.note("run.json was damaged or missing and is written anew; when and how the run began is lost")
        return
    written = run.recipe_text
    try:
        found = Recipe.read_text(run.path("recipe.yaml"))
    except BcnetError:
        found = None
    if found != written:
        if found is not None:
            run.write_file("recipe.changed.yaml", found.encode())
        run.write_file("recipe.yaml", written.encode())
        kept = "" if found is None else "; the other is kept as recipe.changed.yaml"
        run.listener.note(f"recipe.yaml is not the one this run began with, which is put back{kept}")


def mend(run: Run, stages: Sequence[str], forget: Callable[[Run, str], None]) -> None:
    """Remove what is damaged and, with ``forget(run, stage)``, all that builds on it, with a note.

    The caller holds ``run.lock()``. A stage that was never done, with none done after it, has lost nothing.
    """
    for number, stage in enumerate(stages):
        later = stages[number + 1 :]
        problems = [*(_beside(run, stages) if number == 0 else ()), *_problems(run, stage)]
        done_after = next((name for name in later if run.done(name)), None)
        if not run.done(stage) and done_after is not None:
            problems.append(f"{run.path(stage)}.json is missing, though {done_after}.json stands on it")
        if problems:
            run.discard(stage)
            run.remove(f"{CHECKPOINTS}/{stage}")  # they may be later than what was lost
            if later:
                forget(run, later[0])
            follows = ", and so is what follows from it" if done_after else ""
            run.listener.note(f"{problems[0]}: {stage} is done again{follows}")
            return


def _beside(run: Run, stages: Sequence[str]) -> Iterator[str]:
    """Damaged results that are not a stage's own, such as latency.json, which the first stage makes."""
    for name in sorted(SCHEMAS.keys() - {*stages, "run"}):
        if not run.path(f"{name}.json").is_file():
            continue
        if reason := _problem(run, name):
            run.discard(name)
            yield reason


def _problems(run: Run, stage: str) -> Iterator[str]:
    """What a stage has lost; damaged parts are removed, intact ones are kept."""
    for part in run.parts(stage):
        if reason := _problem(run, f"{stage}/{part}"):
            run.discard(f"{stage}/{part}")
            yield reason
    if stage == SEARCH and (reason := _problem_of_trials(run)):
        for path in run.folder.glob(f"{TRIALS}*"):
            path.unlink()
        yield reason
    if run.done(stage) and (reason := _problem(run, stage)):
        yield reason


def first_loss(run: RunFolder, stages: Sequence[str]) -> str | None:
    """The first thing that a finished run has lost, in words; None if all of ``stages`` are intact."""
    for stage in stages:
        if not run.done(stage):
            return f"{run.path(stage)}.json is missing"
        reason = (_problem_of_trials(run) if stage == SEARCH else None) or _problem(run, stage)
        if reason is not None:
            return reason
    return None


def _problem(run: RunFolder, name: str) -> str | None:
    try:
        run.check(name)
    except DamagedResult as error:
        return error.cause
    return None


def _problem_of_trials(run: RunFolder) -> str | None:
    path = run.path(TRIALS)
    if not path.exists():
        return f"{path} is missing" if run.done(SEARCH) else None
    if not path.is_file():
        return f"{path} is not a regular file"
    try:
        with TrialStore(path) as store:
            store.trials()
    except DamagedTrials as error:
        return error.cause
    return None
