"""Data by name: digits, cluttered_digits, cifar10:FOLDER, imagefolder:FOLDER."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch

from bcnet.data.cifar10 import read_cifar10
from bcnet.data.cluttered_digits import read_cluttered_digits
from bcnet.data.device import DeviceData
from bcnet.data.digits import read_digits
from bcnet.data.imagefolder import FolderData, check_size, preprocessing, read_folder
from bcnet.data.options import LoadOptions
from bcnet.data.source import Data, ImageSet, Labelled, Preprocessing, split
from bcnet.errors import BcnetError, did_you_mean
from bcnet.utils.files import full_path

EMBEDDED = {"digits": read_digits, "cluttered_digits": read_cluttered_digits}
NAMES = {**{name: name for name in EMBEDDED}, "cifar10": "cifar10:FOLDER", "imagefolder": "imagefolder:FOLDER"}


def load_data(
    name: str,
    *,
    val_fraction: float = 0.1,
    seed: int = 0,
    device: torch.device | str = "cpu",
    shard: tuple[int, int] = (0, 1),
    options: LoadOptions | None = None,
) -> Data:
    """The data set ``name`` with ``val_fraction`` of its training images kept for validation, chosen by ``seed``.

    ``digits``, ``cluttered_digits`` and ``cifar10:FOLDER`` are held on ``device``. ``imagefolder:FOLDER`` reads
    FOLDER/train/CLASS/*; FOLDER/test is the test set and FOLDER/val the validation set, as they are. If there is only
    one of them, it is held out to the end, under its own name.
    ``shard`` is (rank, world) in a run of several processes: each gets its part of the batches a single one would see.
    """
    kind, colon, path = name.partition(":")
    if kind not in NAMES:
        guess = did_you_mean(kind, NAMES.values()) or f"there are {', '.join(NAMES.values())}"
        raise BcnetError(f"unknown data {kind!r}: {guess}")
    request = _Request(name, val_fraction, seed, device, shard, options or LoadOptions())
    try:
        if kind in EMBEDDED:
            if colon:
                raise BcnetError(f"{kind} comes with bcnet and takes no folder: write {kind}")
            return request.held(EMBEDDED[kind]())
        folder = _folder(kind, path)
        return request.held(read_cifar10(folder)) if kind == "cifar10" else request.streamed(folder)
    except OSError as error:
        raise BcnetError(f"{error.filename or path} cannot be read: {error.strerror or error}") from None


def _folder(kind: str, path: str) -> Path:
    if not path:
        raise BcnetError(f"{kind} needs the folder it lies in: write {NAMES[kind]}")
    folder = full_path(path)
    if not folder.is_dir():
        raise BcnetError(f"{folder} is {'no folder' if folder.exists() else 'missing'}: give the folder of {kind}")
    return folder


@dataclass(frozen=True)
class _Request:
    """The arguments of :func:`load_data`."""

    name: str
    val_fraction: float
    seed: int
    device: torch.device | str
    shard: tuple[int, int]
    options: LoadOptions

    def held(self, images: ImageSet) -> Data:
        """A set that lives on the device."""
        crop = images.crop if self.options.crop is None else self.options.crop
        flip = images.flip if self.options.flip is None else self.options.flip
        options = replace(self.options, crop=crop, flip=flip)
        training, test = self._move(images, images.train, crop), self._move(images, images.test)
        train, val = split(images.train.labels, self.val_fraction, self.seed)
        _, height, width = training.shape
        resize = f"images of {height} x {width} pixels as they are"
        return Data(
            name=self.name,
            train=training.train(options, self.seed, train, self.shard),
            val=training.plain(options, self.seed, val),
            test=test.plain(options, self.seed),
            whole=training.train(options, self.seed, shard=self.shard),
            shape=training.shape,
            classes=images.classes,
            names=images.names,
            preprocessing=Preprocessing(images.mean, images.std, images.values, resize),
        )

    def _move(self, images: ImageSet, part: Labelled, pad: int = 0) -> DeviceData:
        return DeviceData(
            torch.from_numpy(part.images),
            torch.from_numpy(part.labels),
            mean=images.mean,
            std=images.std,
            classes=images.classes,
            pad=pad,
            device=self.device,
        )

    def streamed(self, root: Path) -> Data:
        """A folder of images, read as they are needed."""
        if not (root / "train").is_dir():
            raise BcnetError(f"{root} has no folder 'train': images are looked for in train/CLASS/ and val/CLASS/")
        folder = read_folder(root / "train")
        check_size(folder.files[0], self.options.image_size)
        images = FolderData(folder, self.options, self.seed, self.device)
        others = [
            FolderData(read_folder(root / part, folder.classes), self.options, self.seed, self.device)
            for part in ("val", "test")
            if (root / part).is_dir()
        ]
        if len(others) == 2:
            train, val = None, others[0].plain()
        else:
            train, chosen = split(folder.labels, self.val_fraction, self.seed)
            val = images.plain(chosen)
        return Data(
            name=self.name,
            train=images.train(train, self.shard),
            val=val,
            test=others[-1].plain() if others else None,
            whole=images.train(None, self.shard),
            shape=(self.options.channels, self.options.image_size, self.options.image_size),
            classes=len(folder.classes),
            names=folder.classes,
            preprocessing=preprocessing(self.options),
            tested_on="test" if (root / "test").is_dir() else "val/",
        )
