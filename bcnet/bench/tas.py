"""TAS, a baseline: widths as a distribution that is learnt with the weights ("Network Pruning via
Transformable Architecture Search").

Every variable has logits over its candidates. A step samples two candidates of each by Gumbel-softmax; a
layer runs at the wider one, its output at the narrower one is brought to the same number of channels by
channel-wise interpolation (adaptive average pooling over channels), and the two are mixed by their
probabilities; two such passes a step count as four paths. Weights learn from training images, logits from
held-out ones, with no FLOPs term: widths are ranked here, not chosen. Paths are then scored like UA's, from
the left.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import cycle

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bcnet.data.source import Data
from bcnet.optim import make_optimizer, set_rate
from bcnet.supernet.gradients import PathGradients
from bcnet.supernet.supernet import Supernet, Tap
from bcnet.supernet.train import Progress, SupernetTraining
from bcnet.task import Task

TAS = "tas"


@dataclass(frozen=True)
class Mix:
    """How each variable's output is mixed: (channels of the narrower, probability of the wider)."""

    narrow: tuple[int, ...]
    share: Tensor

    def tap(self, net: Supernet) -> Tap:
        """Mixes the output x (n, c, h, w) of a batch norm with its first channels, stretched to c."""
        axes = net.space.coupling.axes

        def mixed(x: Tensor, name: str) -> Tensor:
            (variable,) = axes[name][0].variables
            narrow = _stretch(x[:, : self.narrow[variable]], x.shape[1])
            share = self.share[variable].to(x.device, x.dtype)
            return narrow + share * (x - narrow)

        return mixed


def _stretch(x: Tensor, channels: int) -> Tensor:
    """Channel-wise interpolation to ``channels``: adaptive average pooling along the channel axis."""
    n, c, h, w = x.shape
    flat = x.permute(0, 2, 3, 1).reshape(n * h * w, 1, c)
    pooled = F.adaptive_avg_pool1d(flat, channels)
    return pooled.reshape(n, h, w, channels).permute(0, 3, 1, 2)


class Widths(nn.Module):
    """The logits of every variable's candidates."""

    def __init__(self, candidates: Sequence[Sequence[int]], temperature: float = 1.0):
        super().__init__()
        self.candidates = [list(c) for c in candidates]
        self.logits = nn.ParameterList([nn.Parameter(1e-3 * torch.randn(len(c))) for c in candidates])
        self.temperature = temperature

    def sample(self) -> tuple[list[int], Mix]:
        """The wider widths of a Gumbel draw, and how to mix in the narrower ones."""
        wide, narrow, share = [], [], []
        for choices, logits in zip(self.candidates, self.logits, strict=True):
            noise = -torch.log(-torch.log(torch.rand_like(logits).clamp(1e-6, 1 - 1e-6)))
            first, second = torch.topk(logits.detach() + noise, 2).indices.sort().values.tolist()
            pair = torch.softmax((logits + noise)[[first, second]] / self.temperature, 0)
            wide.append(choices[second])
            narrow.append(choices[first])
            share.append(pair[1])
        return wide, Mix(tuple(narrow), torch.stack(share))


def train_tas(
    net: Supernet, data: Data, config: SupernetTraining, progress: Callable[[Progress], None] | None = None
) -> Widths:
    """Train ``net``'s weights and the widths' logits by turns; returns the learnt distribution."""
    device = next(net.parameters()).device
    recipe, task = config.optimisation, Task.classification(config.optimisation.label_smoothing)
    torch.manual_seed(config.seed)
    widths = Widths([v.candidates for v in net.space.variables])
    architect = torch.optim.Adam(widths.parameters(), lr=1e-3, betas=(0.5, 0.999))
    gradients, optimizer = PathGradients(net), make_optimizer(net, recipe)
    net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    net.train()
    held_out = cycle(list(data.val.batches(0, device=device)))
    per_epoch = len(data.train)
    for step in range(recipe.epochs * per_epoch):
        epoch, start = divmod(step, per_epoch)
        if start == 0:
            batches = data.train.batches(epoch, 0, device)
        x, y = next(batches)
        set_rate(optimizer, recipe.rate(step, per_epoch))
        gradients.zero()
        losses = torch.stack([_weight_pass(net, gradients, widths, task, x, y, recipe.bf16) for _ in range(2)])
        optimizer.step()
        if step % 4 == 0:
            _architecture_pass(net, widths, architect, task, next(held_out), len(x), recipe.bf16)
        if progress is not None:
            rate = recipe.rate(step, per_epoch)
            progress(Progress(step + 1, recipe.epochs * per_epoch, epoch, rate, len(x), losses))
    return widths


def _weight_pass(
    net: Supernet, gradients: PathGradients, widths: Widths, task: Task, x: Tensor, y: Tensor, bf16: bool
) -> Tensor:
    with torch.no_grad():
        wide, mix = widths.sample()
    plan = net.plan(wide)
    leaves = gradients.leaves(plan)
    with torch.autocast(x.device.type, torch.bfloat16, enabled=bf16):
        loss = task.loss(net.run(plan, x, leaves, tap=mix.tap(net)), y)
    gradients.backward(loss / 2, [(plan, leaves)])
    return loss.detach()


def _architecture_pass(
    net: Supernet,
    widths: Widths,
    architect: torch.optim.Optimizer,
    task: Task,
    batch: tuple[Tensor, Tensor],
    size: int,
    bf16: bool,
) -> None:
    x, y = batch[0][:size], batch[1][:size]
    wide, mix = widths.sample()
    plan = net.plan(wide)
    with torch.no_grad():
        views = net.views(plan)
    with torch.autocast(x.device.type, torch.bfloat16, enabled=bf16):
        loss = task.loss(net.run(plan, x, views, tap=mix.tap(net)), y)
    architect.zero_grad()
    loss.backward(inputs=list(widths.parameters()))
    architect.step()
