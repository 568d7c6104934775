"""A supernet and data so small that training them takes a moment, for tests of training and scoring."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from bcnet.data import DeviceData, LoadOptions
from bcnet.data.device import TrainSource
from bcnet.space.network import NetworkSpace, trace
from bcnet.space.widths import Widths
from bcnet.supernet.supernet import Supernet
from bcnet.supernet.training import SupernetTraining, Trained, train_supernet
from bcnet.training import checkpoint
from bcnet.training.loop import Progress
from bcnet.training.optim import Optimisation

EPOCHS, STEPS = 2, 6


class Stopped(Exception):
    """A training was killed."""


def stop_at(step: int) -> Callable[[Progress], None]:
    def progress(now: Progress) -> None:
        if now.step == step:
            raise Stopped

    return progress


def network(dropout: float = 0.2, outputs: int = 4) -> nn.Sequential:
    """(n, 1, 6, 6) to (n, outputs)."""
    return nn.Sequential(
        nn.Conv2d(1, 6, 3, padding=1, bias=False),
        nn.BatchNorm2d(6),
        nn.ReLU(),
        nn.Conv2d(6, 8, 3, padding=1, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(1),
        nn.Dropout(dropout) if dropout else nn.Identity(),
        nn.Linear(8, outputs),
    )


@cache
def space(dropout: float = 0.2, outputs: int = 4) -> NetworkSpace:
    return trace(network(dropout, outputs), torch.zeros(2, 1, 6, 6), groups=4)


def supernet(principle: str = "bcv2", dropout: float = 0.2, outputs: int = 4) -> Supernet:
    """The same weights every time."""
    traced = space(dropout, outputs)
    torch.manual_seed(0)
    return Supernet(traced, principle)


def images(count: int = 96) -> tuple[Tensor, Tensor]:
    """Images (n, 1, 6, 6) and labels (n,) of four classes: which quarter is bright."""
    generator = torch.Generator().manual_seed(7)
    labels = torch.arange(count) % 4
    x = torch.randn(count, 1, 6, 6, generator=generator)
    for n, label in enumerate(labels.tolist()):
        top, left = 3 * (label // 2), 3 * (label % 2)
        x[n, :, top : top + 3, left : left + 3] += 2
    return x, labels


def source(batch: int = 16, shard: tuple[int, int] = (0, 1)) -> TrainSource:
    data = DeviceData(*images(), mean=(0.0,), std=(1.0,), classes=4, pad=1)
    return data.train(LoadOptions(batch_size=batch, crop=1, flip=False), seed=3, shard=shard)


def config(strategy: Any = None, **settings: Any) -> SupernetTraining:
    """Two epochs with everything that has a state: momentum, warm-up, averages; a checkpoint after every step."""
    given = {"epochs": EPOCHS, "lr": 0.1, "weight_decay": 1e-4, "warmup": 0.5, "ema": 0.9, "clip": 1.0, **settings}
    more = {} if strategy is None else {"sampling": strategy}
    return SupernetTraining(optimisation=Optimisation(**given), checkpoint_minutes=0, seed=5, **more)


def some_widths(net: Supernet, count: int = 3) -> Widths:
    return net.space.sample(np.random.default_rng(0), count)


def train(folder: Path | None, **settings: Any) -> tuple[Supernet, Trained]:
    net = supernet()
    return net, train_supernet(net, source(), config(**settings), folder=folder)


def same(found: Path, wanted: Path) -> None:
    """Both folders' newest checkpoints hold the same, bit for bit."""
    (tensors, tree), (others, other) = checkpoint.load(found), checkpoint.load(wanted)
    assert tree == other
    assert tensors.keys() == others.keys()
    for name, tensor in tensors.items():
        assert torch.equal(tensor, others[name]), name
