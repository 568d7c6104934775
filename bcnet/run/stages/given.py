"""The network as it was given: what it knows, and its training where it knows nothing."""

from __future__ import annotations

import math
import time
from typing import Any

from torch import nn

from bcnet.errors import BcnetError
from bcnet.run.session import Run
from bcnet.run.stages.common import CHECKPOINTS, rows_of
from bcnet.training.retraining import Retraining, evaluate, retrain
from bcnet.utils.progress import training_steps

CLEAR = 4.0
"""Standard errors above chance from which on a classifier is taken to know something."""
LEARNT = 0.9
"""A network of a task of one's own knows something if its loss is below this share of what fresh weights have."""


def score_given(run: Run) -> None:
    """Score the network as it was given; one that knows nothing yet is trained first."""
    start = time.monotonic()
    network = run.source.model.eval()
    before = evaluate(network, run.data.val, run.task, bf16=run.recipe.given.bf16)
    if not math.isfinite(before["loss"]):
        raise BcnetError(
            f"the network as given has a loss of {before['loss']} on validation: check its weights and the data"
        )
    knows = _knows(run, before)
    history: list[Any] = []
    if not knows:
        run.listener.note(
            f"the network as given knows no more than chance ({_figure(run, before)}), so it is trained first"
        )
        history = _train(run, network)
    measured = evaluate(network, run.data.test or run.data.val, run.task, bf16=run.recipe.given.bf16)
    result = {
        "knew": knows,
        "before": before,
        "scored_on": "val" if run.data.test is None else "test",
        **measured,
        "val": evaluate(network, run.data.val, run.task, bf16=run.recipe.given.bf16),
        "history": history,
        "seconds": time.monotonic() - start,
    }
    run.write("given", result, network.state_dict())
    run.remove(f"{CHECKPOINTS}/given")


def _train(run: Run, network: nn.Module) -> list[dict[str, float]]:
    """Train the given network on the training images; the validation images stay unseen, as they judge later."""
    r = run.recipe
    config = Retraining(
        optimisation=r.given,
        seed=r.seed,
        checkpoint_minutes=r.checkpoint_minutes,
        channels_last=r.channels_last,
        engine="plain" if r.engine == "plain" else "auto",
    )
    folder = run.path(CHECKPOINTS, "given")
    history = retrain(
        network, run.data.train, config, run.task_given, folder=folder, progress=training_steps(run.listener, "given")
    )
    return rows_of(history)


def _knows(run: Run, measured: dict[str, float]) -> bool:
    """Whether the given network is clearly better than chance on the validation images."""
    if run.task_given is None and run.data.classes:
        chance = 1 / run.data.classes
        error = math.sqrt(chance * (1 - chance) / measured["count"])
        return measured["score"] > chance + max(CLEAR * error, 0.5 * chance)
    fresh = evaluate(run.fresh(run.full), run.data.val, run.task, bf16=run.recipe.given.bf16)["loss"]
    return measured["loss"] < fresh - (1 - LEARNT) * abs(fresh)


def _figure(run: Run, measured: dict[str, float]) -> str:
    if run.task_given is None:
        return f"accuracy {100 * measured['score']:.1f}% on validation"
    return f"loss {measured['loss']:.4g} on validation"
