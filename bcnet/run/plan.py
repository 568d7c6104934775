"""What a run will take, before it starts: minutes of every stage, memory and disk, from a few measured steps.

A few real steps of each kind of work are run on copies of the networks; the rest is arithmetic over the recipe. So the
plan is as accurate as these steps are typical: it does not know what else the machine will be doing.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import nn

from bcnet.latency.timing import threads
from bcnet.run.pipeline import TOGETHER, run_stages, stages_of
from bcnet.run.session import Run
from bcnet.run.stages.retrain import ONCE
from bcnet.run.stages.search import SCREENED, scored_beside
from bcnet.search.constraints import format_cost
from bcnet.supernet.training import SupernetTraining, train_supernet
from bcnet.training.distributed import world
from bcnet.training.optim import Optimisation
from bcnet.training.race import SETTLING
from bcnet.training.rate import USUAL, probe_length
from bcnet.training.retraining import Retraining, learnt, retrain
from bcnet.utils.progress import duration
from bcnet.utils.random_state import kept_random_state

STEPS, LONGEST = 4, 3.0
"""The most steps that are timed after a first one, and the seconds after which timing stops."""
OUTLASTS = 2.0
"""How many times as long as the fine-tuning of what ships choosing its widths takes where a plan says so: on small
networks five times as long a fine-tuning of uniform widths beat search, race and a short one by 2.9 points
(docs/results/rivals-small.md)."""


@dataclass(frozen=True)
class RunPlan:
    """Seconds by stage, and bytes: the peak of memory, and disk space in the run's folder; and what the time might be
    better spent on, if anything."""

    seconds: dict[str, float]
    memory: int
    disk: int
    advice: str = ""

    @property
    def total(self) -> float:
        return sum(self.seconds.values())

    def until(self, stage: str) -> RunPlan:
        """The plan of a run that stops after ``stage``."""
        names = list(self.seconds)
        last = names.index(stage) + 1 if stage in names else len(names)
        return replace(self, seconds={name: self.seconds[name] for name in names[:last]})

    def __str__(self) -> str:
        stages = ", ".join(f"{name} {duration(seconds)}" for name, seconds in self.seconds.items() if seconds >= 1)
        memory = f", memory: {format_cost('memory', self.memory)}" if self.memory else ""
        disk = f"disk: {format_cost('memory', self.disk)}"
        return f"about {duration(self.total)} ({stages or 'all at once'}){memory}, {disk}"

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


class _Enough(Exception):
    """Enough steps were timed."""


@dataclass(frozen=True)
class _Pace:
    """Seconds of a training step of the full network, a slim one and the supernet, of the teacher's answer to a batch,
    and of one pass over the validation images that a search scores on, or that judge."""

    full: float
    slim: float
    supernet: float
    taught: float
    look: float


def tell_plan(run: Run, until: str) -> None:
    """Tell a run's listener what is to come, unless that is next to nothing."""
    names = stages_of(run.recipe)
    if until not in names or world()[1] > 1:
        return
    ahead = {name for name in names[: names.index(until) + 1] if not run.done(name)}
    if not ahead.intersection(TOGETHER):
        return
    run_stages(run, "trace")
    plan = make_plan(run).until(until)
    run.listener.note(f"plan: {plan}")
    if plan.advice:
        run.listener.note(plan.advice)
    run.listener.expect(plan.seconds)


@kept_random_state()
def make_plan(run: Run) -> RunPlan:
    """Measure and add up; the run must have been traced."""
    with threads(run.recipe.threads):
        pace = _measured(run)
    trained = run.recipe.start == "trained"
    seconds = _inherited(run, pace) if trained else _from_scratch(run, pace)
    advice = _advice(run, seconds, pace) if trained and not run.done("search") else ""
    order = [name for name in stages_of(run.recipe) if name != "trace"]
    several = max(1, len(run.recipe.targets))
    if run.recipe.targets:
        own = sum(seconds.pop(name) for name in ("search", "rate", "race", "retrain") if name in seconds)
        seconds["targets"] = several * own
    known = {name: seconds.get(name, 0.0) for name in order if not run.done(name)}
    return RunPlan(known, _memory(run), several * _disk(run), advice)


def _measured(run: Run) -> _Pace:
    r = run.recipe
    slim = run.fresh(run.constraints.uniform())
    full = run.fresh(run.full)
    rate = Optimisation(epochs=r.retrain.epochs, lr=1e-4, bf16=r.retrain.bf16)
    batch = next(iter(run.data.train.batches(0, 0, run.device)))[0]
    start = time.perf_counter()
    seen = next(iter(run.data.val.batches(0, 0, run.device)))[0]
    loaded = time.perf_counter() - start
    taught = r.distillation is not None
    return _Pace(
        full=_training_step(run, full, rate),
        slim=_training_step(run, slim, rate),
        supernet=_supernet_step(run) if r.scorer == "supernet" else 0.0,
        taught=_forward(full, batch, run) if taught else 0.0,
        look=(_forward(slim, seen, run) + loaded) * len(run.data.val) / (2 if run.holds_out else 1),
    )


def _training_step(run: Run, network: nn.Module, rate: Optimisation) -> float:
    config = Retraining(optimisation=rate, seed=run.recipe.seed, channels_last=run.recipe.channels_last, engine="plain")
    return _timed(lambda tell: retrain(network, run.data.train, config, run.task_given, progress=tell))


