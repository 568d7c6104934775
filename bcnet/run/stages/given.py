"""The network as it was given: what it knows, and its training where it knows nothing."""

from __future__ import annotations

import time
from itertools import chain
from typing import Any

import torch
from torch import nn

from bcnet.errors import BcnetError
from bcnet.report import words
from bcnet.run.session import Run
from bcnet.run.stages.common import CHECKPOINTS, fast_step, plain_training, rows_of
from bcnet.space.state import duplicate
from bcnet.training.retraining import CLEAR, evaluate, retrain, standing
from bcnet.utils.progress import training_steps

FEWEST = 4
"""The fewest validation inputs that can tell networks apart."""
FEW = 40
"""Validation inputs below which a note says that chance decides much."""


def score_given(run: Run) -> None:
    """Score the network as it was given; one that knows nothing yet is trained first."""
    start = time.monotonic()
    network = duplicate(run.original.model).eval()
    before = evaluate(network, run.data.val, run.task, bf16=run.recipe.given.bf16)
    _check_validation(run, int(before["count"]))
    clear = standing(network, run.data.val, run.task, bf16=run.recipe.given.bf16)
    knows = clear > CLEAR
    if run.recipe.distillation is not None and run.task.distil is None:
        run.listener.note(
            "the task has no `distil` loss, so slim networks learn from the targets alone, without the given network "
            "as their teacher"
        )
    history: list[Any] = []
    if not knows:
        if clear < -CLEAR:
            run.listener.note(
                f"{run.task.name} is higher with the targets of other inputs than with their own: if lower is better, "
                "say Task(..., higher_is_better=False)"
            )
        run.listener.note(
            f"the network as given knows no more than chance ({_figure(run, before)} on validation), so it is trained "
            f"first, epochs: {run.recipe.given.epochs}"
        )
        history = _train(run, network)
    else:
        run.listener.note(f"the network as given has {_figure(run, before)} on validation{_doubt(run)}")
    measured = evaluate(network, run.data.test or run.judged, run.task, bf16=run.recipe.given.bf16)
    result = {
        "knew": knows,
        "metric": run.task.metric,
        "before": before,
        "scored_on": run.data.scored_on,
        **measured,
        "val": evaluate(network, run.judged, run.task, bf16=run.recipe.given.bf16),
        "history": history,
        "seconds": time.monotonic() - start,
    }
    run.write("given", result, network.state_dict())
    run.remove(f"{CHECKPOINTS}/given")


def _check_validation(run: Run, count: int) -> None:
    """Networks can be told apart only by inputs with different targets, some in either half."""
    if count < FEWEST:
        raise BcnetError(
            f"the validation data has {count} inputs, but one half is for the search and one for the choice: give at "
            f"least {FEWEST}, better hundreds"
        )
    if count < FEW:
        run.listener.note(
            f"there are {count} validation inputs, and half of them decide, so chance has a large share: give hundreds"
        )
    targets = (y for _, y in run.data.val.batches(0))
    first = next(targets)
    if all(y.shape[1:] == first.shape[1:] and torch.equal(y, first[:1].expand_as(y)) for y in chain([first], targets)):
        raise BcnetError(
            "all targets of the validation data are the same, so it tells no network from another: shuffle before you "
            "split"
        )


def _train(run: Run, network: nn.Module) -> list[dict[str, float]]:
    """Train the given network on the training images; the validation images stay unseen, as they judge later."""
    config = plain_training(run, run.recipe.given)
    folder = run.path(CHECKPOINTS, "given")
    history = retrain(
        network,
        run.data.train,
        config,
        run.task_given,
        folder=folder,
        progress=training_steps(run.listener, "given"),
        fast=fast_step(run),
    )
    return rows_of(history)


def _doubt(run: Run) -> str:
    """Why a network may do worse here than where it was trained."""
    prepared = run.data.preprocessing
    if prepared is None:
        return ""
    return f" ({prepared.resize}): if you know it to do better, it was trained on images prepared otherwise"


def _figure(run: Run, measured: dict[str, float]) -> str:
    return f"{run.task.name} {words.figure(run.task.metric, measured['score'])}"
