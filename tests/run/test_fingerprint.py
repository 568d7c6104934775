"""What a run from Python was given is told apart by digests, and the same things have the same ones."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import bcnet
from bcnet.data.source import Data, from_loaders
from bcnet.run.fingerprint import changed, fingerprint
from bcnet.space.network import trace
from bcnet.training.task import Task

EXAMPLE = torch.zeros(1, 2, 6, 6)


def network(activation: type[nn.Module] = nn.ReLU, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(2, 8, 3), activation(), nn.Conv2d(8, 8, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(1), nn.Linear(8, 3)
    )


def data(shift: float = 0.0, shuffle: bool = True) -> Data:
    x = torch.randn(48, 2, 6, 6, generator=torch.Generator().manual_seed(1)) + shift
    loader: DataLoader[Any] = DataLoader(TensorDataset(x, torch.arange(48) % 3), 16, shuffle=shuffle)
    return from_loaders(loader, loader, classes=3)


def task(weight: float = 1.0) -> Task:
    def loss(output: Tensor, target: Tensor) -> Tensor:
        return weight * F.cross_entropy(output, target)

    return Task(loss, lambda output, target: (output.argmax(1) == target).float())


def taken(model: nn.Module | None = None, given: Data | None = None, of: Task | None = None) -> dict[str, str]:
    model = model or network()
    return fingerprint(trace(model, EXAMPLE, groups=4), model, given or data(), of)


def test_the_same_call_has_the_same_fingerprint() -> None:
    assert changed(taken(of=task()), taken(of=task())) is None


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ({"model": network(nn.SiLU)}, "another network"),
        ({"model": network(seed=1)}, "other weights"),
        ({"given": data(0.5)}, "other data"),
        ({"given": data(shuffle=False)}, "other data"),
        ({"of": task(2.0)}, "another task"),
        ({"of": Task(F.mse_loss, lambda output, target: output[:, 0])}, "another task"),
        ({"of": None}, "another task"),
    ],
)
def test_anything_else_is_told_apart(other: dict[str, Any], words: str) -> None:
    assert changed(taken(of=task()), taken(**{"of": task(), **other})) == words


def test_a_folder_that_kept_none_is_told_apart() -> None:
    assert changed({}, taken()) == "another network"


class Restless:
    """A loader with noise of its own, that no seed repeats."""

    def __init__(self, channels: int = 2):
        self._generator = torch.Generator().manual_seed(torch.seed() % 2**31)
        self._channels = channels

    def __len__(self) -> int:
        return 2

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for _ in range(2):
            yield torch.randn(4, self._channels, 6, 6, generator=self._generator), torch.arange(4) % 3


def test_data_that_never_repeats_is_known_by_its_shapes() -> None:
    first, second, wider = (from_loaders(loader, loader) for loader in (Restless(), Restless(), Restless(3)))
    assert changed(taken(given=first), taken(given=second)) is None
    assert changed(taken(given=first), taken(given=wider)) == "other data"


def noise(stop: int = 0) -> list[tuple[Tensor, Tensor]]:
    """Images that tell nothing of their class; a list that cannot be read for the ``stop``-th time."""

    class Stops(list[Any]):
        passes = 0

        def __iter__(self) -> Iterator[Any]:
            self.passes += 1
            if self.passes == stop:
                raise ConnectionError("the server is gone")
            return super().__iter__()

    return Stops([(torch.randn(96, 2, 6, 6, generator=torch.Generator().manual_seed(1)), torch.arange(96) % 3)])


def test_an_untrained_network_may_be_drawn_anew(tmp_path: Path) -> None:
    """A script that seeds nothing gives other weights when it goes on; what the first ones became is used."""
    settings = {
        **{"groups": 4, "given": {"epochs": 3, "warmup": 0}, "retrain": {"epochs": 1, "warmup": 0}, "threads": 1},
        **{"score": "cut", "search": {"evaluations": 4, "population": 3}, "race": None, "checkpoint_minutes": 1e-9},
    }
    out = tmp_path / "run"

    def call(model: nn.Module, stop: int = 0) -> bcnet.Result:
        return bcnet.slim(model, EXAMPLE, noise(stop), noise(), recipe=settings, out=out, progress=False)

    stops = (3, 5, 6, 7)  # before the first step, between steps, after the training
    for seed, stop in enumerate(stops):
        with suppress(ConnectionError):
            call(network(seed=seed), stop)
    first = call(network(seed=50))
    assert first.run.read("given")["knew"] is False
    assert call(network(seed=60)).networks == first.networks
