"""MetaPruning, a baseline: a network that generates the weights of every path from its width vector ("MetaPruning: Meta
Learning for Automatic Neural Network Channel Pruning").

Every weight of two or more dimensions that varies with widths has a generator of its own, two linear layers that see
the whole width vector, where MetaPruning's see the widths before and after a layer; the second one's bias is the
supernet's own parameter. What it generates is cut to the path as UA's paths are, from the left. Norms are shared, where
MetaPruning has one for every width. Training draws random widths; scoring is the supernet's.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bcnet.data.source import Source
from bcnet.space.network import NetworkSpace
from bcnet.supernet.supernet import Selection, Supernet
from bcnet.supernet.training import SupernetTraining
from bcnet.training.loop import Loop, Progress
from bcnet.training.task import Task

META = "meta"
HIDDEN = 32


class MetaSupernet(Supernet):
    """A supernet whose paths have weights of their own, made from their widths."""

    def __init__(self, space: NetworkSpace):
        super().__init__(space, "ua")
        generated = [
            isinstance(tensor, nn.Parameter) and tensor.dim() > 1 and axes is not None
            for tensor, axes in zip(self.state(), self.axes(), strict=True)
        ]
        self._numbers = [i for i, wanted in enumerate(generated) if wanted]
        self.see = nn.ModuleList([nn.Linear(len(space), HIDDEN) for _ in self._numbers])
        self.make = nn.ModuleList([_maker(self.state()[i].detach()) for i in self._numbers])

    def views(self, selection: Selection) -> list[Tensor]:
        state = self.state()
        units = torch.tensor(selection.units, dtype=state[0].dtype, device=state[0].device)
        vector = units / units.new_tensor(self.total_units)
        for number, see, make in zip(self._numbers, self.see, self.make, strict=True):
            state[number] = state[number] + make(see(vector).relu()).view(state[number].shape)
        return self.cut(state, selection)


def _maker(weight: Tensor) -> nn.Linear:
    """The layers from what a generator sees to what it adds to ``weight``: at first about a tenth of it."""
    found = nn.Linear(HIDDEN, weight.numel(), bias=False)
    nn.init.normal_(found.weight, std=0.1 * float(weight.std()) / HIDDEN**0.5)
    return found


def train_meta(
    net: MetaSupernet,
    source: Source,
    config: SupernetTraining,
    folder: str | Path | None = None,
    progress: Callable[[Progress], None] | None = None,
) -> None:
    """Train ``net``'s weights and generators in place, on the paths that ``config.sampling`` draws."""
    loop = _Loop(net, source, config, folder)
    loop.run(progress)
    loop.finish()


class _Loop(Loop):
    net: MetaSupernet
    config: SupernetTraining

    def __init__(self, net: MetaSupernet, source: Source, config: SupernetTraining, folder: str | Path | None):
        super().__init__(net, source, config, folder)
        self.task = Task.classification(self.optimisation.label_smoothing)

    def learn(self, x: Tensor, y: Tensor) -> Tensor:
        self.optimizer.zero_grad(set_to_none=True)
        paths = self.config.sampling.paths(self.step, self.config.seed, self.net.space, self.net.principle)
        losses = []
        for path in paths:
            selection = self.net.select(path.widths, path.side)
            with self.autocast():
                loss = self.task.loss(self.net.run(selection, x, self.net.views(selection)), y)
            (loss * path.weight).backward()
            losses.append(loss.detach())
        return torch.stack(losses)

    def identity(self) -> Any:
        return ["meta", [list(v.candidates) for v in self.net.space.variables]]
