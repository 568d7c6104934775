"""Small data sets that live on the device, shuffled and augmented there.

The random numbers of a whole epoch (order, crops, flips, cutouts) are drawn at its start from (seed, epoch) by
numpy on the host and sent over once. Nothing is drawn per batch, so there is no generator state to save, every
device and every process sees the same epoch, and an epoch can start at any batch. Images are augmented several
batches at a time, about ten kernels for about ``CHUNK`` values, and batches are views of the result.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from bcnet.data.options import LoadOptions
from bcnet.data.source import Batch, Index, check_labels, check_start, epoch_rng, share
from bcnet.errors import BcnetError

CHUNK = 1 << 23
"""Values (32 MB) augmented at once: ten CIFAR batches of 256."""


class Draws(NamedTuple):
    """Random numbers of n images, each (n,): which image, its crop, its direction and its cutout."""

    image: Tensor
    top: Tensor
    left: Tensor
    step: Tensor
    cut_top: Tensor
    cut_left: Tensor


class DeviceData:
    """Images (n, C, H, W), uint8 or float, and labels (n,) on a device.

    ``mean`` and ``std`` (C,) are in the units of the images; ``pad`` is the largest shift of a crop.
    """

    def __init__(
        self,
        images: Tensor,
        labels: Tensor,
        *,
        mean: Sequence[float],
        std: Sequence[float],
        classes: int,
        pad: int = 0,
        device: torch.device | str = "cpu",
    ):
        if images.ndim != 4 or labels.shape != images.shape[:1] or not len(images):
            raise BcnetError(
                f"images (n, C, H, W) and labels (n,) are needed, got {tuple(images.shape)} and {tuple(labels.shape)}"
            )
        if len(mean) != images.shape[1] or len(std) != images.shape[1]:
            raise BcnetError(f"the images have {images.shape[1]} channels, but mean and std are for {len(mean)}")
        check_labels(labels, classes)
        self.count, self.pad = len(images), pad
        self.shape: tuple[int, int, int] = (images.shape[1], images.shape[2], images.shape[3])
        self.classes = classes
        self.labels = labels.to(device, torch.int64)
        # Padded and with channels innermost, so that crop, flip and channels-last are one gather of pixels.
        padded = torch.nn.functional.pad(images, (pad, pad, pad, pad)).permute(0, 2, 3, 1).contiguous()
        self._stride: tuple[int, int] = (padded.shape[1], padded.shape[2])
        self._pixels = padded.reshape(-1, self.shape[0]).to(device)
        scale = 1 / torch.tensor(std, dtype=torch.float32)
        shift = -torch.tensor(mean, dtype=torch.float32) * scale
        self._scale, self._shift = (t.repeat(self.shape[2]).to(device) for t in (scale, shift))
        self._rows = torch.arange(self.shape[1], device=device)
        self._columns = torch.arange(self.shape[2], device=device)

    @property
    def device(self) -> torch.device:
        return self.labels.device

    def train(
        self, options: LoadOptions, seed: int = 0, index: Index | None = None, shard: tuple[int, int] = (0, 1)
    ) -> TrainSource:
        """A shuffled, augmented source of the images ``index`` (all by default)."""
        return TrainSource(self, options, seed, np.arange(self.count) if index is None else index, shard)

    def plain(self, options: LoadOptions, seed: int = 0, index: Index | None = None) -> PlainSource:
        """Every image of ``index`` once, without augmentation, in one fixed order that mixes the classes."""
        return PlainSource(self, options, seed, np.arange(self.count) if index is None else index)

    def take(self, draws: Draws, cutout: int = 0, channels_last: bool = False) -> Batch:
        """Normalised images (b, C, H, W) float32 and labels (b,)."""
        channels, height, width = self.shape
        column = torch.addcmul(draws.left[:, None], draws.step[:, None], self._columns)
        row = draws.image[:, None] * self._stride[0] + draws.top[:, None] + self._rows
        pixel = row[:, :, None] * self._stride[1] + column[:, None, :]
        rows = self._pixels.index_select(0, pixel.view(-1)).view(-1, height, width * channels)
        # Rows as a whole: the last axis, which is otherwise only C long, is then worth vectorising (4 x on a CPU).
        x = torch.addcmul(self._shift, rows.float(), self._scale).view(-1, height, width, channels)
        if cutout:
            x.masked_fill_(self._square(draws, cutout), 0.0)
        x = x.permute(0, 3, 1, 2)
        return x if channels_last else x.contiguous(), self.labels.index_select(0, draws.image)

    def _square(self, draws: Draws, side: int) -> Tensor:
        """Pixels a cutout covers, (b, H, W, 1)."""
        down = self._rows - draws.cut_top[:, None]
        right = self._columns - draws.cut_left[:, None]
        inside = [(distance >= 0) & (distance < side) for distance in (down, right)]
        return (inside[0][:, :, None] & inside[1][:, None, :])[..., None]


class TrainSource:
    """Augmented batches, all of one size: images left over at the end of an epoch are not used in it."""

    def __init__(self, data: DeviceData, options: LoadOptions, seed: int, index: Index, shard: tuple[int, int]):
        crop = options.crop or 0
        if crop > data.pad:
            raise BcnetError(f"a crop of {crop} needs images padded by as much, but they are padded by {data.pad}")
        if not len(index):
            raise BcnetError("there are no images to train on")
        self.data, self.options, self.seed = data, options, seed
        self._index, self._crop = index, crop
        self._batch = min(options.batch_size, len(index))
        self._share = share(self._batch, shard)

    def __len__(self) -> int:
        return len(self._index) // self._batch

    def batches(self, epoch: int, start: int = 0, device: torch.device | str | None = None) -> Iterator[Batch]:
        """Batches of this process's share, x (b, C, H, W) and y (b,)."""
        check_start(start, len(self))
        drawn = np.ascontiguousarray(self._draw(epoch)[:, :, self._share])
        epoch_draws = torch.from_numpy(drawn).to(self.data.device)
        size = epoch_draws.shape[2]
        together = max(1, CHUNK // (size * int(np.prod(self.data.shape))))
        for first in range(start, len(self), together):
            draws = Draws(*epoch_draws[:, first : first + together].flatten(1))
            x, y = self.data.take(draws, self.options.cutout, self.options.channels_last)
            for one_x, one_y in zip(x.split(size), y.split(size), strict=True):
                yield one_x.to(device or one_x.device), one_y.to(device or one_y.device)

    def _draw(self, epoch: int) -> Index:
        """The random numbers of an epoch, (6, batches, batch): the rows of :class:`Draws`."""
        rng = epoch_rng(self.seed, epoch)
        _, height, width = self.data.shape
        n = len(self) * self._batch
        image = rng.permutation(self._index)[:n]
        moved = rng.integers(-self._crop, self._crop + 1, size=(2, n)) + self.data.pad
        flip = rng.integers(0, 2, size=n) * bool(self.options.flip)
        centre = rng.integers(0, [[height], [width]], size=(2, n)) - self.options.cutout // 2
        rows = [image, moved[0], moved[1] + flip * (width - 1), 1 - 2 * flip, centre[0], centre[1]]
        return np.stack(rows).reshape(6, -1, self._batch)


class PlainSource:
    """All images once, unaugmented, in batches whose sizes differ by at most one.

    A nearly empty last batch would have unusual batch statistics, hence the even sizes.
    """

    def __init__(self, data: DeviceData, options: LoadOptions, seed: int, index: Index):
        if not len(index):
            raise BcnetError("there are no images to evaluate on")
        self.data, self.options = data, options
        image = epoch_rng(seed, 0, 1).permutation(index)
        rows = [image, *(np.full_like(image, value) for value in (data.pad, data.pad, 1, 0, 0))]
        parts = -(-len(index) // options.eval_batch_size)
        self._draws = torch.from_numpy(np.stack(rows)).to(data.device).tensor_split(parts, dim=1)

    def __len__(self) -> int:
        return len(self._draws)

    def batches(self, epoch: int = 0, start: int = 0, device: torch.device | str | None = None) -> Iterator[Batch]:
        check_start(start, len(self))
        for draws in self._draws[start:]:
            x, y = self.data.take(Draws(*draws), channels_last=self.options.channels_last)
            yield x.to(device or x.device), y.to(device or y.device)
