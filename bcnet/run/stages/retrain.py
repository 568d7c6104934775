"""Training the networks that are compared: from scratch, or from what they inherit."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any, get_args

import numpy as np
from torch import nn

from bcnet.data.source import Later, Source
from bcnet.run.recipe import Compared
from bcnet.run.session import Run
from bcnet.run.stages.budgets import holding
from bcnet.run.stages.common import CHECKPOINTS, fast_step, keep_network, plain_training, rows_of
from bcnet.run.stages.configurations import configuration
from bcnet.run.weights import load_into
from bcnet.training.optim import Optimisation
from bcnet.training.retraining import Retraining, retrain, train_random
from bcnet.utils.progress import training_steps

ONCE = ("full", "random")
"""Networks that are trained once however many ``repeats`` a recipe has: the first is no rival, the second a search."""


def retrain_all(run: Run) -> None:
    """Train what was found, and what it is compared with; each is a result of its own. The full network is among them
    wherever it is there anyway, as the given one or as a teacher."""
    there = {"full"} if run.recipe.start == "trained" or run.recipe.distillation is not None else set()
    names: list[str] = [name for name in get_args(Compared) if name in there.union(run.recipe.compare)]
    if {"uniform", "uniform-8"} <= set(names) and configuration(run, "uniform-8") == configuration(run, "uniform"):
        names.remove("uniform-8")
    for name in ["found", *names] if run.recipe.start == "trained" else [*names, "found"]:
        retrain_one(run, name)
        _repeat(run, name)
    run.write("retrain", {"networks": [*names, "found"], "chosen": _chosen(run, names)})


def retrain_one(run: Run, name: str) -> None:
    """Train ``found`` or a network of :data:`Compared`, unless that is done; the teacher, where there is one, must
    be."""
    if run.done(f"retrain/{name}"):
        return
    if run.recipe.start == "trained":
        _fine_tune(run, name)
    elif name == "random":
        _retrain_random(run)
    else:
        _train_fresh(run, name, _widths(run, name))


def trainings(run: Run, name: str) -> list[dict[str, Any]]:
    """What every training of the network ``name`` came to, the first one first."""
    again = [f"{name}-{number}" for number in range(2, run.recipe.repeats + 1)]
    return [run.read(f"retrain/{each}") for each in (name, *again) if run.done(f"retrain/{each}")]


def _repeat(run: Run, name: str) -> None:
    """Train a slim network again, with other batches and, from scratch, other first weights: chance has a size."""
    if name in ONCE:
        return
    widths = run.read(f"retrain/{name}")["widths"]
    inherits = run.recipe.start == "trained"
    for number in range(2, run.recipe.repeats + 1):
        again, start, seed = f"{name}-{number}", time.monotonic(), run.recipe.seed + 1000 * number
        if run.done(f"retrain/{again}"):
            continue
        config, teacher = fine_tuning(run) if inherits else _taught(run, name)
        network = run.inherited(widths) if inherits else run.fresh(widths, seed)
        source = Later(run.final_training, (number - 1) * run.recipe.retrain.epochs)
        _train(run, again, network, widths, replace(config, seed=seed), teacher, start, source)


def _chosen(run: Run, names: list[str]) -> str:
    """The best network within the budgets, latency as measured, by validation images that no network learnt from."""
    rivals = {name: run.read(f"retrain/{name}") for name in [*names, "found"] if name != "full"}
    if not all("val" in result for result in rivals.values()):
        return "found"
    held = holding(run, "rivals", {name: list(result["widths"]) for name, result in rivals.items()})
    rivals = {name: result for name, result in rivals.items() if name == "found" or name in held}
    sign, key = (1, "loss") if run.recipe.rank_by == "loss" else (-1, "score")
    means = {name: sign * np.mean([one["val"][key] for one in trainings(run, name)]) for name in rivals}
    return min(reversed(means), key=lambda name: means[name])


def fine_tuning(run: Run, chosen: Optimisation | None = None) -> tuple[Retraining, nn.Module | None]:
    """How inherited networks are trained, or would be by the settings ``chosen``, and their teacher, where the task can
    learn from one."""
    teacher = run.teacher()
    config = plain_training(run, chosen or _optimisation(run))
    return replace(config, distillation=None if teacher is None else run.recipe.distillation), teacher


def _optimisation(run: Run) -> Optimisation:
    """The recipe's settings, at the rate that was chosen where it names none."""
    given = run.recipe.retrain
    return given if given.lr is not None else replace(given, lr=run.read("rate")["lr"])


