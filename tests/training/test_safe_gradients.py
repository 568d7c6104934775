"""Strided 1x1 convolutions, whose weight gradient torch 2.13 gets wrong on a CPU: no training asks for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import toy
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from bcnet.space.importance import taylor
from bcnet.space.network import NetworkSpace, trace
from bcnet.supernet.supernet import Supernet
from bcnet.supernet.training import SupernetTraining, train_supernet
from bcnet.training.inherit import CutScorer, Healing
from bcnet.training.optim import Optimisation
from bcnet.training.retraining import Retraining, retrain
from bcnet.utils.safe_gradients import safe_gradients

ONCE = Optimisation(epochs=1)


class Block(nn.Module):
    """Every way to write a strided 1x1 convolution: a module, a function, and one with padding, which stays."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.deep = nn.Conv2d(1, 9, 3, padding=1), nn.Conv2d(9, 14, 3, stride=2, padding=1)
        self.short, self.norm = nn.Conv2d(9, 14, 1, stride=2), nn.BatchNorm2d(14)
        self.weight, self.head = nn.Parameter(torch.randn(14, 14, 1, 1) / 4), nn.Linear(14, 4)
        self.plain = nn.Conv2d(14, 14, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.stem(x).relu()
        y = self.norm(self.deep(y) + self.short(y)).relu()
        y = torch.conv2d(y, self.weight, stride=(2, 1))
        return self.head(self.plain(y).mean((2, 3)))


class Strides(TorchDispatchMode):
    """Hears the strides of all 1x1 convolutions that gradients are asked of."""

    def __init__(self) -> None:
        super().__init__()
        self.heard: list[tuple[int, ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.convolution_backward.default and args[2].shape[2:] == (1, 1):
            self.heard.append(tuple(args[4]))
        return func(*args, **(kwargs or {}))


def space() -> NetworkSpace:
    torch.manual_seed(0)
    return trace(Block(), torch.zeros(2, 1, 6, 6), groups=2)


def by_retraining(space: NetworkSpace) -> None:
    retrain(space.build(space.max), toy.source(), Retraining(ONCE))


def by_supernet(space: NetworkSpace) -> None:
    train_supernet(Supernet(space, "bcv2"), toy.source(), SupernetTraining(optimisation=ONCE))


def by_healing(space: NetworkSpace) -> None:
    scorer = CutScorer(space, space.build(space.max), "l2", [toy.images(3)], [toy.images(8)], healing=Healing(steps=1))
    scorer.score(space.min)


def by_taylor(space: NetworkSpace) -> None:
    taylor(space, space.build(space.max), [toy.images(3)], nn.functional.cross_entropy)


@pytest.mark.parametrize("work", [by_retraining, by_supernet, by_healing, by_taylor])
def test_no_training_on_a_cpu_asks_for_it(work: Callable[[NetworkSpace], None]) -> None:
    traced = space()
    with Strides() as strides:
        work(traced)
    assert set(strides.heard) == {(1, 1)}


@pytest.mark.parametrize("padding", [0, "valid", (0, 0), 1, (0, 1)])
@pytest.mark.parametrize("stride", [1, 2, (2, 1), [3]])
def test_outputs_and_gradients_are_the_same(stride: Any, padding: Any) -> None:
    torch.manual_seed(0)
    x, weight, bias = torch.randn(4, 6, 7, 8).double(), torch.randn(5, 3, 1, 1).double(), torch.randn(5).double()
    found = []
    for device in ("cpu", "meta"):  # nothing is changed on other devices
        leaves = [t.clone().requires_grad_() for t in (x, weight[:4], bias[:4])]
        with safe_gradients(torch.device(device)):
            y = torch.conv2d(*leaves, stride=stride, padding=padding, groups=2)
        found.append((y, *torch.autograd.grad(y.square().sum(), leaves)))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)
