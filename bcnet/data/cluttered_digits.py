"""Digits in clutter, the embedded example: scikit-learn's digits moved, turned, scaled and among pieces of others.

Every image (1, 24, 24) has one whole digit, which is its class, and some pieces of other digits. The images are made on
demand in about a second and are always the same. Training and test images are made from different digits: 8,000 from
three fifths of every class, 10,000 from the rest.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from bcnet.data.source import ImageSet, Index, Labelled, split

SIDE, TRAIN, TEST = 24, 8_000, 10_000
PIECES = 4
"""Pieces of other digits in every image."""


def read_cluttered_digits() -> ImageSet:
    """8,000 training and 10,000 test images (n, 1, 24, 24)."""
    from sklearn.datasets import load_digits

    found = load_digits()
    digits, labels = torch.from_numpy(found.images).float()[:, None], found.target.astype(np.int64)
    train, test = split(labels, fraction=0.4, seed=0)
    return ImageSet(
        train=_images(digits, labels, train, TRAIN, seed=0),
        test=_images(digits, labels, test, TEST, seed=1),
        classes=10,
        mean=(35.8,),
        std=(60.1,),
        crop=0,
        flip=False,
        names=tuple(map(str, range(10))),
    )


def _images(digits: Tensor, labels: Index, some: Index, count: int, seed: int) -> Labelled:
    """``count`` images from the digits ``some``, which are used equally often to within one."""
    rng = np.random.default_rng([seed, 24])
    which = some[np.arange(count) % len(some)]
    canvas = _placed(digits[which], rng, size=(1.1, 1.7), reach=0.45)
    for _ in range(PIECES):
        others = digits[rng.choice(some, count)]
        canvas = torch.maximum(canvas, 0.9 * _placed(_piece(others, rng), rng, size=(1.0, 1.6), reach=0.85))
    noise = torch.from_numpy(rng.normal(0, 1.0, tuple(canvas.shape)).astype(np.float32))
    pixels = ((canvas + noise) * (255 / 16)).clamp(0, 255).round()
    return Labelled(pixels.numpy().astype(np.uint8), labels[which])


def _piece(digits: Tensor, rng: np.random.Generator) -> Tensor:
    """Digits (n, 1, 8, 8) with all but a square of 4 x 4 pixels blanked."""
    places = torch.from_numpy(rng.integers(0, 5, (2, len(digits), 1)))
    inside = [(torch.arange(8) >= place) & (torch.arange(8) < place + 4) for place in places]
    return digits * (inside[0][:, :, None] & inside[1][:, None, :])[:, None]


def _placed(digits: Tensor, rng: np.random.Generator, size: tuple[float, float], reach: float) -> Tensor:
    """Digits (n, 1, 8, 8) on empty canvases (n, 1, 24, 24): scaled by ``size``, turned by up to 30 degrees, moved by up
    to ``reach`` of half the canvas."""
    n = len(digits)
    scale = SIDE / 8 / rng.uniform(*size, n)
    angle = rng.uniform(-math.pi / 6, math.pi / 6, n)
    move = rng.uniform(-reach, reach, (2, n))
    cos, sin = scale * np.cos(angle), scale * np.sin(angle)
    rows = [[cos, -sin, -cos * move[0] + sin * move[1]], [sin, cos, -sin * move[0] - cos * move[1]]]
    theta = torch.from_numpy(np.array(rows, dtype=np.float32)).permute(2, 0, 1)
    grid = F.affine_grid(theta, [n, 1, SIDE, SIDE], align_corners=False)
    return F.grid_sample(digits, grid, align_corners=False)
