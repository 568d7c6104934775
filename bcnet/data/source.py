"""What training and scoring ask of data: sources of batches, grouped as ``Data``.

A source is any object with ``len(source)``, the number of batches in an epoch, and ``source.batches(epoch, start,
device)``, an iterator of ``(x, y)`` from batch ``start`` on. The order depends only on the seed and the epoch, never
on what was drawn before: a resumed run asks for the batch it stopped at and sees what it would have seen.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from bcnet.errors import BcnetError
from bcnet.utils.random_state import swap_random_states

Batch = tuple[Tensor, Tensor]
Index = NDArray[np.int64]

_END = object()


class Source(Protocol):
    """Batches of one part of a data set."""

    def __len__(self) -> int:
        """Batches in an epoch."""
        ...

    def batches(self, epoch: int, start: int = 0, device: torch.device | str | None = None) -> Iterator[Batch]:
        """Batches ``start``, ``start + 1``, ... of an epoch, as x (b, ...) and y (b, ...) on ``device``."""
        ...


@dataclass(frozen=True)
class Later:
    """``source`` from the epoch ``first`` on: the same images, shuffled and augmented differently."""

    source: Source
    first: int

    def __len__(self) -> int:
        return len(self.source)

    def batches(self, epoch: int, start: int = 0, device: torch.device | str | None = None) -> Iterator[Batch]:
        return self.source.batches(self.first + epoch, start, device)


@dataclass(frozen=True)
class First:
    """The first ``count`` batches of every epoch of ``source``, or all where there are fewer."""

    source: Source
    count: int

    def __len__(self) -> int:
        return min(self.count, len(self.source))

    def batches(self, epoch: int, start: int = 0, device: torch.device | str | None = None) -> Iterator[Batch]:
        return islice(self.source.batches(epoch, start, device), len(self) - start)


class Labelled(NamedTuple):
    """Decoded images (n, C, H, W) uint8 and their labels (n,) int64."""

    images: NDArray[np.uint8]
    labels: Index


@dataclass(frozen=True)
class Preprocessing:
    """From a raw image to an input: ``resize`` in words, pixel ``values`` ("0 to 255"), then minus ``mean`` (C,),
    divided by ``std`` (C,), both in units of these values."""

    mean: tuple[float, ...]
    std: tuple[float, ...]
    values: str
    resize: str


class ImageSet(NamedTuple):
    """A data set that fits into memory, with its own normalisation (C,) and the usual augmentation; ``values`` is the
    range of its pixels, in words."""

    train: Labelled
    test: Labelled
    classes: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    crop: int
    flip: bool
    names: tuple[str, ...]
    values: str = "0 to 255"


@dataclass(frozen=True)
class Data:
    """A data set as a run sees it.

    ``train`` and ``val`` are disjoint parts of the training set and ``whole`` is both together, augmented, for
    the final training; the search never looks at ``test``. In a run of several processes ``train`` and ``whole`` give
    each process its share of every batch, while ``val`` and ``test`` give all images to all. ``names`` are those of
    the classes, ``preprocessing`` says how images were prepared, if known, and ``tested_on`` what the test images are
    called.
    """

    name: str
    train: Source
    val: Source
    test: Source | None = None
    whole: Source | None = None
    shape: tuple[int, int, int] | None = None
    classes: int | None = None
    names: tuple[str, ...] | None = None
    preprocessing: Preprocessing | None = None
    tested_on: str = "test"

    @property
    def scored_on(self) -> str:
        """What the images that trained networks are scored on are called."""
        return "val" if self.test is None else self.tested_on


def split(labels: Index, fraction: float, seed: int) -> tuple[Index, Index]:
    """Indices (train, validation) of a training set: ``fraction`` of every class, as evenly as whole images allow.

    Fixed by the seed. The validation part comes shuffled, so that its batches hold all classes.
    """
    if not 0 < fraction < 1:
        raise BcnetError(f"val_fraction is {fraction}, but it must lie between 0 and 1")
    n = len(labels)
    count = round(n * fraction)
    if not 1 <= count < n:
        raise BcnetError(f"val_fraction {fraction} of {n} training images leaves training or validation without images")
    rng = np.random.default_rng([_seed(seed), 0])
    order = rng.permutation(n)
    by_class = order[np.argsort(labels[order], kind="stable")]
    # Evenly spaced places in a list sorted by class take the same share of each.
    chosen = by_class[((np.arange(count) + 0.5) * n / count).astype(np.int64)]
    return np.setdiff1d(order, chosen), rng.permutation(chosen)


def epoch_rng(seed: int, epoch: int, *more: int) -> np.random.Generator:
    """Random numbers of an epoch, independent of those of the split and of every other epoch."""
    if epoch < 0:
        raise BcnetError(f"epoch is {epoch}, but epochs count from 0")
    return np.random.default_rng([_seed(seed), 1 + epoch, *more])


def check_start(start: int, length: int) -> None:
    if not 0 <= start <= length:
        raise BcnetError(f"batch {start} was asked for, but an epoch of this data has {length} batches")


def share(batch: int, shard: tuple[int, int]) -> slice:
    """The part of every batch that process ``rank`` of ``world`` takes; all parts are of one size."""
    rank, world = shard
    if not 0 <= rank < world:
        raise BcnetError(f"shard is {shard}, but it must be (rank, world) with 0 <= rank < world")
    if batch % world:
        raise BcnetError(
            f"a batch of {batch} images cannot be shared evenly by {world} processes: "
            f"make it a multiple of {world} (a loader: drop_last=True)"
        )
    part = batch // world
    return slice(rank * part, (rank + 1) * part)


def from_loaders(
    train: Iterable[Any],
    val: Iterable[Any],
    test: Iterable[Any] | None = None,
    *,
    classes: int | None = None,
    seed: int = 0,
    shard: tuple[int, int] = (0, 1),
) -> Data:
    """Data from your own loaders of ``(x, y)``: DataLoaders, or any sized iterables of pairs of tensors.

    Their random numbers (shuffling and augmentation by torch, numpy or random) are set from ``seed`` and the
    epoch and kept apart from those of training, so that a resumed run repeats them; a DataLoader with
    ``persistent_workers`` does not seed its workers again, and its augmentation is not repeated. A resumed
    epoch loads and discards the batches before its start. Every process loads whole batches and takes its share.
    Labels are checked against ``classes`` where that is given.
    """
    return Data(
        name="your loaders",
        train=LoaderSource(train, classes=classes, seed=seed, shard=shard),
        val=LoaderSource(val, classes=classes, seed=seed, measured=True),
        test=None if test is None else LoaderSource(test, classes=classes, seed=seed, measured=True),
        classes=classes,
    )


class LoaderSource:
    """A user's loader as a source; networks are scored on a ``measured`` one, so all its values must be finite."""

    def __init__(
        self,
        loader: Iterable[Any],
        classes: int | None = None,
        seed: int = 0,
        shard: tuple[int, int] = (0, 1),
        measured: bool = False,
    ):
        try:
            length = len(loader)  # type: ignore[arg-type]
        except TypeError:
            raise BcnetError(
                "a loader must know how many batches an epoch has: give its data set a __len__, or pass a list"
            ) from None
        if length < 1:
            raise BcnetError("a loader gives no batches: its data set is empty, or smaller than a batch it drops")
        share(shard[1], shard)
        self._loader, self._length = loader, length
        self._classes, self._seed, self._shard, self._measured = classes, _seed(seed), shard, measured
        self._form: tuple[str, int] | None = None

    def __len__(self) -> int:
        return self._length

    def batches(self, epoch: int, start: int = 0, device: torch.device | str | None = None) -> Iterator[Batch]:
        check_start(start, self._length)
        entropy = int(epoch_rng(self._seed, epoch).integers(2**32))
        for generator in _generators(self._loader):
            generator.manual_seed(entropy)
        sampler: Any = getattr(self._loader, "sampler", None)
        if hasattr(sampler, "set_epoch"):
            sampler.set_epoch(epoch)
        own = _Randomness(entropy)
        with own:
            loaded = iter(self._loader)
        for number in range(self._length):
            with own:
                item = next(loaded, _END)
            if item is _END:
                raise BcnetError(
                    f"a loader promised {self._length} batches but gave {number}: it must give all of them on every "
                    "pass, as a list or a DataLoader does"
                )
            if number >= start:
                x, y = self._pair(item)
                part = share(len(x), self._shard)
                yield x[part].to(device, non_blocking=True), y[part].to(device, non_blocking=True)

    def _pair(self, item: Any) -> Batch:
        pair = isinstance(item, (tuple, list)) and len(item) == 2 and all(isinstance(t, Tensor) for t in item)
        if isinstance(self._loader, Dataset) and (not pair or item[1].dim() == 0):
            kind = type(self._loader).__name__
            raise BcnetError(
                f"{kind} is a data set that gives single samples: torch.utils.data.DataLoader makes batches"
            )
        if not pair:
            raise BcnetError("a loader must give batches (x, y) of two tensors: wrap it, or set its collate_fn")
        x, y = (t.clone() if t.is_inference() else t for t in item)  # training needs tensors that record gradients
        if x.dim() == 0 or y.dim() == 0 or len(x) != len(y):
            inputs, labels = (len(t) if t.dim() else "no batch of" for t in item)
            raise BcnetError(f"a loader gave {inputs} inputs with {labels} labels in one batch")
        if not len(x):
            raise BcnetError("a loader gave a batch without a single input: leave such batches out")
        self._check_form(x)
        if self._measured and not all(bool(torch.isfinite(t).all()) for t in item if t.is_floating_point()):
            raise BcnetError("a loader for scoring gave values that are infinite or NaN: clean its data")
        whole_numbers = not y.is_floating_point() and y.device.type == "cpu"
        if self._classes is not None and whole_numbers:
            check_labels(y, self._classes)
        return x, y

    def _check_form(self, x: Tensor) -> None:
        """One type and one number of channels throughout; height and width may vary."""
        form = str(x.dtype).removeprefix("torch."), x.shape[1] if x.dim() > 1 else 1
        if self._form is None:
            self._form = form
        if form != self._form:
            (kind, channels), (first_kind, first_channels) = form, self._form
            raise BcnetError(
                f"a loader gave inputs of {kind} with {channels} channels after some of {first_kind} with "
                f"{first_channels}: all must be alike"
            )


