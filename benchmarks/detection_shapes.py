"""Shapes on noise for benchmarks/detection.py: single ones to name, several to find, and how well they were found."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Floats = NDArray[np.float64]
NOISE, CONTRAST, MOST = 0.5, 0.8, 4
"""The noise of an image, how far a shape's colour is from grey, and the most shapes in one."""
THRESHOLDS = np.arange(0.5, 1.0, 0.05)

# From x and y in -1..1 to whether a point is in the shape; all touch their box on all four sides.
SHAPES: tuple[Callable[[Floats, Floats], NDArray[np.bool_]], ...] = (
    lambda x, y: x**2 + y**2 <= 1,
    lambda x, y: np.maximum(abs(x), abs(y)) <= 1,
    lambda x, y: abs(x) + abs(y) <= 1,
    lambda x, y: abs(x) <= (y + 1) / 2,
    lambda x, y: np.minimum(abs(x), abs(y)) <= 0.35,
    lambda x, y: (x**2 + y**2 <= 1) & (x**2 + y**2 >= 0.4),
    lambda x, y: np.maximum(abs(x), abs(y)) >= 0.6,
    lambda x, y: abs(abs(x) - abs(y)) <= 0.3,
)
CLASSES = len(SHAPES)


class Scene(NamedTuple):
    """``image`` (3, side, side), ``boxes`` (n, 4) as left, top, right, bottom, ``labels`` (n,) from 1."""

    image: Tensor
    boxes: Tensor
    labels: Tensor


def scenes(count: int, side: int, seed: int) -> list[Scene]:
    """Images with 1 to 4 shapes, which hardly overlap."""
    rng = np.random.default_rng([seed, 40])
    return [_scene(side, int(rng.integers(1, MOST + 1)), rng) for _ in range(count)]


def singles(count: int, side: int, seed: int) -> tuple[Tensor, Tensor]:
    """Images (n, 3, side, side) of one shape each, and which it is, (n,)."""
    rng = np.random.default_rng([seed, 41])
    made = [_scene(side, 1, rng) for _ in range(count)]
    return torch.stack([scene.image for scene in made]), torch.cat([scene.labels for scene in made]) - 1


def _scene(side: int, wanted: int, rng: np.random.Generator) -> Scene:
    image = rng.normal(0, NOISE, (3, side, side)).astype(np.float32)
    boxes: list[list[float]] = []
    labels: list[int] = []
    for _ in range(4 * wanted):  # places that are taken are not tried for ever
        width, height = rng.uniform(side / 8, side / 2.5, 2).round()
        left, top = rng.uniform(0, side - width), rng.uniform(0, side - height)
        box = [left, top, left + width, top + height]
        if len(boxes) == wanted or (boxes and _ious(np.array([box]), np.array(boxes)).max() > 0.05):
            continue
        label = int(rng.integers(CLASSES))
        grid = np.arange(side) + 0.5
        inside = SHAPES[label](2 * (grid[None] - left) / width - 1, 2 * (grid[:, None] - top) / height - 1)
        within = (abs(grid[None] - left - width / 2) <= width / 2) & (
            abs(grid[:, None] - top - height / 2) <= height / 2
        )
        colour = rng.choice([-1, 1], 3) * CONTRAST * rng.uniform(0.5, 1, 3)
        image += (inside & within) * colour[:, None, None].astype(np.float32)
        boxes.append(box)
        labels.append(label + 1)
    return Scene(torch.from_numpy(image), torch.tensor(boxes, dtype=torch.float32), torch.tensor(labels))


def _ious(a: NDArray[Any], b: NDArray[Any]) -> NDArray[Any]:
    """Intersection over union of boxes (n, 4) and (m, 4): (n, m)."""
    low, high = np.maximum(a[:, None, :2], b[None, :, :2]), np.minimum(a[:, None, 2:], b[None, :, 2:])
    shared = (high - low).clip(min=0).prod(axis=2)
    areas = [(boxes[:, 2:] - boxes[:, :2]).prod(axis=1) for boxes in (a, b)]
    overlap: NDArray[Any] = shared / (areas[0][:, None] + areas[1][None] - shared)
    return overlap


def map_of(found: list[dict[str, NDArray[Any]]], data: list[Scene]) -> dict[str, float]:
    """Mean average precision in percent, over IoU 0.5 to 0.95 and at 0.5, of ``boxes``, ``labels`` and ``scores`` of
    every image, as COCO counts it: 101 levels of recall, classes that occur, every shape found once."""
    labels = sorted({int(label) for scene in data for label in scene.labels})
    table = np.array([_precisions(found, data, label) for label in labels])
    return {"map": 100 * float(table.mean()), "map50": 100 * float(table[:, 0].mean())}


def _precisions(found: list[dict[str, NDArray[Any]]], data: list[Scene], label: int) -> Floats:
    """The average precision of one class at every threshold, (10,)."""
    scores: list[float] = []
    hits: list[NDArray[np.bool_]] = []
    there = 0
    for answer, scene in zip(found, data, strict=True):
        mine = scene.boxes.numpy()[scene.labels.numpy() == label]
        there += len(mine)
        free = np.ones((len(THRESHOLDS), len(mine)), dtype=bool)
        chosen = np.flatnonzero(answer["labels"] == label)
        chosen = chosen[np.argsort(-answer["scores"][chosen], kind="stable")]
        overlaps = _ious(answer["boxes"][chosen], mine)
        for row, overlap in zip(chosen, overlaps, strict=True):
            left = np.where(free, overlap, 0.0)
            hit = left.max(axis=1, initial=0.0) >= THRESHOLDS
            if hit.any():
                free[hit, left[hit].argmax(axis=1)] = False
            scores.append(float(answer["scores"][row]))
            hits.append(hit)
    if not hits:
        return np.zeros(len(THRESHOLDS))
    counted = np.cumsum(np.array(hits)[np.argsort(-np.array(scores), kind="stable")], axis=0)
    return np.array([_average(column, there) for column in counted.T])


def _average(hits: NDArray[np.int64], there: int) -> float:
    """The mean over 101 levels of recall, given how many shapes the first answers hit, (n,), of all that are there."""
    precision = hits / np.arange(1, len(hits) + 1)
    best = np.maximum.accumulate(precision[::-1])[::-1]
    at = np.searchsorted(hits / there, np.linspace(0, 1, 101))
    return float(np.mean([best[i] if i < len(best) else 0.0 for i in at]))


def supply_operators() -> None:
    """Non-maximum suppression for a torchvision made for CUDA, which lacks its own operators on a CPU-only torch."""
    if torch.version.cuda is not None:
        return
    for name in ("nms", "qnms"):
        if not hasattr(torch.ops.torchvision, name):
            _LIBRARY.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _LIBRARY.impl("nms", _nms, "CPU", allow_override=True)
    from torchvision.ops import boxes

    boxes._assert_has_ops = lambda: None


_LIBRARY = torch.library.Library("torchvision", "FRAGMENT")


def _nms(boxes: Tensor, scores: Tensor, threshold: float) -> Tensor:
    overlap = _ious(boxes.detach().numpy(), boxes.detach().numpy())
    kept: list[int] = []
    for row in scores.argsort(descending=True, stable=True).tolist():
        if not kept or overlap[row, kept].max() <= threshold:
            kept.append(row)
    return torch.tensor(kept, dtype=torch.int64)
