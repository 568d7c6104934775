"""Folders of images in ImageNet's layout, decoded by worker processes: root/train/CLASS/*.jpg, root/val/CLASS/*.jpg.

What happens to an image depends only on the seed, the epoch and the image, and not on the number of workers or
processes or on where an epoch is resumed.
"""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from bcnet.data.options import LoadOptions
from bcnet.data.source import Batch, Index, Preprocessing, check_start, epoch_rng, share
from bcnet.errors import BcnetError

MEAN = {3: (0.485 * 255, 0.456 * 255, 0.406 * 255), 1: (0.449 * 255,)}
STD = {3: (0.229 * 255, 0.224 * 255, 0.225 * 255), 1: (0.226 * 255,)}
SUFFIXES = {".jpg", ".jpeg", ".png", ".bmp", ".webp", ".ppm"}

_MODES = {"1", "L", "LA", "P", "PA", "RGB", "RGBA", "CMYK", "YCbCr"}
_CHECKED = 20_000
"""The number of images whose headers are read at the start (2 s), so that most bad files are found before training."""

_PLAIN = -1


@dataclass(frozen=True)
class Folder:
    """Image files (n) with their labels (n,) and the names of the classes."""

    files: tuple[Path, ...]
    labels: Index
    classes: tuple[str, ...]


def preprocessing(options: LoadOptions) -> Preprocessing:
    """How an image is prepared for scoring."""
    side = options.image_size
    resize = f"the middle square of 7/8 of the shorter side, resized to {side} x {side} (bilinear)"
    colours = "RGB" if options.channels == 3 else "grey"
    return Preprocessing(MEAN[options.channels], STD[options.channels], f"0 to 255, {colours}", resize)


def read_folder(root: Path, classes: tuple[str, ...] | None = None) -> Folder:
    """The images under root/CLASS/, classes in order of their names; ``classes`` are those of the training set."""
    names = sorted(entry.name for entry in root.iterdir() if entry.is_dir() and not entry.name.startswith("."))
    if not names:
        raise BcnetError(f"{root} is empty: one folder of images per class is needed")
    if classes is None and len(names) == 1:
        raise BcnetError(f"{root} has one class only, {names[0]!r}: at least two are needed to learn from")
    unknown = sorted(set(names) - set(classes or names))
    if unknown:
        raise BcnetError(f"{root} has a class {unknown[0]!r} that the training images do not have")
    known = classes or tuple(names)
    files: list[Path] = []
    labels: list[int] = []
    for name in names:
        found = sorted(path for path in (root / name).rglob("*") if path.suffix.lower() in SUFFIXES and path.is_file())
        if not found:
            raise BcnetError(f"{root / name} holds no images: {', '.join(sorted(SUFFIXES))} are read")
        files += found
        labels += [known.index(name)] * len(found)
    for path in files[:_CHECKED]:
        _open(path).close()
    return Folder(tuple(files), np.array(labels, dtype=np.int64), known)


def check_size(path: Path, side: int) -> None:
    """Warn where an image is much smaller than what it is resized to."""
    with _open(path) as image:
        width, height = image.size
    if 1.5 * max(width, height) < side:
        warnings.warn(
            f"images are enlarged to {side} x {side} pixels, as loading.image_size says, but {path.name} has "
            f"{width} x {height}: a size of {max(width, height)} would cost less",
            stacklevel=2,
        )


