"""TAS, a baseline: widths as a distribution that is learnt with the weights ("Network Pruning via
Transformable Architecture Search").

Every variable has logits over its candidates. A step samples two candidates of each by Gumbel-softmax; a
layer runs at the wider one, its output at the narrower one is brought to the same number of channels by
channel-wise interpolation (adaptive average pooling over channels), and the two are mixed by their
probabilities; two such passes a step count as four paths. Weights learn from training images, logits from
held-out ones. Where widths are to be chosen, :class:`Spending` is TAS's loss of FLOPs, and the likeliest candidates are
the choice; where they are ranked there is none, and paths are scored like UA's, from the left. The distillation with
which TAS trains its choice is that of any retraining (``Distillation``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bcnet.data.source import Data
from bcnet.space.cost import QuadraticCost
from bcnet.supernet.gradients import PathGradients
from bcnet.supernet.supernet import Supernet, Tap
from bcnet.supernet.training import SupernetTraining
from bcnet.training.loop import Loop, Progress
from bcnet.training.task import Task

TAS = "tas"
PASSES = 2
"""Mixed passes a step, each of which counts as two paths."""


@dataclass(frozen=True)
class Mix:
    """How each variable's output is mixed: (channels of the narrower, probability of the wider).

    Probabilities are a tensor (L,) where logits learn from them, else numbers, which a GPU need not be sent.
    """

    narrow: tuple[int, ...]
    share: Tensor | list[float]

    def tap(self, net: Supernet) -> Tap:
        """Mixes the output x (n, c, h, w) of a batch norm with its first channels, stretched to c."""
        axes = net.space.coupling.axes

        def mixed(x: Tensor, name: str) -> Tensor:
            (variable,) = axes[name][0].variables
            narrow = _stretch(x[:, : self.narrow[variable]], x.shape[1]).to(x.dtype)
            share = self.share[variable]
            return torch.lerp(narrow, x, share.to(x.device, x.dtype) if isinstance(share, Tensor) else share)

        return mixed


@cache
def interpolation(narrow: int, wide: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Adaptive average pooling from ``narrow`` to ``wide`` channels as a matrix (narrow, wide)."""
    return F.adaptive_avg_pool1d(torch.eye(narrow)[:, None], wide)[:, 0].to(device, dtype)


def _stretch(x: Tensor, channels: int) -> Tensor:
    """Channel-wise interpolation of x (n, c, h, w) to ``channels``."""
    matrix = interpolation(x.shape[1], channels, x.device, x.dtype)
    return (x.permute(0, 2, 3, 1) @ matrix).permute(0, 3, 1, 2)


class WidthDistribution(nn.Module):
    """The logits of every variable's candidates."""

    def __init__(self, candidates: Sequence[Sequence[int]]):
        super().__init__()
        self.candidates = [list(c) for c in candidates]
        self.logits = nn.ParameterList([nn.Parameter(1e-3 * torch.randn(len(c))) for c in candidates])

    def likeliest(self) -> list[int]:
        """The likeliest candidate of every variable."""
        return [choices[int(row.argmax())] for choices, row in zip(self.candidates, self.logits, strict=True)]

    def sample(self) -> tuple[list[int], tuple[int, ...], Tensor]:
        """A Gumbel draw: the wider widths, the narrower ones, and the probabilities (L,) of the wider."""
        wide, narrow, share = [], [], []
        for choices, logits in zip(self.candidates, self.logits, strict=True):
            noise = -torch.log(-torch.log(torch.rand_like(logits).clamp(1e-6, 1 - 1e-6)))
            first, second = torch.topk(logits.detach() + noise, 2).indices.sort().values.tolist()
            pair = torch.softmax((logits + noise)[[first, second]], 0)
            wide.append(choices[second])
            narrow.append(choices[first])
            share.append(pair[1])
        return wide, tuple(narrow), torch.stack(share)


@dataclass(frozen=True)
class Spending:
    """TAS's loss of FLOPs: the logarithm of the expected cost, pulled down while the likeliest widths cost more than
    ``limit``, pushed up while they cost less, and left alone within ``tolerance`` of it."""

    cost: QuadraticCost
    limit: float
    weight: float = 2.0
    tolerance: float = 0.05

    def loss(self, widths: WidthDistribution) -> Tensor:
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


def train_tas(
    net: Supernet,
    data: Data,
    config: SupernetTraining,
    folder: str | Path | None = None,
    progress: Callable[[Progress], None] | None = None,
    spending: Spending | None = None,
    rate: float = 1e-3,
) -> WidthDistribution:
    """Train ``net``'s weights and, at ``rate``, the widths' logits by turns; returns the learnt distribution.

    With ``folder``, checkpoints go there and a stopped training goes on.
    """
    loop = _Loop(net, data, config, folder)
    loop.spending, loop.architect.param_groups[0]["lr"] = spending, rate
    loop.run(progress)
    loop.finish()
    return loop.widths


class _Loop(Loop):
    net: Supernet

    def __init__(self, net: Supernet, data: Data, config: SupernetTraining, folder: str | Path | None):
        super().__init__(net, data.train, config, folder)
        self.task = Task.classification(self.optimisation.label_smoothing)
        torch.manual_seed(config.seed)
        self.widths = WidthDistribution([v.candidates for v in net.space.variables])
        self.architect = torch.optim.Adam(self.widths.parameters(), lr=1e-3, betas=(0.5, 0.999))
        self.gradients = PathGradients(net)
        self.spending: Spending | None = None
        self.held_out = list(data.val.batches(0, device=self.device))

    def learn(self, x: Tensor, y: Tensor) -> Tensor:
        if self.step % 4 == 0:
            self._learn_widths(*self.held_out[self.step // 4 % len(self.held_out)], len(x))
        self.gradients.zero()
        return torch.stack([self._learn_weights(x, y) for _ in range(PASSES)])

    def _learn_weights(self, x: Tensor, y: Tensor) -> Tensor:
        with torch.no_grad():
            wide, narrow, share = self.widths.sample()
        mix = Mix(narrow, share.tolist())
        selection = self.net.select(wide)
        leaves = self.gradients.leaves(selection)
        with self.autocast():
            loss = self.task.loss(self.net.run(selection, x, leaves, tap=mix.tap(self.net)), y)
        self.gradients.backward(loss / PASSES, [(selection, leaves)])
        return loss.detach()

    def _learn_widths(self, x: Tensor, y: Tensor, size: int) -> None:
        wide, narrow, share = self.widths.sample()
        mix = Mix(narrow, share)
        selection = self.net.select(wide)
        with torch.no_grad():
            views = self.net.views(selection)
        with self.autocast():
            loss = self.task.loss(self.net.run(selection, x[:size], views, tap=mix.tap(self.net)), y[:size])
        if self.spending is not None:
            loss = loss + self.spending.loss(self.widths)
        self.architect.zero_grad()
        loss.backward(inputs=list(self.widths.parameters()))
        self.architect.step()

    def identity(self) -> Any:
        return [TAS, [list(v.candidates) for v in self.net.space.variables]]

    def extra(self) -> dict[str, Any]:
        return {"widths": dict(self.widths.state_dict()), "architect": self.architect.state_dict()}

    def restore_extra(self, tree: dict[str, Any]) -> None:
        self.widths.load_state_dict(tree["widths"])
        self.architect.load_state_dict(tree["architect"])
