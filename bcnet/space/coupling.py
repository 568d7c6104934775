"""From the graph of any network to its width variables.

Labels (see :mod:`bcnet.space.labels`) are propagated through the graph; labels that must share their
fate form classes; classes that occur in the same parameter dimensions form a width variable.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from scipy.sparse import coo_matrix
from torch import Tensor

from bcnet.errors import BcnetError
from bcnet.space.axis import Axis, Numbers, Segment, Size, axis_of
from bcnet.space.capture import Capture
from bcnet.space.labels import Value, settle, shrink, varying, vector
from bcnet.space.operators.table import bind
from bcnet.space.walk import Dim, Walk, layer_of, values_in

__all__ = ["Coupled", "Coupling", "bind", "couple", "layer_of"]


_STATISTICS = ("running_mean", "running_var")


@dataclass(frozen=True)
class Coupled:
    """One width variable as found in the graph: ``count`` units of ``unit`` channels."""

    name: str
    count: int
    unit: int
    layers: tuple[str, ...]


@dataclass(frozen=True)
class Coupling:
    """Width variables of a network, the axes of its parameters, and the sizes in its graph.

    ``training`` is the same with the sizes of the graph of training mode, where that differs.
    """

    variables: tuple[Coupled, ...]
    axes: Mapping[str, tuple[Axis, ...]]
    sizes: Mapping[str, tuple[tuple[Size, ...], ...]]
    prefixes: Mapping[str, Callable[[int, int], Size]]
    fixed: tuple[tuple[str, str], ...]
    training: Coupling | None = None

    @property
    def counts(self) -> list[int]:
        """The units of every variable in the captured network."""
        return [v.count for v in self.variables]


def couple(
    capture: Capture,
    state: Mapping[str, Tensor],
    ignore: Iterable[str] = (),
    training: Capture | None = None,
    kernels: Collection[Dim] = (),
    unwanted: Callable[[Coupling], tuple[int, str] | None] = lambda coupling: None,
) -> Coupling:
    """Find the width variables of a captured network.

    ``state`` are its parameters and buffers by name; ``ignore`` holds names of layers (or patterns such
    as ``stem.*``) whose output width must not change; ``training`` is the graph of training mode, where
    that has layers of its own (auxiliary heads); ``kernels`` are parameter dimensions that never vary;
    ``unwanted`` may name a variable that must be fixed after all, and where.
    """
    walk = Walk(capture, state, kernels)
    walk.propagate()
    used = {walk.tied[name] for name in capture.used}
    also = None
    if training is not None:
        also = Walk(training, state, kernels, walk)
        also.propagate()
        used |= {walk.tied[name] for name in training.used}
    _fix_dead_ends(walk, used)
    _fix_ignored(walk, tuple(ignore))
    grouping = _Grouping(walk, also)
    while (found := unwanted(coupling := grouping.result())) is not None:
        grouping.fix(found[0], f"the cost of {found[1]} would be no quadratic form")
    return coupling


def _fix_dead_ends(walk: Walk, used: set[str]) -> None:
    """Layers whose output nothing reads keep it: only what they share with the rest of the network may vary."""
    dead = {dim: labels for dim, labels in walk.labels.items() if dim[0] not in used}
    if not dead:
        return
    classes = walk.links.classes()
    live = {int(c) for dim, labels in walk.labels.items() if dim not in dead for c in classes[labels.numpy()]}
    for labels in dead.values():
        lonely = ~np.isin(classes[labels.numpy()], list(live))
        walk.links.fix(labels[torch.from_numpy(lonely)], "nothing reads its output")


def _owner(name: str) -> str:
    """The layer that a parameter belongs to."""
    return name.partition(".parametrizations.")[0] if ".parametrizations." in name else name.rpartition(".")[0]


def _fix_ignored(walk: Walk, ignore: tuple[str, ...]) -> None:
    used = dict.fromkeys(ignore, False)
    for (name, axis), labels in walk.labels.items():
        layer = _owner(name)
        for pattern in ignore:
            if fnmatch.fnmatchcase(layer, pattern) or fnmatch.fnmatchcase(name, pattern):
                used[pattern] = True
                if axis == 0:
                    walk.links.fix(labels, f"{layer} is ignored")
    for pattern, found in used.items():
        if not found:
            raise BcnetError(f"ignore names {pattern!r}, but no layer of the network is called so")


def _nothing_varies(fixed: tuple[tuple[str, str], ...]) -> str:
    """Why a network has no width variable."""
    if not fixed:
        return "this network has no channel dimension that could vary: it has no layers with weights"
    shown = "; ".join(f"{layer}: {why}" for layer, why in fixed[:5]) + ("; ..." if len(fixed) > 5 else "")
    outputs = sum("the network's output" in why for _, why in fixed)
    way_out = "; trace(..., output=lambda y: ...) picks the outputs that matter" if outputs > 1 else ""
    return f"this network has no channel dimension that could vary ({shown}){way_out}"


class _Grouping:
    """Turns classes of labels into variables, axes and sizes; fixes what is too irregular to vary."""

    def __init__(self, walk: Walk, also: Walk | None = None):
        self.walk, self.also = walk, also
        self.counts: list[int] = []
        self._axes: dict[str, tuple[Axis, ...]] = {}
        self.order = self._first_uses()
        self.parts = list(walk.links.cuts)  # labels that are separate from others they would otherwise be grouped with

    def result(self) -> Coupling:
        for _ in range(len(self.walk.labels) + 1):
            self.classes = self.walk.links.classes()
            self._group()
            spoiled = self._spoiled()
            if not spoiled:
                break
            for variable, (where, part) in spoiled.items():
                if self._splits(variable, part):
                    self.parts.append(part)
                else:
                    self.fix(variable, f"its channels are mixed in {where}")
        fixed = self._fixed()
        if not self.counts:
            raise BcnetError(_nothing_varies(fixed))
        coupling = Coupling(self._variables(), self._axes, self._sizes(self.walk), self._prefixes(self.walk), fixed)
        if self.also is None:
            return coupling
        training = replace(coupling, sizes=self._sizes(self.also), prefixes=self._prefixes(self.also))
        return replace(coupling, training=training)

    def _splits(self, variable: int, part: np.ndarray) -> bool:
        """Whether the labels ``part`` are some units of a variable, but not all of it."""
        times = np.bincount(self.member[part[self.member[part, 0] == variable], 1], minlength=self.counts[variable])
        return bool((times != times[0]).any())

    def fix(self, variable: int, why: str) -> None:
        """Keep all channels of a variable."""
        members = np.flatnonzero(self.member[:, 0] == variable)
        self.walk.links.fix(torch.from_numpy(members), why)

    def _first_uses(self) -> list[Dim]:
        """Parameter dimensions in the order of first use in the forward pass."""
        order: dict[Dim, None] = {}
        for node in self.walk.capture.graph.nodes:
            for used in node.all_input_nodes:
                name = self.walk.parameter(used)
                if name is not None:
                    order.update({(name, a): None for a in range(8) if (name, a) in self.walk.labels})
        order.update(dict.fromkeys(self.walk.labels))
        return list(order)

    def _group(self) -> None:
        """``member`` (labels, 2): variable and unit of every label, -1 where fixed; ``counts``: units."""
        self._known: dict[tuple[int, int], Size | int] = {}
        rows = [self.classes[labels] for labels in (*(self.walk.labels[d].numpy() for d in self.order), *self.parts)]
        where = np.repeat(np.arange(len(rows)), [len(row) for row in rows])
        used = np.concatenate([np.zeros(0, dtype=np.int64), *rows])
        classes, first = np.unique(used[: sum(map(len, rows[: len(self.order)]))], return_index=True)
        shape = (self.classes.max() + 1, max(1, len(rows)))
        uses = coo_matrix((np.ones(len(where), dtype=np.int64), (used, where)), shape).tocsr()
        groups: dict[bytes, list[int]] = {}
        for c in classes[np.argsort(first)].tolist():
            if c:
                span = slice(uses.indptr[c], uses.indptr[c + 1])
                groups.setdefault(uses.indices[span].tobytes() + uses.data[span].tobytes(), []).append(c)
        kept = [g for g in groups.values() if len(g) > 1]
        self.counts = [len(g) for g in kept]
        place_of = np.full((self.classes.max() + 1, 2), -1, dtype=np.int64)
        for variable, members in enumerate(kept):
            for unit, c in enumerate(members):
                place_of[c] = variable, unit
        self.member = place_of[self.classes]
        self.places = torch.from_numpy(place_of[:, 0] * (len(place_of) + 1) + place_of[:, 1])[self.classes]

    def _spoiled(self) -> dict[int, tuple[str, np.ndarray]]:
        """Variables that some axis cannot be described with: where, and labels that are separate there."""
        spoiled: dict[int, tuple[str, np.ndarray]] = {}
        axes: dict[str, list[Axis]] = {}
        picked = {name: self.member[labels.numpy()] for name, labels in self.walk.links.picked.items()}
        loose = {v for members in picked.values() for v in members[:, 0].tolist() if v >= 0}
        for (name, axis), labels in sorted(self.walk.labels.items()):
            found = axis_of(self.member[labels.numpy()], self.counts, loose)
            source = axis_of(picked[name], self.counts, loose) if name in picked else None
            if isinstance(found, int):
                spoiled.setdefault(found, (name, self._first_run(labels.numpy(), found)))
            elif isinstance(source, int):
                spoiled.setdefault(source, (name, labels.numpy()[:0]))
            else:
                shape = self.walk.state[name].shape
                row = axes.setdefault(name, [Axis((Segment(None, n),)) for n in shape])
                numbers = Numbers(source, tuple(self.counts)) if source is not None and source.variables else None
                row[axis] = replace(found, numbers=numbers)
        for node, value in (self.walk.values | (self.also.values if self.also else {})).items():
            for v in values_in(value):
                for axis in range(len(v.shape)):
                    size = self._size(v, axis)
                    if isinstance(size, int):
                        part = next(r for layer in v.layers if (r := self._row(layer, axis)) is not None)
                        spoiled.setdefault(size, (layer_of(node) or node.name, part))
        self._axes = {name: tuple(axes[first]) for name, first in self.walk.tied.items() if first in axes}
        return spoiled

    def _first_run(self, labels: np.ndarray, variable: int) -> np.ndarray:
        """The first labels of a variable along an axis, up to where others interrupt them."""
        places = np.flatnonzero(self.member[labels, 0] == variable)
        return labels[places[: 1 + int(np.argmax(np.append(np.diff(places), 0) != 1))]]

    def _size(self, value: Value, axis: int) -> Size | int:
        """The size of an axis, or a variable of which it holds only a part, or that shares it with another."""
        if (id(value), axis) not in self._known:  # asked for twice, and many operators pass values on unchanged
            self._known[id(value), axis] = self._measured(value, axis)
        return self._known[id(value), axis]

    def _measured(self, value: Value, axis: int) -> Size | int:
        rows = [row for layer in value.layers if (row := self._row(layer, axis)) is not None]
        places = self.places.numpy()
        if any(not np.array_equal(places[rows[0]], places[row]) for row in rows[1:]):
            return int(max(self.member[rows[-1], 0]))
        return self._count(rows[0]) if rows else Size(value.shape[axis])

    def _row(self, layer: Tensor, axis: int) -> np.ndarray | None:
        """The labels of a layer along an axis, or None where their variables and units do not differ along it."""
        if axis not in varying(layer):
            return None
        small = shrink(layer)[0]
        if axis not in varying(settle(self.places[small])):
            return None
        return vector(small, axis).numpy()

    def _count(self, labels: np.ndarray) -> Size | int:
        variables, numbers = np.unique(self.member[labels, 0], return_counts=True)
        constant, terms = 0, []
        for v, n in zip(variables.tolist(), numbers.tolist(), strict=True):
            if v < 0:
                constant = n
            elif n % self.counts[v]:
                return int(v)
            else:
                terms.append((v, n // self.counts[v]))
        return Size(constant, tuple(terms))

    def _sizes(self, walk: Walk) -> dict[str, tuple[tuple[Size, ...], ...]]:
        """Node name to the sizes of its output axes (one row per output tensor)."""
        return {
            node.name: tuple(tuple(self._size(v, a) for a in range(len(v.shape))) for v in values_in(value))  # type: ignore[misc]
            for node, value in walk.values.items()
        }

    def _prefixes(self, walk: Walk) -> dict[str, Callable[[int, int], Size]]:
        """Node name to a function (axis, position) -> how many channels lie before that position."""
        return {
            node.name: partial(self._prefix, value)
            for node, value in walk.values.items()
            if isinstance(value, Value) and value.layers
        }

    def _prefix(self, value: Value, axis: int, position: int) -> Size:
        for layer in value.layers:
            if axis in varying(layer):
                size = self._count(vector(layer, axis).numpy()[:position])
                if isinstance(size, Size):
                    return size
        return Size(position)

    def _variables(self) -> tuple[Coupled, ...]:
        layers: list[dict[str, None]] = [{} for _ in self.counts]
        unit = [0] * len(self.counts)
        names: list[str] = [""] * len(self.counts)
        for name, axis in self.order:
            found = self._axes[name][axis]
            for v in found.variables:
                layer = _owner(name) or name
                layers[v][layer] = None
                names[v] = names[v] or layer
                channels = sum(s.repeat for s in found.segments if s.variable == v)
                unit[v] = min(unit[v], channels) if unit[v] else channels
        unique: dict[str, int] = {}
        for i, name in enumerate(names):
            unique[name] = unique.get(name, 0) + 1
            names[i] = name if unique[name] == 1 else f"{name}#{unique[name]}"
        return tuple(Coupled(names[v], n, unit[v], tuple(layers[v])) for v, n in enumerate(self.counts))

    def _fixed(self) -> tuple[tuple[str, str], ...]:
        """Layers whose output cannot vary, with the reason."""
        why = self.walk.links.explained()
        outputs = {name: 1 for name in self.walk.transposed() if (name, 1) in self.walk.labels}  # else per group
        rows: dict[str, str] = {}
        for name, axis in self.order:
            labels = self.walk.labels[name, axis].numpy()
            held = labels[self.member[labels, 0] < 0]
            layer, leaf = _owner(name), name.rpartition(".")[2]
            listed = len(self.walk.state[name].shape) > 1 or leaf not in ("weight", "bias", *_STATISTICS)
            if axis == outputs.get(name, 0) and held.size and listed:
                reason = why.get(int(held[0]), "its channels belong together, so that none of them can go")
                rows.setdefault(layer if layer and leaf.startswith(("weight", "bias", "original")) else name, reason)
        return tuple(rows.items())
