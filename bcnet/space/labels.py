"""Labels: which channel of which parameter an element of a tensor belongs to.

Every index of every parameter dimension has a label, a positive integer. The labels of a tensor are
*layers*: integer tensors of the tensor's own shape, one per channel dimension it carries (an activation
has one, a convolution's weight two), 0 where an element belongs to no channel. Spatial and batch axes
are expanded views (stride 0), so layers cost next to nothing, and an operator that only moves data is
simply run on the layers. ``Links`` collects which labels must stay or go together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from scipy.sparse import coo_matrix
from scipy.sparse.csgraph import breadth_first_order, connected_components
from torch import Tensor

FIXED = 1


@dataclass(frozen=True)
class Value:
    """A tensor of the graph as the analysis sees it: its shape and label layers.

    Layers are kept settled (see :func:`settle`), and only those whose labels differ somewhere. ``numbers`` is a
    buffer of integers with its name, where the tensor is one.
    """

    shape: tuple[int, ...]
    layers: tuple[Tensor, ...] = ()
    numbers: tuple[str, Tensor] | None = None

    def __post_init__(self) -> None:
        settled = (settle(layer) for layer in self.layers if layer.numel())
        object.__setattr__(self, "layers", tuple(layer for layer in settled if varying(layer)))

    def map(self, move: Callable[[Tensor], Tensor]) -> Value:
        """The value after a data movement, applied to every layer."""
        if not self.layers:
            return Value(tuple(move(torch.empty(self.shape, device="meta")).shape))
        layers = tuple(move(layer) for layer in self.layers)
        return Value(tuple(layers[0].shape), layers)


@dataclass
class Links:
    """Labels handed out and the pairs that must share their fate; ``reasons`` says why labels were fixed.

    ``elastic`` are the labels of axes that were expanded from one element and so take any size; ``picked`` are those
    of the axis whose channels a buffer of indices picks, by the buffer's name; ``cuts`` are those before a place where
    an axis is cut, which must not be grouped with those after it.
    """

    count: int = 2
    pairs: list[tuple[np.ndarray, np.ndarray]] = field(default_factory=list)
    reasons: list[tuple[np.ndarray, str]] = field(default_factory=list)
    elastic: set[int] = field(default_factory=set)
    picked: dict[str, Tensor] = field(default_factory=dict)
    cuts: list[np.ndarray] = field(default_factory=list)

    def fresh(self, n: int) -> Tensor:
        """``n`` new labels, shape (n,)."""
        labels = torch.arange(self.count, self.count + n)
        self.count += n
        return labels

    def link(self, a: Tensor, b: Tensor, why: str) -> None:
        """Link labels of equal (broadcast) shape elementwise; a label against 0 is fixed."""
        a, b = torch.broadcast_tensors(a, b)
        a, b = shrink(a, b)
        left, right = a.reshape(-1).numpy(), b.reshape(-1).numpy()
        both = (left > 0) & (right > 0) & (left != right)
        self.pairs.append((left[both], right[both]))
        lonely = np.concatenate([left[(left > 0) & (right == 0)], right[(right > 0) & (left == 0)]])
        self._fix(lonely, why)

    def fix(self, layer: Tensor, why: str) -> None:
        """Fix every label of a layer."""
        small = shrink(layer)[0].reshape(-1).numpy()
        self._fix(small[small > 0], why)

    def cut(self, labels: Tensor, *places: Any) -> None:
        """Cut an axis with these labels at those of ``places`` that are numbers within it."""
        for place in places:
            if isinstance(place, int) and place % len(labels) > 0 and abs(place) < len(labels):
                self.cuts.append(labels[: place % len(labels)].numpy())

    def _fix(self, labels: np.ndarray, why: str) -> None:
        if labels.size:
            labels = np.unique(labels)
            self.pairs.append((labels, np.full_like(labels, FIXED)))
            self.reasons.append((labels, why))

    def _graph(self) -> coo_matrix:
        left = np.concatenate([p[0] for p in self.pairs] or [np.zeros(0, dtype=np.int64)])
        right = np.concatenate([p[1] for p in self.pairs] or [np.zeros(0, dtype=np.int64)])
        return coo_matrix((np.ones(len(left), dtype=np.int8), (left, right)), shape=(self.count, self.count))

    def explained(self) -> dict[int, str]:
        """Every fixed label with the reason: its own, or that of the nearest label it is linked to."""
        own: dict[int, str] = {}
        for labels, why in self.reasons:
            own.update((label, why) for label in labels.tolist() if label not in own)
        order, above = breadth_first_order(self._graph(), FIXED, directed=False)
        for label in order[1:].tolist():
            if label not in own:
                own[label] = own[int(above[label])]
        return own

    def classes(self) -> np.ndarray:
        """The connected component of every label, (count,); component 0 holds the fixed ones."""
        component = connected_components(self._graph(), directed=False)[1].astype(np.int64)
        fixed = component[FIXED]
        renumbered = np.where(component == fixed, -1, component)
        renumbered[0] = -1
        return np.unique(renumbered, return_inverse=True)[1].reshape(-1)


def settle(layer: Tensor) -> Tensor:
    """The layer, with every axis along which its labels do not differ turned into an expanded view (stride 0)."""
    small = layer
    for axis in range(layer.dim()):
        if layer.shape[axis] > 1 and (layer.stride(axis) == 0 or _constant(small, axis)):
            small = small.narrow(axis, 0, 1)
    return small.contiguous().expand(layer.shape)


def _constant(layer: Tensor, axis: int) -> bool:
    first = layer.narrow(axis, 0, 1)
    return torch.equal(first, layer.narrow(axis, 1, 1)) and torch.equal(first.expand_as(layer), layer)


def varying(layer: Tensor) -> tuple[int, ...]:
    """The axes along which a settled layer's labels differ."""
    return tuple(a for a, (n, step) in enumerate(zip(layer.shape, layer.stride(), strict=True)) if n > 1 and step)


def along(labels: Tensor, axis: int, shape: Sequence[int]) -> Tensor:
    """A layer of ``shape`` whose labels (n,) lie along ``axis``."""
    view = [1] * len(shape)
    view[axis] = -1
    return labels.reshape(view).expand(tuple(shape))


def vector(layer: Tensor, axis: int) -> Tensor:
    """The labels along ``axis`` at index 0 of every other axis, shape (n,)."""
    index: list[int | slice] = [0] * layer.dim()
    index[axis] = slice(None)
    return layer[tuple(index)]


def shrink(*layers: Tensor) -> tuple[Tensor, ...]:
    """Axes that are expanded (stride 0) in all layers cut to size 1."""
    for axis in range(layers[0].dim()):
        if layers[0].shape[axis] > 1 and all(layer.stride(axis) == 0 for layer in layers):
            layers = tuple(layer.narrow(axis, 0, 1) for layer in layers)
    return layers