def check_labels(labels: Tensor | Index, classes: int) -> None:
    """Raise a :class:`BcnetError` where a label lies outside 0..classes-1."""
    low, high = int(labels.min()), int(labels.max())
    if low < 0 or high >= classes:
        raise BcnetError(
            f"label {low if low < 0 else high} is out of range: {classes} classes have labels 0..{classes - 1}"
        )


class _Randomness:
    """A context with global random states (torch, numpy, random) that belong to one pass over a loader."""

    def __init__(self, entropy: int):
        self._inside = (
            torch.Generator().manual_seed(entropy).get_state(),
            np.random.RandomState(entropy).get_state(),
            random.Random(entropy).getstate(),
        )

    def __enter__(self) -> None:
        self._outside = swap_random_states(self._inside)

    def __exit__(self, *_: object) -> None:
        self._inside = swap_random_states(self._outside)


def _generators(loader: object) -> list[torch.Generator]:
    """The generators a DataLoader was given, which are separate from the global state."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    holders = loader, getattr(loader, "sampler", None), batch_sampler, getattr(batch_sampler, "sampler", None)
    found = [getattr(holder, "generator", None) for holder in holders]
    return [generator for generator in found if isinstance(generator, torch.Generator)]


def _seed(seed: int) -> int:
    if not isinstance(seed, int) or isinstance(seed, bool) or seed < 0:
        raise BcnetError(f"seed must be a whole number of at least 0, got {seed!r:.40}")
    return seed
