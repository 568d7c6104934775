"""Optimizers, learning-rate schedules and weight averages, as one small set of settings.

Everything is a function of the step number, so that a resumed run continues exactly where it stopped.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from itertools import pairwise
from typing import Annotated, Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from bcnet.errors import BcnetError
from bcnet.utils.settings import BelowOne, Count, NotNegative, Positive, checked


@checked
class Optimisation:
    """How weights are learnt. ``head`` exists because a classifier sums positive features: the rate it tolerates falls
    with their number, while layers before a batch norm tolerate almost any."""

    epochs: Annotated[Count, "passes over the training images"] = 20
    optimizer: Annotated[Literal["sgd", "rmsprop"], "sgd or rmsprop"] = "sgd"
    lr: Annotated[Positive | None, "the highest learning rate; null, when fine-tuning: by probes"] = 0.1
    final_lr: Annotated[NotNegative, "the learning rate at the end of the cosine"] = 0.0
    momentum: Annotated[BelowOne, "the optimizer's momentum"] = 0.9
    nesterov: Annotated[bool, "whether momentum looks ahead"] = True
    weight_decay: Annotated[NotNegative, "pulls weights to zero"] = 0.0
    decay_all: Annotated[bool, "whether biases and batch norm decay too"] = True
    schedule: Annotated[Literal["cosine", "step", "exponential"], "cosine, step or exponential"] = "cosine"
    milestones: Annotated[tuple[int, ...], "epochs at which step multiplies the learning rate by gamma"] = ()
    gamma: Annotated[float, Field(gt=0, le=1), "the factor of step and exponential"] = 0.1
    every: Annotated[Positive, "epochs between two factors of exponential"] = 1.0
    warmup: Annotated[NotNegative, "epochs in which the learning rate rises from zero"] = 0.0
    label_smoothing: Annotated[BelowOne, "the share of every label that is spread over all classes"] = 0.0
    ema: Annotated[BelowOne, "the decay of an average of the weights; 0: none"] = 0.0
    clip: Annotated[NotNegative, "the largest norm of the whole gradient; 0: any"] = 0.0
    head: Annotated[NotNegative, "limits the last layer's learning rate to this divided by its inputs; 0: no limit"] = (
        0.0
    )
    bf16: Annotated[bool, "whether steps are computed in bf16"] = False

    @model_validator(mode="after")
    def _fits_together(self) -> Optimisation:
        if self.lr is None and self.final_lr:
            raise BcnetError("final_lr needs an lr that is known: name both, or leave both out")
        if self.lr is not None and self.final_lr > self.lr:
            raise BcnetError(f"final_lr is {self.final_lr}, but it must be at most lr, {self.lr}")
        if self.warmup >= self.epochs:
            raise BcnetError(f"warmup is {self.warmup}, but it must be shorter than the epochs, {self.epochs}")
        if any(a >= b for a, b in pairwise((0, *self.milestones))):
            raise BcnetError(f"milestones is {self.milestones!r:.40}, but it must be rising epochs above 0")
        return self

    @property
    def peak(self) -> float:
        """``lr``, which is known once training begins."""
        if self.lr is None:
            raise BcnetError("lr is null, but only a run that fine-tunes a trained network can choose it: name a rate")
        return self.lr

    def rate(self, step: int, steps: float) -> float:
        """The learning rate of ``step`` where an epoch has ``steps`` steps."""
        epoch = step / steps
        if epoch < self.warmup:
            return self.peak * min(1.0, (step + 1) / (self.warmup * steps))
        if self.schedule == "cosine":
            share = (epoch - self.warmup) / (self.epochs - self.warmup)
            return self.final_lr + (self.peak - self.final_lr) * (1 + math.cos(math.pi * min(1.0, share))) / 2
        if self.schedule == "step":
            return self.peak * self.gamma ** sum(epoch >= m for m in self.milestones)
        return float(self.peak * self.gamma ** ((epoch - self.warmup) // self.every))

    def head_factor(self, inputs: int) -> float:
        """The factor of the last linear layer's learning rate, given its number of inputs."""
        return min(1.0, self.head / (self.peak * inputs)) if self.head else 1.0


def make_optimizer(network: nn.Module, config: Optimisation) -> torch.optim.Optimizer:
    """The optimizer of ``network``'s parameters; its learning rate is set step by step."""
    parameters = list(network.parameters())
    last = next((p for p in reversed(parameters) if p.dim() == 2), None)
    groups: dict[tuple[float, float], list[nn.Parameter]] = defaultdict(list)
    for p in parameters:
        decay = config.weight_decay if config.decay_all or p.dim() >= 2 else 0.0
        groups[decay, config.head_factor(p.shape[1]) if p is last else 1.0].append(p)
    settings = [{"params": members, "weight_decay": d, "factor": factor} for (d, factor), members in groups.items()]
    if config.optimizer == "rmsprop":
        # The recipes of mobile networks were written for TensorFlow, which adds its epsilon of 0.001 under the root.
        return torch.optim.RMSprop(settings, lr=config.peak, alpha=0.9, eps=0.001**0.5, momentum=config.momentum)
    nesterov = config.nesterov and config.momentum > 0
    one_launch = True if all(p.is_cuda for p in parameters) else None
    return torch.optim.SGD(settings, lr=config.peak, momentum=config.momentum, nesterov=nesterov, fused=one_launch)


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Set the rate of a step, times the ``factor`` of each group."""
    for group in optimizer.param_groups:
        group["lr"] = rate * group.get("factor", 1.0)


class Average:
    """An exponential moving average of parameters, with a warm-up so that their start is forgotten."""

    def __init__(self, parameters: Iterable[nn.Parameter], decay: float):
        self.decay, self.updates = decay, 0
        self.live = list(parameters)
        self.values: list[Tensor] = [p.detach().clone() for p in self.live]

    @torch.no_grad()
    def update(self) -> None:
        self.updates += 1
        decay = min(self.decay, (1 + self.updates) / (10 + self.updates))
        torch._foreach_lerp_(self.values, [p.detach() for p in self.live], 1 - decay)

    @torch.no_grad()
    def swap(self) -> None:
        """Exchange the live parameters with their average (call it again to change back)."""
        for value, parameter in zip(self.values, self.live, strict=True):
            kept = parameter.detach().clone()
            parameter.copy_(value)
            value.copy_(kept)
