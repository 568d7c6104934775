"""Optimizers, learning-rate schedules and weight averages, as one small config.

Everything is a function of the step number, so that a resumed run goes on exactly where it stopped.
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
    """How weights are learnt.

    ``schedule``: ``cosine`` to ``final_lr``; ``step`` multiplies by ``gamma`` at the epochs ``milestones``;
    ``exponential`` multiplies by ``gamma`` every ``every`` epochs. ``warmup`` epochs rise linearly before.
    Weight decay spares biases and batch-norm parameters unless ``decay_all``. ``ema``, ``clip`` (the norm of the
    whole gradient) and ``head`` are off at 0. ``head`` keeps the peak rate of the last linear layer's weights to
    ``head`` / its inputs: a classifier sums up positive features, so the rate it bears falls with their number, while
    layers before a batch norm bear any.
    """

    epochs: Count = 20
    optimizer: Literal["sgd", "rmsprop"] = "sgd"
    lr: Positive = 0.1
    final_lr: NotNegative = 0.0
    momentum: BelowOne = 0.9
    nesterov: bool = True
    weight_decay: NotNegative = 0.0
    decay_all: bool = True
    schedule: Literal["cosine", "step", "exponential"] = "cosine"
    milestones: tuple[int, ...] = ()
    gamma: Annotated[float, Field(gt=0, le=1)] = 0.1
    every: Positive = 1.0
    warmup: NotNegative = 0.0
    label_smoothing: BelowOne = 0.0
    ema: BelowOne = 0.0
    clip: NotNegative = 0.0
    head: NotNegative = 0.0
    bf16: bool = False

    @model_validator(mode="after")
    def _fits_together(self) -> Optimisation:
        if self.final_lr > self.lr:
            raise BcnetError(f"final_lr is {self.final_lr}, but it must be at most lr, {self.lr}")
        if self.warmup >= self.epochs:
            raise BcnetError(f"warmup is {self.warmup}, but it must be shorter than the epochs, {self.epochs}")
        if any(a >= b for a, b in pairwise((0, *self.milestones))):
            raise BcnetError(f"milestones is {self.milestones!r:.40}, but it must be rising epochs above 0")
        return self

    def rate(self, step: int, steps: float) -> float:
        """The learning rate of ``step`` where an epoch has ``steps`` steps."""
        epoch = step / steps
        if epoch < self.warmup:
            return self.lr * min(1.0, (step + 1) / (self.warmup * steps))
        if self.schedule == "cosine":
            share = (epoch - self.warmup) / (self.epochs - self.warmup)
            return self.final_lr + (self.lr - self.final_lr) * (1 + math.cos(math.pi * min(1.0, share))) / 2
        if self.schedule == "step":
            return self.lr * self.gamma ** sum(epoch >= m for m in self.milestones)
        return float(self.lr * self.gamma ** ((epoch - self.warmup) // self.every))

    def head_factor(self, inputs: int) -> float:
        """How many times the rate the last linear layer learns at, given its number of inputs."""
        return min(1.0, self.head / (self.lr * inputs)) if self.head else 1.0


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
        # The mobile networks' recipes were written for TensorFlow, whose epsilon of 0.001 is added under the root.
        return torch.optim.RMSprop(settings, lr=config.lr, alpha=0.9, eps=0.001**0.5, momentum=config.momentum)
    nesterov = config.nesterov and config.momentum > 0
    one_launch = True if all(p.is_cuda for p in parameters) else None
    return torch.optim.SGD(settings, lr=config.lr, momentum=config.momentum, nesterov=nesterov, fused=one_launch)


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Set the rate of a step; groups whose ``factor`` is not 1 get so many times the rate."""
    for group in optimizer.param_groups:
        group["lr"] = rate * group.get("factor", 1.0)


class Average:
    """An exponential moving average of parameters, with a warm-up so that the start is forgotten."""

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
