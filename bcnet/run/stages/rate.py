"""The learning rate of fine-tuning, chosen by probes where a recipe names none."""

from __future__ import annotations

import math
import time
from dataclasses import replace

from bcnet.run.session import Run
from bcnet.run.stages.common import fast_step
from bcnet.run.stages.retrain import fine_tuning
from bcnet.space.state import duplicate
from bcnet.training.rate import choose_rate, probe_length, probe_loss
from bcnet.utils.progress import training_steps


def choose(run: Run) -> None:
    """Fine-tune what the search chose for a short while at several rates; all networks of the run take the one that
    :func:`choose_rate` returns."""
    start, cut = time.monotonic(), run.inherited(run.read("search")["best"]["widths"])
    config, teacher = fine_tuning(run, run.recipe.retrain)
    data, fast = replace(run.data, val=run.judged), fast_step(run)

    def loss(rate: float) -> float:
        told = training_steps(run.listener, f"probe at {rate:g}")
        network = duplicate(cut)
        return probe_loss(network, rate, data, config, run.task_given, teacher=teacher, fast=fast, progress=told)

    best, found = choose_rate(loss)
    probes = [{"lr": lr, "loss": None if math.isinf(value) else value} for lr, value in found.items()]
    epochs, batches = probe_length(run.recipe.retrain.epochs, len(data.train))
    run.write("rate", {"lr": best, "probes": probes, "steps": epochs * batches, "seconds": time.monotonic() - start})
    run.listener.note(f"networks are fine-tuned at a learning rate of {best:g}, the best of {len(found)} probes")
