"""The learning rate of fine-tuning, by probes: short trainings with the whole schedule in small, all from one start.

Which rate suits a cut network depends on how the given one was trained, how much was cut and how long it is trained. At
one rate for all, every method lost up to seven points on a MobileNetV2 to what it had at a fifth of that rate
(docs/results/rivals.md); what probes know of it is in docs/results/fine-tuning-rate.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from torch import nn

from bcnet.data.source import Data, First
from bcnet.errors import BcnetError, NotFinite
from bcnet.training import distributed
from bcnet.training.loop import Progress
from bcnet.training.retraining import FastStep, Retraining, evaluate, retrain
from bcnet.training.task import Task

RATES = (0.1, 0.05, 0.03, 0.01, 0.003, 0.001)
"""The rates that may be probed, falling."""
FIRST = 0.05
"""The rate that is probed first."""
NEAR = 0.01
"""Of losses that differ by no more than this share of the least, the one of the highest rate counts as the best: a long
training bears a higher rate than a short one (docs/results/fine-tuning-rate.md)."""
SHARE = 10
"""A probe takes one part in this many of the whole training."""
LEAST = 30
"""Steps that a probe takes at the least, as far as the whole training has as many: few steps tell nothing."""
USUAL = 3
"""Rates that are probed where the first one is taken."""


def choose_rate(loss: Callable[[float], float]) -> tuple[float, dict[float, float]]:
    """The highest rate whose ``loss`` is near the least, and all losses that were asked for: from :data:`FIRST` up
    while they are near the least so far, then down while they are clearly lower than it. A rate at which training
    diverges has an infinite loss."""
    found = {FIRST: loss(FIRST)}
    start = RATES.index(FIRST)

    def near() -> float:
        least = min(found.values())
        return least + NEAR * abs(least) if least < math.inf else -math.inf

    for rate in RATES[start - 1 :: -1]:
        found[rate] = loss(rate)
        if found[rate] > near():
            break
    for rate in RATES[start + 1 :]:
        least = min(found.values())
        found[rate] = loss(rate)
        if least < math.inf and found[rate] + NEAR * abs(found[rate]) >= least:
            break
    if min(found.values()) == math.inf:
        raise BcnetError(
            f"fine-tuning diverges at every rate from {max(found):g} to {min(found):g}: clip the gradient with "
            "retrain.clip=1, or look for values in the data that are far too large"
        )
    return max(rate for rate, value in found.items() if value <= near()), found


def probe_loss(
    network: nn.Module,
    rate: float,
    data: Data,
    config: Retraining,
    task: Task | None = None,
    *,
    teacher: nn.Module | None = None,
    fast: FastStep | None = None,
    progress: Callable[[Progress], None] | None = None,
) -> float:
    """The held-out loss of ``network`` after a probe at ``rate``, in which it is trained in place; infinite where the
    training diverges."""
    whole = config.optimisation
    epochs, batches = probe_length(whole.epochs, len(data.train))
    warmup = whole.warmup * epochs / whole.epochs
    short = replace(whole, epochs=epochs, lr=rate, warmup=warmup, schedule="cosine", milestones=(), ema=0.0)
    try:
        retrain(
            network,
            First(data.train, batches),
            replace(config, optimisation=short),
            task,
            teacher=teacher,
            fast=fast,
            progress=progress,
        )
    except NotFinite:
        return math.inf
    return distributed.decide(lambda: _held_out(network, data, task, whole.bf16))


def _held_out(network: nn.Module, data: Data, task: Task | None, bf16: bool) -> float:
    try:
        return evaluate(network, data.val, task, bf16=bf16)["loss"]
    except NotFinite:
        return math.inf


def probe_length(epochs: int, batches: int) -> tuple[int, int]:
    """The epochs of a probe and the batches of each, where the whole training has ``epochs`` of ``batches``."""
    whole = epochs * batches
    steps = max(math.ceil(whole / SHARE), min(LEAST, whole))
    short = math.ceil(steps / batches)
    return short, math.ceil(steps / short)