def _widths(run: Run, name: str) -> list[int]:
    return list(run.read("search")["best"]["widths"]) if name == "found" else configuration(run, name)


def _fine_tune(run: Run, name: str) -> None:
    """The given network itself as ``full``; a network that inherits from it otherwise."""
    start = time.monotonic()
    if name == "full":
        given = run.read("given")
        kept = {"widths": run.full.tolist(), "history": given["history"], "seconds": given["seconds"]}
        keep_network(run, name, run.inherited(run.full), kept)
        return
    if name == "found" and run.done("race"):
        _keep_winner(run)
        return
    widths = _widths(run, name)
    twin = next((r for r in _done(run) if r["widths"] == widths), None)
    if twin is not None:  # the same network, trained in the same way, would end the same
        network = run.network(twin["name"])
        keep_network(run, name, network, {"widths": widths, "history": twin["history"], "seconds": twin["seconds"]})
        return
    network = run.inherited(widths)
    config, teacher = fine_tuning(run)
    _train(run, name, network, widths, config, teacher, start)


def _keep_winner(run: Run) -> None:
    """The winner of the race is what was found."""
    raced = run.read("race")
    widths = raced["finalists"][raced["winner"]]
    network = run.inherited(widths)
    load_into(network, run.tensors("race"), run.path("race.safetensors"))
    kept = {"finalist": raced["winner"], "history": raced["history"], "seconds": raced["seconds"]}
    keep_network(run, "found", network, {"widths": widths, **kept})


def _done(run: Run) -> list[dict[str, Any]]:
    names = [*get_args(Compared), "found"]
    return [run.read(f"retrain/{name}") for name in names if name != "full" and run.done(f"retrain/{name}")]


def _train_fresh(run: Run, name: str, widths: list[int]) -> None:
    start = time.monotonic()
    config, teacher = _taught(run, name)
    _train(run, name, run.fresh(widths), widths, config, teacher, start)


def _taught(run: Run, name: str) -> tuple[Retraining, nn.Module | None]:
    """How networks are trained from scratch, and their teacher, the full network, where there is one."""
    config = _retraining(run)
    if name == "full":
        config = replace(config, distillation=None)
    return config, None if config.distillation is None else run.network("full")


def _train(
    run: Run,
    name: str,
    network: nn.Module,
    widths: list[int],
    config: Retraining,
    teacher: nn.Module | None,
    start: float,
    source: Source | None = None,
) -> None:
    history = retrain(
        network,
        source or run.final_training,
        config,
        run.task_given,
        teacher=teacher,
        folder=run.path(CHECKPOINTS, name),
        progress=training_steps(run.listener, name),
        fast=fast_step(run),
    )
    result = {"widths": widths, "history": rows_of(history), "seconds": time.monotonic() - start}
    keep_network(run, name, network, result)


def _retraining(run: Run) -> Retraining:
    return replace(plain_training(run, _optimisation(run)), distillation=run.recipe.distillation)


def _retrain_random(run: Run) -> None:
    """The paper's ``random``: several networks trained for a short while, the best of them to the end."""
    r, start = run.recipe, time.monotonic()
    config = _retraining(run)
    rng = np.random.default_rng([r.seed, 20])
    drawn = run.constraints.sample_full(rng, r.random.networks).tolist()
    told = [training_steps(run.listener, f"random {number + 1} of {len(drawn)}") for number in range(len(drawn))]
    best, network, scores, history = train_random(
        lambda number: run.fresh(drawn[number]),
        r.random,
        run.data,
        config,
        run.task_given,
        teacher=None if config.distillation is None else run.network("full"),
        folder=run.path(CHECKPOINTS, "random"),
        progress=lambda number, state: told[number](state),
    )
    tried = [{"widths": w, "score": s} for w, s in zip(drawn, scores, strict=True)]
    result = {"widths": drawn[best], "tried": tried, "history": rows_of(history), "seconds": time.monotonic() - start}
    keep_network(run, "random", network, result)