class FolderData:
    """Sources of a folder's images, normalised on ``device``."""

    def __init__(self, folder: Folder, options: LoadOptions, seed: int = 0, device: torch.device | str = "cpu"):
        self.folder, self.options, self.seed, self.device = folder, options, seed, torch.device(device)

    def train(self, index: Index | None = None, shard: tuple[int, int] = (0, 1)) -> FolderSource:
        """A shuffled, augmented source of the images ``index`` (all by default), in batches of one size."""
        chosen = self._all() if index is None else index
        batch = min(self.options.batch_size, len(chosen))
        return FolderSource(self, chosen, np.arange(0, len(chosen) + 1, batch), share(batch, shard), training=True)

    def plain(self, index: Index | None = None) -> FolderSource:
        """Every image of ``index`` once, in one fixed order that mixes the classes, in batches of about one size."""
        chosen = epoch_rng(self.seed, 0, 1).permutation(self._all() if index is None else index)
        parts = -(-len(chosen) // self.options.eval_batch_size)
        return FolderSource(self, chosen, np.linspace(0, len(chosen), parts + 1).astype(np.int64), slice(None))

    def _all(self) -> Index:
        return np.arange(len(self.folder.files))


class FolderSource:
    """The images ``index`` in batches that end at ``ends``; this process takes ``part`` of each."""

    def __init__(self, data: FolderData, index: Index, ends: Index, part: slice, training: bool = False):
        self.data = data
        self._index, self._ends, self._part, self._training = index, ends, part, training

    def __len__(self) -> int:
        return len(self._ends) - 1

    def batches(self, epoch: int, start: int = 0, device: torch.device | str | None = None) -> Iterator[Batch]:
        """x (b, C, S, S) float32 and y (b,)."""
        check_start(start, len(self))
        options, target = self.data.options, torch.device(device or self.data.device)
        loader: DataLoader[Any] = DataLoader(
            _Images(self.data.folder, options, self.data.seed),
            batch_sampler=self._keys(epoch, start),
            num_workers=min(options.workers, os.cpu_count() or 1),  # more would only wait
            collate_fn=_collate,
            pin_memory=target.type == "cuda",
            # Its own generator: without one, a loader takes a number from the global state of training.
            generator=torch.Generator().manual_seed(0),
        )
        mean, std = (torch.tensor(t[options.channels], device=target).view(-1, 1, 1) for t in (MEAN, STD))
        layout = torch.channels_last if options.channels_last else torch.contiguous_format
        for images, labels, problem in loader:
            if problem:
                raise BcnetError(problem)
            x = images.to(target, non_blocking=True).float().sub_(mean).div_(std)
            yield x.contiguous(memory_format=layout), labels.to(target, non_blocking=True)

    def _keys(self, epoch: int, start: int) -> Iterator[list[tuple[int, int]]]:
        """Batches of (image, epoch), from which :class:`_Images` makes tensors."""
        order = epoch_rng(self.data.seed, epoch).permutation(self._index) if self._training else self._index
        for begin, end in pairwise(self._ends[start:]):
            yield [(int(image), epoch if self._training else _PLAIN) for image in order[begin:end][self._part]]


class _Images(Dataset[tuple[Tensor | str, int]]):
    """(image, epoch) to a uint8 tensor (C, S, S) and its label; a sentence instead of the tensor where it is broken.

    A worker's exception would reach the user as a traceback inside a traceback.
    """

    def __init__(self, folder: Folder, options: LoadOptions, seed: int):
        self._folder, self._options, self._seed = folder, options, seed

    def __getitem__(self, key: tuple[int, int]) -> tuple[Tensor | str, int]:
        image, epoch = key
        try:
            return self._decode(self._folder.files[image], image, epoch), int(self._folder.labels[image])
        except BcnetError as error:
            return str(error), 0

    def _decode(self, path: Path, image: int, epoch: int) -> Tensor:
        from PIL.Image import Resampling

        options, size = self._options, self._options.image_size
        rng = None if epoch == _PLAIN else epoch_rng(self._seed, epoch, 1, image)
        with _open(path) as opened:
            crop = _centre(opened.size) if rng is None or options.crop == 0 else _random_box(opened.size, rng)
            try:
                converted = opened.convert("RGB" if options.channels == 3 else "L")
            except Exception as error:  # decoders fail in many ways, all of which mean a broken image
                raise _broken(path, error) from None
        pixels = np.asarray(converted.resize((size, size), Resampling.BILINEAR, box=crop))
        pixels = pixels.reshape(size, size, options.channels).transpose(2, 0, 1)
        if rng is not None and options.flip is not False and rng.random() < 0.5:
            pixels = pixels[:, :, ::-1]
        tensor = torch.from_numpy(pixels.copy())
        if rng is not None and options.cutout:
            _cut(tensor, options.cutout, rng)
        return tensor


def _collate(items: list[tuple[Tensor | str, int]]) -> tuple[Tensor, Tensor, str]:
    """Images (b, C, S, S), labels (b,) and the first problem, empty where there is none."""
    problem = next((image for image, _ in items if isinstance(image, str)), "")
    images = [image for image, _ in items if isinstance(image, Tensor)]
    return torch.stack(images) if images else torch.empty(0), torch.tensor([label for _, label in items]), problem


def _open(path: Path) -> Any:
    try:
        from PIL import Image
    except ImportError:
        raise BcnetError("image folders are read with pillow: pip install pillow") from None
    try:
        image = Image.open(path)
    except Exception as error:  # decoders fail in many ways, all of which mean a broken image
        raise _broken(path, error) from None
    if image.mode not in _MODES:
        image.close()
        raise BcnetError(f"{path} has channels of kind {image.mode!r}: convert it to 8-bit grey or colour")
    return image


def _broken(path: Path, error: Exception) -> BcnetError:
    return BcnetError(f"{path} is a broken image ({type(error).__name__}): replace or remove it")


def _centre(size: tuple[int, int]) -> tuple[float, float, float, float]:
    """The square of 7/8 of the shorter side (224 of 256) in the middle, as left, top, right, bottom."""
    side = min(size) * 0.875
    left, top = (size[0] - side) / 2, (size[1] - side) / 2
    return left, top, left + side, top + side


def _random_box(size: tuple[int, int], rng: np.random.Generator) -> tuple[float, float, float, float]:
    """The usual random resized crop: 8 to 100 % of the area, sides in ratio 3/4 to 4/3, ten tries."""
    for _ in range(10):
        area = size[0] * size[1] * rng.uniform(0.08, 1)
        ratio = math.exp(rng.uniform(math.log(3 / 4), math.log(4 / 3)))
        width, height = math.sqrt(area * ratio), math.sqrt(area / ratio)
        if width <= size[0] and height <= size[1]:
            left, top = rng.uniform(0, size[0] - width), rng.uniform(0, size[1] - height)
            return left, top, left + width, top + height
    return _centre(size)


def _cut(image: Tensor, side: int, rng: np.random.Generator) -> None:
    channels, height, width = image.shape
    top, left = int(rng.integers(height)) - side // 2, int(rng.integers(width)) - side // 2
    mean = torch.tensor(MEAN[channels]).round().to(torch.uint8).view(-1, 1, 1)
    image[:, max(top, 0) : max(top + side, 0), max(left, 0) : max(left + side, 0)] = mean
