"""Small networks, images and settings that ``bcnet.slim`` is called with."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

TINY: dict[str, Any] = {
    "start": "scratch",
    "fallback": False,
    "groups": 4,
    "supernet": {"epochs": 2},
    "search": {"evaluations": 8, "population": 4},
    "retrain": {"epochs": 2},
    "threads": 1,
}


def body(*head: nn.Module) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(2, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(), *head
    )


def classifier(classes: int = 3) -> nn.Sequential:
    return body(nn.AdaptiveAvgPool2d(1), nn.Flatten(1), nn.Linear(8, classes))


def images(n: int = 48) -> Tensor:
    return torch.randn(n, 2, 6, 6, generator=torch.Generator().manual_seed(1))


def loader(targets: Tensor, batch: int = 16, shuffle: bool = False) -> DataLoader[Any]:
    return DataLoader(TensorDataset(images(len(targets)), targets), batch, shuffle=shuffle)


def labels(n: int = 48) -> Tensor:
    return torch.arange(n) % 3


EXAMPLE = torch.randn(1, 2, 6, 6)
