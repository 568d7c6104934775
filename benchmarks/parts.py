"""What the benchmarks of trained networks (``rivals*.py``, ``inherited*.py``) take from bcnet, all in this place."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from bcnet import trace
from bcnet.data import DeviceData, LoadOptions
from bcnet.data.cifar10 import read_cifar10
from bcnet.data.source import split
from bcnet.errors import BcnetError
from bcnet.models import MODELS, build
from bcnet.search import Constraints, LogWidthModel
from bcnet.space.network import NetworkSpace
from bcnet.utils.provenance import provenance

__all__ = ["BcnetError", "Images", "NetworkSpace", "balanced", "layer_counts", "network", "provenance", "space_of"]

HELD_OUT = 0.1
SPLIT_SEED = 0
"""Which training images are held out never changes, whatever a training's own seed is."""
NOISE = 60.0
TINY = {"mobilenetv2_cifar": 8, "vgg19_cifar": 16, "resnet18_cifar": 16}
"""By how much tests narrow the networks."""

Batch = tuple[Tensor, Tensor]
Widths = NDArray[np.int64]


def network(name: str, tiny: bool = False, scale: float = 1.0) -> nn.Module:
    """The network ``name`` with fresh weights, all its widths times ``scale``; ``tiny`` ones are for tests."""
    narrow = TINY[name] if tiny else 1
    return build(name, [max(int(w * scale) // narrow, 4) for w in MODELS[name].widths])


def space_of(model: nn.Module, images: Images, round_to: int = 1) -> NetworkSpace:
    """The width space of ``model`` in which every whole width is a candidate."""
    example = images.test[0][0][:2].float().cpu()
    widest = max(tensor.shape[0] for tensor in model.state_dict().values() if tensor.ndim)
    return trace(model, example, groups=widest, round_to=round_to)


def layer_counts(space: NetworkSpace) -> NDArray[np.float64]:
    """In how many layers the channels of each variable lie: (L,)."""
    return space.layer_counts


def uniform(space: NetworkSpace, flops: float) -> Widths:
    """The widest uniform scaling within ``flops``."""
    return _constraints(space, flops).uniform()


def balanced(space: NetworkSpace, flops: float) -> Widths:
    """What the log-width model rates best before any score, within ``flops``, among bcnet's own candidates."""
    coarse = trace(space.model, space.example)
    return LogWidthModel.balanced(coarse).best(_constraints(coarse, flops))


def _constraints(space: NetworkSpace, flops: float) -> Constraints:
    return Constraints(space, space.costs, [f"flops={int(flops)}"])


@dataclass(frozen=True)
class Images:
    """A data set on a device: augmented training batches on demand, held-out and test images as lists of batches."""

    training: DeviceData
    index: NDArray[np.int64]
    val: list[Batch]
    test: list[Batch]
    crop: int

    @classmethod
    def cifar10(cls, folder: Path, device: str) -> Images:
        """CIFAR-10 in a folder, 5,000 training images of it held out."""
        found = read_cifar10(folder)

        def held(part: Any, pad: int) -> DeviceData:
            tensors = torch.from_numpy(part.images), torch.from_numpy(part.labels)
            mean, std = found.mean, found.std
            return DeviceData(*tensors, mean=mean, std=std, classes=found.classes, pad=pad, device=device)

        return cls._of(held(found.train, 4), held(found.test, 0), found.train.labels, 4)

    @classmethod
    def synthetic(cls, device: str, size: int = 16, count: int = 400) -> Images:
        """Noise around ten fixed pictures: what tests learn."""
        rng = np.random.default_rng(0)
        pictures = rng.integers(0, 256, (10, 3, size, size))

        def held(pad: int) -> DeviceData:
            labels = rng.integers(0, 10, count)
            noisy = pictures[labels] + rng.normal(0, NOISE, (count, 3, size, size))
            tensors = torch.from_numpy(noisy.clip(0, 255).astype(np.uint8)), torch.from_numpy(labels)
            return DeviceData(*tensors, mean=[128.0] * 3, std=[74.0] * 3, classes=10, pad=pad, device=device)

        train = held(1)
        return cls._of(train, held(0), train.labels.cpu().numpy(), 1)

    @classmethod
    def _of(cls, train: DeviceData, test: DeviceData, labels: NDArray[np.int64], crop: int) -> Images:
        index, held_out = split(labels, HELD_OUT, SPLIT_SEED)
        plain = LoadOptions(eval_batch_size=2500, channels_last=True)
        return cls(
            train, index, list(train.plain(plain, 0, held_out).batches()), list(test.plain(plain).batches()), crop
        )

    def train(self, batch: int, seed: int, cutout: int = 0) -> Callable[[int], Any]:
        """The function from an epoch to its batches; ``len(images.index) // batch`` of them."""
        options = LoadOptions(batch_size=batch, crop=self.crop, flip=True, cutout=cutout, channels_last=True)
        return self.training.train(options, seed, self.index).batches

    def batches(self, batch: int) -> int:
        """How many batches an epoch has."""
        return len(self.index) // min(batch, len(self.index))
