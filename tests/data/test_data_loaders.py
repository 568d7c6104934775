"""Users' own loaders as sources: repeated, resumed, shared, and what is said of bad ones."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from drawn import batches, labels_of, same
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, RandomSampler, TensorDataset

from bcnet.data import from_loaders
from bcnet.errors import BcnetError


class Noisy(Dataset[tuple[Tensor, int]]):
    """Draws from every global generator, as users' transforms do."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        noise = torch.rand(()).item(), np.random.rand(), random.random()  # noqa: NPY002
        return torch.tensor([float(index), *noise]), index


def loader(**options: Any) -> DataLoader[Any]:
    return DataLoader(Noisy(), batch_size=4, **options)


@pytest.mark.parametrize(
    "options",
    [
        {"shuffle": True},
        {"shuffle": True, "generator": torch.Generator()},
        {"sampler": RandomSampler(Noisy(), generator=torch.Generator())},
        {"sampler": DistributedSampler(Noisy(), num_replicas=1, rank=0)},
        {"shuffle": True, "num_workers": 2},
    ],
    ids=["shuffle", "generator", "sampler", "distributed", "workers"],
)
def test_a_users_loader_repeats_its_epochs_and_leaves_training_alone(options: dict[str, Any]) -> None:
    source = from_loaders(loader(**options), loader()).train
    states = torch.get_rng_state(), random.getstate()
    whole = batches(source, 1)
    assert torch.equal(states[0], torch.get_rng_state())
    assert states[1] == random.getstate()
    assert len(whole) == len(source) == 6
    torch.rand(3)
    assert same(whole[2:], source.batches(1, 2))
    assert labels_of(source, 1) != labels_of(source, 2)
    assert sorted(labels_of(source, 2)) == list(range(24))


def test_training_between_batches_does_not_change_a_users_loader() -> None:
    source = from_loaders(loader(shuffle=True), loader()).train
    quiet, disturbed = batches(source, 0), []
    for pair in source.batches(0):
        disturbed.append(pair)
        torch.manual_seed(5)
        random.seed(5)
    assert same(quiet, disturbed)


def test_a_users_loader_shared_by_processes() -> None:
    whole = batches(from_loaders(loader(shuffle=True), loader()).train, 1)
    shares = [batches(from_loaders(loader(shuffle=True), loader(), shard=(r, 2)).train, 1) for r in range(2)]
    joined = [tuple(torch.cat(part) for part in zip(*step, strict=True)) for step in zip(*shares, strict=True)]
    assert same(whole, joined)  # type: ignore[arg-type]
    uneven = DataLoader(TensorDataset(torch.zeros(5, 2), torch.zeros(5)), batch_size=4)
    with pytest.raises(BcnetError, match=r"^a batch of 1 images cannot be shared evenly by 2 processes: "):
        batches(from_loaders(uneven, uneven, shard=(0, 2)).train)


def test_any_sized_iterable_of_pairs_will_do() -> None:
    pairs = [(torch.rand(2, 3), torch.rand(2, 4)) for _ in range(3)]
    data = from_loaders(pairs, pairs, pairs[:1])
    assert same(data.train.batches(5, 1), pairs[1:])
    assert len(data.test) == 1  # type: ignore[arg-type]
    assert from_loaders(pairs, pairs).test is None
    assert next(data.val.batches(0, device="meta"))[0].device.type == "meta"


class Endless(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(3))


@pytest.mark.parametrize(
    ("train", "message"),
    [
        (
            DataLoader(Endless()),
            "a loader must know how many batches an epoch has: give its data set a __len__, or pass a list",
        ),
        ([], "a loader gives no batches: its data set is empty, or smaller than a batch it drops"),
        (
            DataLoader(Noisy(), batch_size=32, drop_last=True),
            "a loader gives no batches: its data set is empty, or smaller than a batch it drops",
        ),
        ([torch.zeros(2)], "a loader must give batches (x, y) of two tensors: wrap it, or set its collate_fn"),
        ([None], "a loader must give batches (x, y) of two tensors: wrap it, or set its collate_fn"),
        ([{"x": 1, "y": 2}], "a loader must give batches (x, y) of two tensors: wrap it, or set its collate_fn"),
        ([(torch.zeros(2), torch.zeros(3))], "a loader gave 2 inputs with 3 labels in one batch"),
        ([(torch.zeros(()), torch.zeros(3))], "a loader gave no batch of inputs with 3 labels in one batch"),
        (
            [(torch.zeros(0, 3), torch.zeros(0))],
            "a loader gave a batch without a single input: leave such batches out",
        ),
        (
            [(torch.zeros(2, 3), torch.zeros(2)), (torch.zeros(2, 4), torch.zeros(2))],
            "a loader gave inputs of float32 with 4 channels after some of float32 with 3: all must be alike",
        ),
        (
            [(torch.zeros(2, 3), torch.zeros(2)), (torch.zeros(2, 3).double(), torch.zeros(2))],
            "a loader gave inputs of float64 with 3 channels after some of float32 with 3: all must be alike",
        ),
        ([(torch.zeros(2), torch.tensor([0, 7]))], "label 7 is out of range: 7 classes have labels 0..6"),
        ([(torch.zeros(2), torch.tensor([0, -1]))], "label -1 is out of range: 7 classes have labels 0..6"),
    ],
)
def test_bad_loaders(train: Any, message: str) -> None:
    with pytest.raises(BcnetError) as error:
        batches(from_loaders(train, [(torch.zeros(1), torch.zeros(1))], classes=7).train)
    assert str(error.value) == message


def test_a_loader_that_gives_less_than_it_says_is_refused() -> None:
    class Once:
        """An iterator in disguise: nothing is left for a second pass."""

        def __init__(self) -> None:
            self.pairs = iter([(torch.zeros(1, 2), torch.zeros(1))] * 5)

        def __len__(self) -> int:
            return 5

        def __iter__(self) -> Any:
            return self.pairs

    data = from_loaders(Once(), Once())
    assert len(batches(data.val)) == 5
    with pytest.raises(BcnetError) as error:
        batches(data.val)
    assert str(error.value) == (
        "a loader promised 5 batches but gave 0: it must give all of them on every pass, as a list or a DataLoader does"
    )


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("place", [0, 1])
def test_values_that_are_no_numbers_are_not_scored_on(value: float, place: int) -> None:
    pair = [torch.zeros(2, 3), torch.zeros(2, 1)]
    pair[place][1, 0] = value
    with pytest.raises(BcnetError) as error:
        batches(from_loaders([tuple(pair)], [tuple(pair)]).val)
    assert str(error.value) == "a loader for scoring gave values that are infinite or NaN: clean its data"
