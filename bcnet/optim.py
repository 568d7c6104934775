"""Optimizers, learning-rate schedules and weight averages, as one small config.

Everything is a function of the step number, so that a resumed run goes on exactly where it stopped.
"""

from __future__ import annotations

import math
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
    Weight decay spares biases and batch-norm parameters unless ``decay_all``.
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
    bf16: bool = False

    def __post_init__(self) -> None:
        checks = {
            "epochs must be at least 1": self.epochs >= 1,
            "lr must be positive": self.lr > 0 and math.isfinite(self.lr),
            "momentum must lie in [0, 1)": 0 <= self.momentum < 1,
            "weight_decay must not be negative": self.weight_decay >= 0,
            "label_smoothing must lie in [0, 1)": 0 <= self.label_smoothing < 1,
            "ema must lie in [0, 1)": 0 <= self.ema < 1,
            "clip must not be negative": self.clip >= 0,
            "warmup must be shorter than the epochs": 0 <= self.warmup < self.epochs,
            "gamma must lie in (0, 1]": 0 < self.gamma <= 1,
            "every must be positive": self.every > 0,
            f"optimizer {self.optimizer!r} is unknown: there are sgd and rmsprop": self.optimizer in ("sgd", "rmsprop"),
            f"schedule {self.schedule!r} is unknown: there are cosine, step and exponential": self.schedule
            in ("cosine", "step", "exponential"),
        }
        for sentence, holds in checks.items():
            if not holds:
                raise BcnetError(sentence)

    def rate(self, step: int, steps: int) -> float:
        """The learning rate of ``step`` where an epoch has ``steps`` steps."""
        epoch = step / steps
        if epoch < self.warmup:
            return self.lr * (step + 1) / (self.warmup * steps)
        if self.schedule == "cosine":
            share = (epoch - self.warmup) / max(self.epochs - self.warmup, 1e-9)
            return self.final_lr + (self.lr - self.final_lr) * (1 + math.cos(math.pi * min(1.0, share))) / 2
        if self.schedule == "step":
            return self.lr * self.gamma ** sum(epoch >= m for m in self.milestones)
        return float(self.lr * self.gamma ** ((epoch - self.warmup) // self.every))


def make_optimizer(network: nn.Module, config: Optimisation) -> torch.optim.Optimizer:
    """The optimizer of ``network``'s parameters; its learning rate is set step by step."""
    parameters = list(network.parameters())
    plain = [p for p in parameters if p.dim() < 2]
    decayed = parameters if config.decay_all else [p for p in parameters if p.dim() >= 2]
    groups = [{"params": decayed, "weight_decay": config.weight_decay}]
    if not config.decay_all and plain:
        groups.append({"params": plain, "weight_decay": 0.0})
    if config.optimizer == "rmsprop":
        # TensorFlow's form, which the mobile networks' recipes were written for: a large epsilon.
        return torch.optim.RMSprop(groups, lr=config.lr, alpha=0.9, eps=1e-3, momentum=config.momentum)
    nesterov = config.nesterov and config.momentum > 0
    return torch.optim.SGD(groups, lr=config.lr, momentum=config.momentum, nesterov=nesterov)


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate


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
