"""Which channels of a trained network stay, and the network cut down to them, by way of Torch-Pruning's groups.

Every width variable of bcnet is a group of Torch-Pruning: the layers whose channels must go together.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch_pruning as tp
from parts import BcnetError, NetworkSpace, Widths
from torch import Tensor, nn

Kept = list[list[int]]
"""The indices of the channels that stay, for each variable."""
SLACK = 0.02


class Cutter:
    """Cuts copies of ``model``, whose width space is ``space``."""

    def __init__(self, model: nn.Module, space: NetworkSpace):
        self.model = copy.deepcopy(model).cpu().eval()
        self.space = space
        self.example = space.example[0][:1]

    def _roots(self, model: nn.Module) -> list[nn.Module]:
        """The first layer of each variable: its outputs are the channels."""
        return [model.get_submodule(variable.layers[0]) for variable in self.space.variables]

    def importance(self, scorer: tp.importance.Importance | None = None) -> list[Tensor]:
        """Scores of the channels of each variable, group L2 unless told otherwise."""
        scorer = scorer or tp.importance.GroupMagnitudeImportance(p=2)
        graph = tp.DependencyGraph().build_dependency(self.model, self.example)
        scores = []
        for root in self._roots(self.model):
            group = graph.get_pruning_group(root, tp.prune_conv_out_channels, list(range(root.out_channels)))
            scores.append(scorer(group))
        return scores

    def best(self, widths: Widths, scores: Sequence[Tensor]) -> Kept:
        """The channels of the highest scores at ``widths``."""
        kept = []
        for width, score in zip(widths.tolist(), scores, strict=True):
            kept.append(sorted(torch.argsort(score, descending=True, stable=True)[:width].tolist()))
        return kept

    def widened(self, kept: Kept, widths: Widths, scores: Sequence[Tensor]) -> Kept:
        """``kept`` with the best of the other channels added, by ``scores``, until it has ``widths``."""
        wider = []
        for stay, width, score in zip(kept, widths.tolist(), scores, strict=True):
            others = [c for c in torch.argsort(score, descending=True, stable=True).tolist() if c not in set(stay)]
            wider.append(sorted([*stay, *others[: width - len(stay)]]))
        return wider

    def cut(self, kept: Kept) -> nn.Module:
        """The network that has the channels ``kept`` alone."""
        model = copy.deepcopy(self.model)
        for parameter in model.parameters():
            parameter.requires_grad_(True)
        graph = tp.DependencyGraph().build_dependency(model, self.example)
        for root, stay in zip(self._roots(model), kept, strict=True):
            gone = sorted(set(range(root.out_channels)) - set(stay))
            if gone:
                graph.get_pruning_group(root, tp.prune_conv_out_channels, gone).prune()
        if self.widths(model).tolist() != [len(stay) for stay in kept]:
            raise BcnetError("Torch-Pruning's groups are not bcnet's variables: the cut network has other widths")
        return model

    def widths(self, model: nn.Module) -> Widths:
        """The width vector of a network that was cut from this one."""
        return np.array([root.out_channels for root in self._roots(model)], dtype=np.int64)

    def flops(self, widths: Widths) -> int:
        return int(self.space.costs["flops"](widths)[0])

    def params(self, widths: Widths) -> int:
        return int(self.space.costs["params"](widths)[0])


def fitted(logs: Any, cutter: Cutter, flops: float, rng: np.random.Generator) -> Widths | None:
    """Widths in the proportions exp(``logs``), scaled into the budget; None where its last 2 % are not reached."""
    most = cutter.space.max

    def scaled(factor: float) -> Widths:
        return np.clip(np.rint(np.exp(logs) * factor), 1, most).astype(np.int64)

    low, high = 1e-3, 1e3
    for _ in range(60):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if cutter.flops(scaled(middle)) <= flops else (low, middle)
    widths = scaled(low)
    for number in rng.permutation(len(widths)):  # single channels, as far as they fit
        wider = widths.copy()
        wider[number] = min(wider[number] + 1, most[number])
        widths = wider if cutter.flops(wider) <= flops else widths
    return widths if cutter.flops(widths) >= (1 - SLACK) * flops else None
