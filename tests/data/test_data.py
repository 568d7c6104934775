"""Data on the device: order, augmentation, resuming, sharing, and the parts of a set."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from drawn import batches, labels_of, same
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from bcnet.data import DeviceData, LoadOptions, Source, from_loaders, load_data
from bcnet.data import device as device_module
from bcnet.data.cluttered_digits import read_cluttered_digits
from bcnet.data.device import Draws
from bcnet.data.source import split
from bcnet.errors import BcnetError

AUGMENTED = LoadOptions(batch_size=8, eval_batch_size=5, crop=2, flip=True, cutout=3)


def numbered(n: int = 41, pad: int = 2, channels: int = 3, dtype: torch.dtype = torch.uint8) -> DeviceData:
    """Images whose label is their number, with pixels that tell places apart."""
    pixels = torch.arange(n * channels * 6 * 5).reshape(n, channels, 6, 5) * 7 % 251
    mean, std = [float(10 * c) for c in range(channels)], [float(2 + c) for c in range(channels)]
    return DeviceData(pixels.to(dtype), torch.arange(n), mean=mean, std=std, classes=n, pad=pad)


def test_digits_are_those_of_scikit_learn() -> None:
    datasets = pytest.importorskip("sklearn.datasets", reason="scikit-learn is not installed")
    digits = datasets.load_digits()
    data = load_data("digits", options=LoadOptions(crop=0))
    parts = [pair for part in (data.train, data.val, data.test) for pair in part.batches(0)]
    assert data.shape == (1, 8, 8)
    assert data.classes == 10
    theirs = sorted((label, *row) for label, row in zip(digits.target, digits.data.astype(int), strict=True))
    held = {tuple(row) for row in theirs}
    ours = [
        (int(label), *(image * 6.017 + 4.884).round().int().flatten().tolist())
        for x, y in parts
        for image, label in zip(x, y, strict=True)
    ]
    assert held.issuperset(ours)
    # The last, incomplete training batch is left for other epochs.
    assert len(ours) == 1797 - 1294 % 256


def test_digits_in_clutter_are_always_the_same_and_made_of_different_digits() -> None:
    pytest.importorskip("sklearn.datasets", reason="scikit-learn is not installed")
    one, again = (read_cluttered_digits() for _ in range(2))
    for part, other, count in ((one.train, again.train, 8_000), (one.test, again.test, 10_000)):
        assert part.images.shape == (count, 1, 24, 24)
        assert np.array_equal(part.images, other.images)
        assert np.bincount(part.labels).min() > 0.09 * count
    # Image i is made of digit i mod 719 of the test digits, and the training digits are 1,078 others.
    assert np.array_equal(one.test.labels[:719], one.test.labels[719:1438])
    assert np.array_equal(one.train.labels[:1078], one.train.labels[1078:2156])


def test_digits_are_normalised_and_not_mirrored() -> None:
    data = load_data("digits")
    x = torch.cat([x for x, _ in data.val.batches(0)])
    assert x.mean().abs() < 0.05
    assert (x.std() - 1).abs() < 0.05
    assert data.train.options.flip is False  # type: ignore[attr-defined]
    assert data.train.options.crop == 1  # type: ignore[attr-defined]


def test_parts_do_not_overlap_and_the_test_set_does_not_depend_on_the_seed() -> None:
    def rows(source: Source | None) -> set[tuple[float, ...]]:
        assert source is not None
        return {tuple(image.flatten().tolist()) for x, _ in source.batches(0) for image in x}

    options = LoadOptions(batch_size=1, crop=0)
    one, again, other = (load_data("digits", seed=seed, options=options) for seed in (1, 1, 2))
    assert rows(one.val) == rows(again.val) != rows(other.val)
    assert rows(one.test) == rows(other.test)
    assert len(rows(one.train) | rows(one.val) | rows(one.test)) == 1797
    assert rows(one.train) | rows(one.val) == rows(one.whole)
    assert not rows(one.test) & rows(one.whole)
    assert not rows(one.train) & rows(one.val)


@given(st.lists(st.integers(0, 4), min_size=4, max_size=200), st.floats(0.3, 0.7), st.integers(0, 2**40))
def test_a_split_takes_its_share_of_every_class(labels: list[int], fraction: float, seed: int) -> None:
    given_labels = np.array(labels)
    train, val = split(given_labels, fraction, seed)
    assert sorted([*train, *val]) == list(range(len(labels)))
    assert len(val) == round(len(labels) * fraction)
    for label in range(5):
        share = len(val) / len(labels) * (given_labels == label).sum()
        assert abs((given_labels[val] == label).sum() - share) < 1


@pytest.mark.parametrize("fraction", [0, 1, -0.1, float("nan")])
def test_a_split_needs_a_fraction(fraction: float) -> None:
    with pytest.raises(BcnetError) as error:
        load_data("digits", val_fraction=fraction)
    assert str(error.value) == f"val_fraction is {fraction}, but it must lie between 0 and 1"


def test_a_split_needs_images_on_both_sides() -> None:
    with pytest.raises(BcnetError) as error:
        split(np.zeros(10, dtype=np.int64), 0.01, 0)
    assert str(error.value) == ("val_fraction 0.01 of 10 training images leaves training or validation without images")


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(*(st.integers(*ends) for ends in ((0, 40), (0, 4), (0, 4), (0, 1), (-2, 6), (-2, 5)))), min_size=1
    ),
    st.integers(0, 3),
    st.booleans(),
)
def test_augmentation_is_that_of_a_plain_loop(drawn: list[tuple[int, ...]], cutout: int, channels_last: bool) -> None:
    data, columns = numbered(), torch.tensor(drawn).T
    image, top, left, flip, cut_top, cut_left = columns
    x, y = data.take(Draws(image, top, left + flip * 4, 1 - 2 * flip, cut_top, cut_left), cutout, channels_last)
    assert y.tolist() == image.tolist()
    assert x.is_contiguous(memory_format=torch.channels_last if channels_last else torch.contiguous_format)
    pixels = torch.arange(41 * 90).reshape(41, 3, 6, 5) * 7 % 251
    mean, std = torch.tensor([0.0, 10, 20]).view(3, 1, 1), torch.tensor([2.0, 3, 4]).view(3, 1, 1)
    for row, (i, t, le, f, ct, cl) in zip(x, drawn, strict=True):
        padded = torch.nn.functional.pad(pixels[i], (2, 2, 2, 2))
        wanted = padded[:, t : t + 6, le : le + 5].float()
        wanted = ((wanted.flip(2) if f else wanted) - mean) / std
        wanted[:, max(ct, 0) : max(ct + cutout, 0), max(cl, 0) : max(cl + cutout, 0)] = 0
        torch.testing.assert_close(row, wanted)


def test_every_shift_direction_and_square_is_drawn() -> None:
    source = numbered().train(AUGMENTED)
    drawn = np.concatenate([source._draw(epoch).reshape(6, -1) for epoch in range(40)], axis=1)
    assert set(drawn[1]) == {0, 1, 2, 3, 4}
    assert {(step, left - 4 * (step < 0)) for left, step in zip(drawn[2], drawn[3], strict=True)} == {
        (step, left) for step in (1, -1) for left in range(5)
    }
    assert set(drawn[4]) == set(range(-1, 5))
    assert set(drawn[5]) == set(range(-1, 4))


def test_no_augmentation_gives_the_images() -> None:
    data = numbered()
    plain = {int(label): image for x, y in data.plain(AUGMENTED).batches(0) for image, label in zip(x, y, strict=True)}
    for x, y in data.train(LoadOptions(batch_size=8)).batches(3):
        assert all(torch.equal(image, plain[int(label)]) for image, label in zip(x, y, strict=True))


def test_float_images_and_grey_ones() -> None:
    for channels, dtype in ((3, torch.float32), (1, torch.uint8), (1, torch.float64)):
        data, reference = numbered(channels=channels, dtype=dtype), numbered(channels=channels)
        assert same(data.train(AUGMENTED).batches(0), reference.train(AUGMENTED).batches(0))
        assert next(data.train(AUGMENTED).batches(0))[0].dtype == torch.float32


def test_an_epoch_shows_every_image_once_in_an_order_of_its_own() -> None:
    source = numbered(40).train(AUGMENTED, seed=3)
    assert len(source) == 5
    first, second = labels_of(source, 0), labels_of(source, 1)
    assert sorted(first) == sorted(second) == list(range(40))
    assert first != second
    assert first == labels_of(numbered(40).train(AUGMENTED, seed=3), 0)
    assert first != labels_of(numbered(40).train(AUGMENTED, seed=4), 0)
    assert same(source.batches(7), source.batches(7))


def test_only_the_images_of_the_index_are_used() -> None:
    index = np.arange(3, 30, 3)
    data = numbered()
    assert set(labels_of(data.train(AUGMENTED, index=index), 0)) <= set(index)
    assert sorted(labels_of(data.plain(AUGMENTED, index=index))) == index.tolist()


@pytest.mark.parametrize("start", range(6))
def test_an_epoch_taken_up_again_goes_on_where_it_stopped(start: int, monkeypatch: Any) -> None:
    source = numbered().train(AUGMENTED)
    whole = batches(source, 2)
    assert len(whole) == len(source) == 5
    assert len(batches(source, 2, start)) == 5 - start
    if start < 5:
        assert same(whole[start:], source.batches(2, start))
        monkeypatch.setattr(device_module, "CHUNK", 8 * 90 * 2)
        assert same(whole[start:], source.batches(2, start))


@pytest.mark.parametrize("start", [-1, 6])
def test_a_start_outside_the_epoch(start: int) -> None:
    for source in (numbered().train(AUGMENTED), from_loaders([(torch.zeros(2), torch.zeros(2))] * 5, [(1, 2)]).train):
        with pytest.raises(BcnetError) as error:
            batches(source, 0, start)
        assert str(error.value) == f"batch {start} was asked for, but an epoch of this data has 5 batches"


@pytest.mark.parametrize("world", [1, 2, 4, 8])
def test_the_shares_of_all_processes_are_the_batch_of_one(world: int) -> None:
    data = numbered()
    whole = batches(data.train(AUGMENTED, seed=5), 1, 2)
    shares = [batches(data.train(AUGMENTED, seed=5, shard=(rank, world)), 1, 2) for rank in range(world)]
    joined = [tuple(torch.cat(part) for part in zip(*step, strict=True)) for step in zip(*shares, strict=True)]
    assert same(whole, joined)  # type: ignore[arg-type]


def test_shares_must_be_even() -> None:
    with pytest.raises(BcnetError) as error:
        load_data("digits", shard=(0, 3))
    assert str(error.value) == (
        "a batch of 256 images cannot be shared evenly by 3 processes: make it a multiple of 3 "
        "(a loader: drop_last=True)"
    )
    with pytest.raises(BcnetError) as error:
        load_data("digits", shard=(2, 2))
    assert str(error.value) == "shard is (2, 2), but it must be (rank, world) with 0 <= rank < world"


def test_validation_and_test_sets_go_to_every_process_as_a_whole() -> None:
    one, two = load_data("digits"), load_data("digits", shard=(1, 2))
    assert same(one.val.batches(0), two.val.batches(0))
    assert same(one.test.batches(0), two.test.batches(0))  # type: ignore[union-attr]


@given(st.integers(1, 41), st.integers(1, 50))
@settings(deadline=None)
def test_evaluation_covers_all_images_in_even_batches(n: int, size: int) -> None:
    source = numbered(n).plain(LoadOptions(eval_batch_size=size))
    found = batches(source)
    sizes = [len(y) for _, y in found]
    assert len(sizes) == len(source)
    assert max(sizes) <= size
    assert max(sizes) - min(sizes) <= 1
    assert sorted(labels_of(source)) == list(range(n))
    assert same(found, source.batches(9))
    assert [y.tolist() for _, y in source.batches(0, len(source) - 1)] == [found[-1][1].tolist()]


def test_evaluation_batches_mix_classes_that_lie_together() -> None:
    labels = torch.arange(100) // 50
    data = DeviceData(torch.zeros(100, 1, 2, 2), labels, mean=[0], std=[1], classes=2)
    assert all(0 < int(y.sum()) < len(y) for _, y in data.plain(LoadOptions(eval_batch_size=25)).batches(0))


def test_a_set_smaller_than_a_batch_is_one_batch() -> None:
    source = numbered(5).train(AUGMENTED)
    assert [len(y) for _, y in source.batches(0)] == [5]


def test_batches_can_be_sent_to_another_device() -> None:
    data = numbered()
    for source in (data.train(AUGMENTED), data.plain(AUGMENTED)):
        x, y = next(source.batches(0, device="meta"))
        assert (x.device.type, y.device.type) == ("meta", "meta")


class Counter(TorchDispatchMode):
    """Operations that would launch a kernel, and those that would make the host wait for the device."""

    VIEWS = ("view", "split", "unbind", "slice", "unsqueeze", "permute", "detach", "alias", "reshape")

    def __init__(self) -> None:
        super().__init__()
        self.kernels: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if not name.startswith(self.VIEWS):
            self.kernels.append(name)
        return func(*args, **(kwargs or {}))


def test_few_kernels_and_no_waiting() -> None:
    images = torch.zeros(5120, 3, 32, 32, dtype=torch.uint8)
    data = DeviceData(images, torch.zeros(5120), mean=[0] * 3, std=[1] * 3, classes=1, pad=4)
    source = data.train(LoadOptions(crop=4, flip=True, channels_last=True))
    with Counter() as counter:
        assert len(batches(source)) == 20
    assert len(counter.kernels) <= 2 * 20, counter.kernels
    assert not {"_local_scalar_dense", "nonzero", "item"} & set(counter.kernels)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"labels": torch.tensor([0, 1, 3])}, "label 3 is out of range: 3 classes have labels 0..2"),
        ({"labels": torch.tensor([0, -1, 2])}, "label -1 is out of range: 3 classes have labels 0..2"),
        ({"mean": [0.0], "std": [1.0]}, "the images have 3 channels, but mean and std are for 1"),
        (
            {"labels": torch.zeros(2)},
            "images (n, C, H, W) and labels (n,) are needed, got (3, 3, 4, 4) and (2,)",
        ),
        (
            {"images": torch.zeros(0, 3, 4, 4), "labels": torch.zeros(0)},
            "images (n, C, H, W) and labels (n,) are needed, got (0, 3, 4, 4) and (0,)",
        ),
        ({"images": torch.zeros(3, 4, 4)}, "images (n, C, H, W) and labels (n,) are needed, got (3, 4, 4) and (3,)"),
    ],
)
def test_bad_images_and_labels(change: dict[str, Any], message: str) -> None:
    arguments = {
        "images": torch.zeros(3, 3, 4, 4),
        "labels": torch.arange(3),
        "mean": [0.0] * 3,
        "std": [1.0] * 3,
        "classes": 3,
    }
    with pytest.raises(BcnetError) as error:
        DeviceData(**{**arguments, **change})
    assert str(error.value) == message


def test_bad_use_of_device_data() -> None:
    data = numbered(pad=1)
    for action, message in (
        (lambda: data.train(AUGMENTED), "a crop of 2 needs images padded by as much, but they are padded by 1"),
        (lambda: data.train(LoadOptions(), index=np.arange(0)), "there are no images to train on"),
        (lambda: data.plain(LoadOptions(), index=np.arange(0)), "there are no images to evaluate on"),
        (lambda: batches(data.train(LoadOptions()), -1), "epoch is -1, but epochs count from 0"),
        (lambda: batches(data.train(LoadOptions(), seed=-1)), "seed must be a whole number of at least 0, got -1"),
    ):
        with pytest.raises(BcnetError) as error:
            action()
        assert str(error.value) == message


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"batch_size": 0}, "batch_size is 0, but it must be at least 1"),
        ({"crop": -1}, "crop is -1, but it must be at least 0"),
        ({"workers": 1.5}, "workers is 1.5, but it must be a whole number"),
        ({"batch_size": True}, "batch_size is True, but it must be a whole number"),
        ({"flip": "yes"}, "flip is 'yes', but it must be true or false"),
        ({"channels": 4}, "channels is 4, but it must be 1 or 3"),
    ],
)
def test_bad_options(option: dict[str, Any], message: str) -> None:
    with pytest.raises(BcnetError) as error:
        LoadOptions(**option)
    assert str(error.value) == message


def test_epochs_of_the_device_leave_training_alone() -> None:
    state = torch.get_rng_state()
    data = load_data("digits")
    for source in (data.train, data.val):
        batches(source)
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("cifar-10", "unknown data 'cifar-10': did you mean 'cifar10:FOLDER'?"),
        ("digit", "unknown data 'digit': did you mean 'digits'?"),
        ("svhn", "unknown data 'svhn': there are digits, cluttered_digits, cifar10:FOLDER, imagefolder:FOLDER"),
        ("", "unknown data '': there are digits, cluttered_digits, cifar10:FOLDER, imagefolder:FOLDER"),
        ("digits:/tmp", "digits comes with bcnet and takes no folder: write digits"),
        ("cifar10", "cifar10 needs the folder it lies in: write cifar10:FOLDER"),
        ("imagefolder:", "imagefolder needs the folder it lies in: write imagefolder:FOLDER"),
        ("cifar10:/no/such/place", "/no/such/place is missing: give the folder of cifar10"),
        ("imagefolder:/dev/null", "/dev/null is no folder: give the folder of imagefolder"),
    ],
)
def test_bad_names(name: str, message: str) -> None:
    with pytest.raises(BcnetError) as error:
        load_data(name)
    assert str(error.value) == message


def test_sizes_of_evaluation_batches_are_the_option() -> None:
    data = load_data("digits", options=LoadOptions(eval_batch_size=100))
    assert [len(y) for _, y in data.test.batches(0)] == [90, 90, 90, 89]  # type: ignore[union-attr]
    assert all(a >= b for a, b in pairwise(len(y) for _, y in data.val.batches(0)))
