"""Optimizers, learning-rate schedules and weight averages, as one small config.

Everything is a function of the step number, so that a resumed run goes on exactly where it stopped.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from bcnet.errors import BcnetError


@dataclass(frozen=True)
class Optimisation:
    """How weights are learnt.

    ``schedule``: ``cosine`` to ``final_lr``; ``step`` multiplies by ``gamma`` at the epochs ``milestones``;
    ``exponential`` multiplies by ``gamma`` every ``every`` epochs. ``warmup`` epochs rise linearly before.
    Weight decay spares biases and batch-norm parameters unless ``decay_all``. ``ema``, ``clip`` (the norm of the
    whole gradient) and ``head`` are off at 0. ``head`` keeps the peak rate of the last linear layer's weights to
    ``head`` / its inputs: a classifier sums up positive features, so the rate it bears falls with their number, while
    layers before a batch norm bear any.
    """

    epochs: int = 20
    optimizer: Literal["sgd", "rmsprop"] = "sgd"
    lr: float = 0.1
    final_lr: float = 0.0
    momentum: float = 0.9
    nesterov: bool = True
    weight_decay: float = 0.0
    decay_all: bool = True
    schedule: Literal["cosine", "step", "exponential"] = "cosine"
    milestones: tuple[int, ...] = ()
    gamma: float = 0.1
    every: float = 1.0
    warmup: float = 0.0
    label_smoothing: float = 0.0
    ema: float = 0.0
    clip: float = 0.0
    head: float = 0.0
    bf16: bool = False

    def __post_init__(self) -> None:
        rising = all(a < b for a, b in zip((0, *self.milestones), self.milestones, strict=False))
        checks = {
            "epochs": (isinstance(self.epochs, int) and self.epochs >= 1, "be a whole number of at least 1"),
            "optimizer": (self.optimizer in ("sgd", "rmsprop"), "be sgd or rmsprop"),
            "schedule": (self.schedule in ("cosine", "step", "exponential"), "be cosine, step or exponential"),
            "lr": (0 < self.lr < math.inf, "be positive"),
            "final_lr": (0 <= self.final_lr <= self.lr, "lie in 0..lr"),
            "momentum": (0 <= self.momentum < 1, "lie in [0, 1)"),
            "weight_decay": (0 <= self.weight_decay < math.inf, "not be negative"),
            "milestones": (rising, "be rising epochs above 0"),
            "gamma": (0 < self.gamma <= 1, "lie in (0, 1]"),
            "every": (0 < self.every < math.inf, "be positive"),
            "warmup": (0 <= self.warmup < self.epochs, "be shorter than the epochs"),
            "label_smoothing": (0 <= self.label_smoothing < 1, "lie in [0, 1)"),
            "ema": (0 <= self.ema < 1, "lie in [0, 1)"),
            "head": (0 <= self.head < math.inf, "not be negative"),
            "clip": (0 <= self.clip < math.inf, "not be negative"),
        }
        for name, (holds, wanted) in checks.items():
            if not holds:
                raise BcnetError(f"{name} is {getattr(self, name)!r:.40}, but it must {wanted}")

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
