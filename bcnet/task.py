"""What a network is trained for: a loss to minimise and a score to compare networks by.

The default is classification. Any other task works with a loss and a score of its own::

    Task(loss=torch.nn.functional.mse_loss, score=lambda output, target: -(output - target).square().flatten(1).mean(1))
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def cross_entropy(output: Tensor, target: Tensor, smoothing: float = 0.0) -> Tensor:
    return F.cross_entropy(output.float(), target, label_smoothing=smoothing)


def correct(output: Tensor, target: Tensor) -> Tensor:
    """1 where the largest logit is the label's: shape (n,)."""
    return (output.argmax(1) == target).float()


def top5(output: Tensor, target: Tensor) -> Tensor:
    """1 where the label is among the five largest logits: shape (n,)."""
    return (output.topk(min(5, output.shape[1]), 1).indices == target[:, None]).any(1).float()


@dataclass(frozen=True)
class Task:
    """``loss(output, target)`` is a mean over the batch; ``score(output, target)`` is a value per example
    (n,), of which higher is better; ``extra`` are further scores by name."""

    loss: Callable[[Any, Any], Tensor]
    score: Callable[[Any, Any], Tensor]
    extra: tuple[tuple[str, Callable[[Any, Any], Tensor]], ...] = ()
    distil: Callable[[Any, Any], Tensor] | None = None

    @staticmethod
    def classification(smoothing: float = 0.0) -> Task:
        """Cross entropy with label smoothing, top-1 accuracy, and top-5 beside it."""

        def loss(output: Tensor, target: Tensor) -> Tensor:
            return cross_entropy(output, target, smoothing)

        return Task(loss, correct, (("top5", top5),), soft_cross_entropy)


def soft_cross_entropy(output: Tensor, teacher: Tensor) -> Tensor:
    """Cross entropy against a teacher's soft labels, as slimmable networks distil in place."""
    return torch.sum(-teacher.float().softmax(1) * output.float().log_softmax(1), 1).mean()
