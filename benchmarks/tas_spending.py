"""TAS's loss of FLOPs, with which its logits choose widths (:mod:`bcnet.supernet.tas`)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from bcnet.space.cost import QuadraticCost
from bcnet.supernet.tas import WidthDistribution


@dataclass(frozen=True)
class Spending:
    """TAS's loss of FLOPs: the logarithm of the expected cost, pulled down while the likeliest widths cost more than
    ``limit``, pushed up while they cost less, and left alone within ``tolerance`` of it."""

    cost: QuadraticCost
    limit: float
    weight: float = 2.0
    tolerance: float = 0.05

    def __call__(self, widths: WidthDistribution) -> Tensor:
        spent = float(self.cost(widths.likeliest())[0]) / self.limit
        if abs(spent - 1) <= self.tolerance:
            return torch.zeros(())
        return math.copysign(self.weight, spent - 1) * self.expected(widths).log()

    def expected(self, widths: WidthDistribution) -> Tensor:
        """The expected cost of widths drawn from their distribution, of every variable by itself."""
        chances = [logits.double().softmax(0) for logits in widths.logits]
        choices = [torch.tensor(c, dtype=torch.float64) for c in widths.candidates]
        mean = torch.stack([p @ c for p, c in zip(chances, choices, strict=True)])
        spread = torch.stack([p @ c**2 for p, c in zip(chances, choices, strict=True)]) - mean**2
        q, Q = torch.from_numpy(self.cost.q), torch.from_numpy(self.cost.Q)
        return self.cost.q0 + q @ mean + mean @ Q @ mean + Q.diagonal() @ spread