def _supernet_step(run: Run) -> float:
    config = SupernetTraining(sampling=run.recipe.paths.sampling, optimisation=run.recipe.supernet, seed=0)
    net = run.fresh_supernet()
    return _timed(lambda tell: train_supernet(net, run.data.train, config, run.task_given, progress=tell))


def _timed(train: Callable[[Callable[[Any], None]], object]) -> float:
    """Seconds of a step of ``train``, which is stopped after a few; the first one, a warm-up, does not count."""
    times: list[float] = []

    def tell(state: Any) -> None:
        _ = state.loss  # waits for the device
        times.append(time.perf_counter())
        if len(times) > STEPS or (len(times) > 1 and times[-1] - times[0] > LONGEST):
            raise _Enough

    start = time.perf_counter()
    with suppress(_Enough):
        train(tell)
    return (times[-1] - times[0]) / (len(times) - 1) if len(times) > 1 else times[0] - start


@torch.no_grad()
def _forward(network: nn.Module, x: torch.Tensor, run: Run) -> float:
    network.eval()
    times = []
    for _ in range(3):
        start = time.perf_counter()
        network(x)
        if run.device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return min(times)


def _inherited(run: Run, pace: _Pace) -> dict[str, float]:
    """From a trained network: search among cut and healed networks, a race, and what is compared."""
    r, steps = run.recipe, len(run.data.train)
    epoch = _epoch(run, pace)
    found = {"given": 2 * pace.look + (0.0 if _knows(run) else r.given.epochs * steps * pace.full)}
    if r.scorer == "supernet":
        found |= {"train": r.supernet.epochs * steps * pace.supernet, "search": 2 * _evaluations(run) * pace.look}
    else:
        heal = r.healing.steps * pace.slim if r.scorer == "steps" else 0.0
        each = pace.look + r.healing.calibration * pace.slim / 3
        screened = SCREENED * r.search.population if r.search.strategy == "evolution" else 0
        found["search"] = (_evaluations(run) + scored_beside(r)) * (heal + each) + screened * each
    race = r.race
    if r.allot is not None:
        found["search"], race = 0.0, None
    others = r.repeats * sum(name != "full" for name in r.compare) + r.repeats - (race is not None)
    if r.retrain.lr is None:
        probe, batches = probe_length(r.retrain.epochs, steps)
        found["rate"] = USUAL * (probe * batches * (pace.slim + pace.taught) + pace.look)
    if race is not None:
        epochs, measured = race.work(r.retrain.epochs)
        settling = min(SETTLING, steps) * (pace.slim + pace.taught)
        found["race"] = epochs * epoch + measured * (settling + pace.look)
    return {**found, "retrain": others * r.retrain.epochs * epoch}


def _epoch(run: Run, pace: _Pace) -> float:
    """Seconds of an epoch of fine-tuning."""
    return len(run.data.train) * (pace.slim + pace.taught)


def _advice(run: Run, seconds: dict[str, float], pace: _Pace) -> str:
    """What choosing widths takes beside fine-tuning the network that ships, where it is much."""
    r, epoch = run.recipe, _epoch(run, pace)
    tuning = r.retrain.epochs * epoch
    raced = seconds.get("race", tuning) - tuning  # the race trains the winner to the end
    choosing = seconds["search"] + seconds.get("rate", 0.0) + raced
    if r.allot is not None or r.scorer == "supernet" or choosing < OUTLASTS * tuning:
        return ""
    longer = r.retrain.epochs + int(choosing / epoch)
    return (
        f"choosing widths takes {choosing / tuning:.0f} times as long as fine-tuning the network that ships: "
        f"{longer} epochs for uniform widths take as long and may give more (allot: uniform, retrain.epochs: {longer})"
    )


def _evaluations(run: Run) -> int:
    """How many configurations are scored at the most: a small space has no more."""
    return min(run.recipe.most_scored(len(run.data.train)), run.space.size)


def _knows(run: Run) -> bool:
    """Whether the given network need not be trained first."""
    if run.recipe.weights or run.recipe.pretrained or run.done("given"):
        return True
    return learnt(run.original.model, run.data.val, run.task)


def _from_scratch(run: Run, pace: _Pace) -> dict[str, float]:
    """From scratch, as in the paper: a supernet, a search in it, and networks trained from random weights."""
    r, steps = run.recipe, len(run.data.train)
    epochs = {name: r.retrain.epochs * (1 if name in ONCE else r.repeats) for name in ("found", *r.compare)}
    if "random" in epochs:
        epochs["random"] += r.random.networks * r.random.epochs
    return {
        "train": r.supernet.epochs * steps * pace.supernet,
        "search": 2 * _evaluations(run) * pace.look,
        "retrain": sum(n * steps * (pace.full if name == "full" else pace.slim) for name, n in epochs.items()),
    }


def _memory(run: Run) -> int:
    """The most this process, or its GPU, has held so far: the measured steps include the largest ones."""
    if run.device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(run.device))
    if sys.platform == "win32":
        return 0
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def _disk(run: Run) -> int:
    """The weights of what is trained; with momentum a checkpoint holds three times as much, and two are kept."""
    full, slim = (4 * int(run.space.costs["params"](w)[0]) for w in (run.full, run.constraints.uniform()))
    racing = 0 if run.recipe.race is None or run.recipe.start == "scratch" else run.recipe.race.finalists
    kept = full + (len(run.recipe.compare) + 2) * slim + 5 * 2**20  # trials, report, export
    return kept + max(2 * 3 * full, racing * 2 * 3 * slim)
