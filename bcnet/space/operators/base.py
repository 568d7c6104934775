"""What a rule works with: the call of an operator, and the ways in which channels of its tensors can meet."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bcnet.space.labels import Links, Value, shrink, varying, vector


class Asked(UserDict[str, Any]):
    """The arguments of a call by name; remembers the ``names`` of those that a rule has asked for."""

    def __init__(self, args: Mapping[str, Any]):
        self.names: set[str] = set()
        super().__init__(args)

    def __getitem__(self, name: str) -> Any:
        self.names.add(name)
        return super().__getitem__(name)


@dataclass(frozen=True)
class Call:
    """One operator call: its arguments by the names of its schema, tensors as :class:`Value`.

    ``run`` runs the operator on another first tensor; ``batch`` is the batch size if that is the number of groups.
    """

    links: Links
    args: Mapping[str, Any]
    shapes: tuple[tuple[int, ...], ...]
    where: str
    run: Callable[..., Any]
    batch: int = 0

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the (first) tensor the operator makes."""
        return self.shapes[0]

    def value(self, name: str) -> Value:
        found = self.args[name]
        assert isinstance(found, Value), f"{name} of {self.where} is no tensor"
        return found

    def axis(self, name: str = "dim") -> int:
        """The argument ``name``, an axis of the tensor ``self``, counted from the front."""
        return int(self.args[name]) % max(1, len(self.value("self").shape))

    @property
    def first(self) -> Value:
        """The first tensor among the arguments, for rules that have nothing to say of others."""
        return next(value for name in self.args if isinstance(value := self.args[name], Value))

    def values(self) -> list[Value]:
        """All tensors among the arguments."""
        found = [a for a in self.args.values() if isinstance(a, Value)]
        for a in self.args.values():
            if isinstance(a, (list, tuple)):
                found.extend(v for v in a if isinstance(v, Value))
        return found

    def together(self, *names: str) -> Value:
        """The named tensors (all, if none is named) broadcast to the output, element for element."""
        values = [self.value(n) for n in names if self.args.get(n) is not None] if names else self.values()
        return together(self.links, values, self.shape, self.where)

    def agree(self, a: Value | None, axis_a: int, b: Value | None, axis_b: int) -> None:
        """Two axes of equal size must keep the same channels."""
        if a is None or b is None:
            return
        self.links.link(row(a, axis_a), row(b, axis_b), f"{self.where} joins it with a fixed axis")

    def alike(self, value: Value, axis: int, parts: int, why: str) -> None:
        """``parts`` of equal size that an axis is cut into must keep the same channels."""
        rows = row(value, axis).reshape(parts, -1)
        self.links.link(rows, rows[:1], f"{self.where} {why}")

    def carry(self, value: Value, shape: tuple[int, ...] | None = None) -> Value:
        """``value`` with other extents on axes its labels do not vary along (pooling, padding, resizing)."""
        shape = self.shape if shape is None else shape
        if 0 in shape:
            return Value(shape)
        layers = []
        for layer in value.layers:
            axes = varying(layer)
            if len(value.shape) == len(shape) and all(value.shape[a] == shape[a] for a in axes):
                for axis in set(range(len(shape))) - set(axes):
                    layer = layer.narrow(axis, 0, 1)
                layers.append(layer.expand(shape))
            else:
                self.fixed(layer, "it changes the size of this axis")
        return Value(shape, tuple(layers))

    def fixed(self, what: Value | Tensor, why: str) -> None:
        """Keep all channels of a value, or of one layer, at full width."""
        for layer in what.layers if isinstance(what, Value) else (what,):
            self.links.fix(layer, f"{self.where}: {why}")

    def fixed_along(self, value: Value, axes: set[int], why: str) -> Value:
        """Keep all channels that lie along ``axes``; returns ``value`` with only its other channels."""
        free = []
        for layer in value.layers:
            if axes.isdisjoint(varying(layer)):
                free.append(layer)
            else:
                self.fixed(layer, why)
        return Value(value.shape, tuple(free))


def together(links: Links, values: Sequence[Value], shape: tuple[int, ...], where: str) -> Value:
    """Broadcast ``values`` to ``shape`` and link labels that meet; labels that meet none are fixed."""
    why = f"{where} joins it with something of fixed size"
    layers: list[Tensor] = []
    seen: list[tuple[int, ...]] = []
    for value in values:
        padded = leading(value.shape, len(shape))
        earlier, unmet = tuple(layers), list(layers)  # layers of one value do not meet each other
        for layer in spread(value, shape):
            axes = set(varying(layer))
            met = [other for other in earlier if axes & set(varying(other))]
            if any(torch.equal(*shrink(layer, other)) for other in met):
                unmet = [other for other in unmet if not torch.equal(*shrink(layer, other))]
                continue
            for other in met:
                links.link(layer, other, why)
            unmet = [other for other in unmet if not any(other is m for m in met)]
            if not met:
                if any(all(extent[a] > 1 for a in axes) for extent in seen):
                    links.fix(layer, why)
                layers.append(layer)
        for other in unmet:
            if all(padded[a] > 1 for a in varying(other)):
                links.fix(other, why)
        seen.append(padded)
    return Value(shape, tuple(layers))


def leading(shape: tuple[int, ...], rank: int) -> tuple[int, ...]:
    """A shape with axes of size 1 in front, as broadcasting adds them."""
    return (1,) * (rank - len(shape)) + shape


def spread(value: Value, shape: tuple[int, ...]) -> list[Tensor]:
    """The layers of a value that is broadcast to ``shape``."""
    padded = leading(value.shape, len(shape))
    return [layer.reshape(padded).expand(shape) for layer in value.layers]


def labels_along(value: Value, axis: int) -> Tensor | None:
    """The labels (n,) along ``axis``, or None where the axis carries none."""
    return next((vector(layer, axis) for layer in value.layers if axis in varying(layer)), None)


def row(value: Value, axis: int) -> Tensor:
    """The labels (n,) along ``axis``, 0 where it carries none."""
    found = labels_along(value, axis)
    return torch.zeros(value.shape[axis], dtype=torch.int64) if found is None else found
