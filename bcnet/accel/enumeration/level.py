"""The operators of one level of the tree: what they read, cut to the units chosen so far, and how they run.

A dense layer that contracts the variable its level chooses adds the channels by which this candidate exceeds
the one before to a running sum, so that all candidates together cost one widest layer.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx

from bcnet.accel.enumeration.prefix_tree import Layout, Work, functional
from bcnet.space.axis import Axis, Size
from bcnet.space.resize import sliced
from bcnet.space.widths import Side

if TYPE_CHECKING:
    from bcnet.accel.enumeration.walker import Walker

Pieces = tuple[tuple[int, int], ...]
Part = tuple[Pieces, Tensor, Tensor | None]
"""Some channels of a layer: where they lie in its input, and their weight and bias."""


def cut(tensor: Tensor, dim: int, pieces: Pieces) -> Tensor:
    """The pieces (start, length) of a dimension: a view where it is one."""
    if pieces == ((0, tensor.shape[dim]),):
        return tensor
    parts = [tensor.narrow(dim, start, length) for start, length in pieces]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


def added(axis: Axis, variable: int, before: int, now: int, held: Sequence[int], side: Side) -> Pieces:
    """Where an axis built for ``held`` units has the units by which ``now`` exceeds ``before``."""
    found, start = [], 0
    for s in axis.segments:
        whole = 1 if s.variable is None else held[s.variable]
        if s.variable == variable:
            skipped = before if side == "left" else whole - now
            found.append((start + skipped * s.repeat, (now - before) * s.repeat))
        start += whole * s.repeat
    return tuple(found)


class PerUnits:
    """What ``make`` gives at the current units, made once for all units of ``variables``."""

    def __init__(self, walker: Walker, variables: Sequence[int], make: Callable[..., Any]):
        self.walker, self.variables, self._make = walker, variables, make
        self._made: dict[tuple[int, ...], Any] = {}

    def __call__(self, *args: Any) -> Any:
        key = tuple(self.walker.units[v] for v in self.variables)
        if key not in self._made:
            self._made[key] = self._make(*args)
        return self._made[key]


class Reader:
    """A value of the graph as a level sees it: cut to the units chosen since it was computed."""

    def __init__(self, walker: Walker, node: fx.Node, level: int):
        self.walker, self.node = walker, node
        place, since = walker.tree.place, walker.tree.level_of[node]
        self.layout: Layout | None = walker.tree.layouts.get(node)
        variables = self.layout.axis.variables if self.layout else frozenset()
        chosen = (
            range(since, level) if level <= walker.tail else range(since, len(place) if since <= walker.tail else 0)
        )
        self.narrowed = tuple(v for v in sorted(variables) if place[v] in chosen)
        self.variables = tuple(sorted(variables))
        self._pieces = PerUnits(walker, self.variables, self._find)

    def held(self) -> list[int]:
        """The units at which the value was computed."""
        units = list(self.walker.units)
        for v in self.narrowed:
            units[v] = self.walker.widest[v]
        return units

    def read(self) -> Any:
        value = self.walker.values[self.node]
        if not self.narrowed or self.layout is None:
            return value
        return cut(value, self.layout.dim, self._pieces())

    def _find(self) -> Pieces:
        assert self.layout is not None
        return self.layout.axis.pieces(self.walker.units, self.held(), self.walker.side)


class StateReader:
    """A parameter, buffer or constant, cut to the current units; every cut is made once."""

    def __init__(self, walker: Walker, node: fx.Node, axes: tuple[Axis, ...] | None, dtype: torch.dtype | None = None):
        self.walker, self.axes = walker, axes
        self.tensor = walker.state[node]
        if dtype is not None:
            self.tensor = self.tensor.to(dtype)
        self.variables = tuple(sorted(frozenset().union(*(a.variables for a in axes or ()))))
        self.read = PerUnits(walker, self.variables, self._cut)

    def _cut(self) -> Tensor:
        if self.axes is None:
            return self.tensor
        return sliced(self.tensor, self.axes, self.walker.units, self.walker.widest, self.walker.side)


class Units:
    """A size constant of the graph at the current units."""

    def __init__(self, walker: Walker, size: Size):
        self.walker, self.size = walker, size

    def read(self) -> int:
        return self.size.at(self.walker.units)


class Computation(ABC):
    """One operator (or several, fused) of a level; ``dies`` are the nodes nothing needs afterwards."""

    def __init__(self, walker: Walker, works: Sequence[Work]):
        self.walker, self.node = walker, works[-1].node
        inner = {w.node for w in works[:-1]}
        self.dies = tuple(n for w in works for n in w.dies if n not in inner)

    @abstractmethod
    def run(self) -> Any:
        """The value of the computation's node at the current units."""

    @property
    def apart(self) -> bool:
        """Whether it treats every image apart, in the same way whatever candidate its level chooses."""
        return False


class Stacking(Computation):
    """A computation that can give its values for every candidate of the variable its level chooses at once."""

    @property
    @abstractmethod
    def stacks(self) -> bool:
        """Whether it can, for its place in the network."""

    @abstractmethod
    def stacked(self) -> Tensor:
        """The values for every candidate, (candidates, n, ...)."""


class GraphCall(Computation):
    """An operator that treats channels apart, run as it stands in the graph."""

    def __init__(self, walker: Walker, work: Work, args: Any, kwargs: Any):
        super().__init__(walker, [work])
        target: Any = work.node.target
        self.target = functional(target) if isinstance(target, torch._ops.OpOverload) else target
        self.args, self.kwargs = args, kwargs

    def run(self) -> Any:
        return self.target(*[read(a) for a in self.args], **{k: read(a) for k, a in self.kwargs.items()})

    @property
    def apart(self) -> bool:
        return self.target is torch.ops.aten.flatten.using_ints and self.args[1:2] == [1]


class Same(Computation):
    """Dropout in evaluation."""

    def __init__(self, walker: Walker, work: Work, x: Reader):
        super().__init__(walker, [work])
        self.x = x

    def run(self) -> Any:
        return self.x.read()

    @property
    def apart(self) -> bool:
        return True


class Normalisation(Computation):
    """Batch norm with the statistics of this batch, an addition and ReLU where these follow."""

    def __init__(
        self, walker: Walker, works: Sequence[Work], args: Mapping[str, Any], other: Reader | None, relu: bool
    ):
        super().__init__(walker, works)
        self.x, self.weight, self.bias = args["input"], args["weight"], args["bias"]
        self.eps, self.other, self.relu = args["eps"], other, relu

    def run(self) -> Tensor:
        x = self.x.read()
        if x.is_meta:  # where torch takes longer to find the shape than a CPU to compute
            y = torch.empty_like(x)
        else:
            y = torch.batch_norm(x, read(self.weight), read(self.bias), None, None, True, 0.0, self.eps, False)
        if self.walker.dtype is not None:
            y = y.to(self.walker.dtype)
        if self.other is not None:
            y += self.other.read()
        return y.relu_() if self.relu else y


class Dense(Stacking):
    """A dense convolution or linear layer; ``shared`` where it contracts the variable its level chooses."""

    def __init__(self, walker: Walker, work: Work, args: dict[str, Any]):
        super().__init__(walker, [work])
        assert work.contracts is not None
        self.work, self.depth = work, work.level - 1
        self.axes: tuple[Axis, ...] = args["weight"].axes
        self.x, self.weight, self.bias = args["input"], args["weight"], args["bias"]
        self.operator: Any = functional(work.node.target)
        self.rest = {k: a for k, a in args.items() if k not in ("input", "weight", "bias")}
        self.variable = walker.tree.order[self.depth] if work.level else -1
        self.shared = work.level <= walker.tail and self.variable in self.x.narrowed
        self.parts = PerUnits(walker, self.weight.variables, self._parts)
        self._stack = PerUnits(walker, self.weight.variables, self._stacked)

    def run(self) -> Tensor:
        return self._share() if self.shared else self._apply(self.x.read(), self.weight.read(), read(self.bias))

    def _apply(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        result: Tensor = self.operator(x.to(weight.dtype), weight, bias, **self.rest)
        return result

    def _share(self) -> Tensor:
        """The channels by which this candidate exceeds the one before, added to the running sum.

        Candidates that were left out are made up for group by group, so that a sum never depends on which
        other candidates were asked for.
        """
        walker, v = self.walker, self.variable
        rank, ranks = walker.rank[self.depth], walker.candidates[v]
        done, total = walker.sums.pop(self.node, (-1, None))
        for number in range(done + 1, rank + 1):
            walker.units[v] = ranks[number]
            pieces, weight, bias = self.parts(number)
            total = self._add(total, number > done + 1, self.cut_input(pieces), weight, bias)
        if rank + 1 < len(ranks) or walker.dry:
            walker.sums[self.node] = rank, total
        if v in self.axes[0].variables:
            held = self._with(walker.widest[v])
            return cut(total, self._dim, self.axes[0].pieces(walker.units, held, walker.side))
        return total

    def _add(self, total: Tensor | None, own: bool, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """What a group of channels makes, added to ``total``: in its place if nobody else holds it, as ``own`` says."""
        if self._multiplies and bias is None and x.stride(1) == 1 and (total is None or total.stride(1) == 1):
            inputs, products = _rows(x), weight.flatten(1).t()
            if total is None:
                found = inputs @ products
            else:
                found = _rows(total).addmm_(inputs, products) if own else torch.addmm(_rows(total), inputs, products)
            return found.unflatten(0, (len(x), *x.shape[2:])).movedim(-1, 1)
        part = self._apply(x, weight, bias)
        if self.walker.dtype is not None and len(self.walker.candidates[self.variable]) > 1:
            part = part.float()
        return part if total is None else part.add_(total)

    @property
    def _multiplies(self) -> bool:
        """Whether pixels are rows of a matrix product that adds to its result, which a CPU does faster."""
        rest, weight = self.rest, self.weight.tensor
        return (
            self.work.kind == "aten::conv2d"
            and weight.is_cpu
            and self.walker.dtype is None
            and all(n == 1 for n in weight.shape[2:])
            and (rest["stride"], rest["padding"]) == ([1, 1], [0, 0])
        )

    def cut_input(self, pieces: Pieces) -> Tensor:
        return cut(self.walker.values[self.x.node], self._dim, pieces)

    @property
    def _ends(self) -> bool:
        """Whether it is a linear layer of fixed outputs."""
        return self.work.kind == "aten::linear" and not self.axes[0].variables

    @property
    def apart(self) -> bool:
        return self._ends and not self.shared and self.variable not in self.weight.variables

    @property
    def stacks(self) -> bool:
        """A linear layer of fixed outputs is so cheap that all candidates go in one product."""
        return self._ends and self.shared and self.x.layout == Layout(1, self.axes[1])

    def stacked(self) -> Tensor:
        """(candidates, n, outputs): channels that a candidate lacks have weight 0."""
        found = self._apply(self.walker.values[self.x.node], *self._stack())
        return found.unflatten(1, (len(self.walker.candidates[self.variable]), -1)).transpose(0, 1)

    def _stacked(self) -> tuple[Tensor, Tensor | None]:
        """The weights and biases of all candidates, one below the other."""
        walker = self.walker
        weight = cut(self.weight.tensor, 1, self.axes[1].pieces(walker.units, walker.widest, walker.side))
        rows = []
        for units in walker.candidates[self.variable]:
            mask = torch.zeros(weight.shape[1], dtype=weight.dtype, device=weight.device)
            for start, length in self.axes[1].pieces(self._with(units), self.x.held(), walker.side):
                mask[start : start + length] = 1
            rows.append(weight * mask)
        return torch.cat(rows), None if self.bias is None else self.bias.tensor.repeat(len(rows))

    @property
    def _dim(self) -> int:
        return self.x.layout.dim

    def _with(self, units: int) -> list[int]:
        """The current units, but ``units`` of the variable that this layer contracts."""
        found = list(self.walker.units)
        found[self.variable] = units
        return found

    def _parts(self, rank: int) -> Part:
        """What the candidate ``rank``, at whose units the walker stands, adds to the one before."""
        walker, v = self.walker, self.variable
        assert self.work.contracts is not None
        held, widest, side = self.x.held(), walker.widest, walker.side
        if rank:
            before, now = walker.candidates[v][rank - 1], walker.units[v]
            pieces = added(self.work.contracts, v, before, now, held, side)
            inner = added(self.axes[1], v, before, now, widest, side)
        else:
            pieces = self.x.layout.axis.pieces(walker.units, held, side)
            inner = self.axes[1].pieces(walker.units, widest, side)
        outer = self._with(widest[v])
        weight = cut(cut(self.weight.tensor, 0, self.axes[0].pieces(outer, widest, side)), 1, inner)
        first = self.bias is not None and not rank
        return pieces, weight, sliced(self.bias.tensor, self.bias.axes or (), outer, widest, side) if first else None


def _rows(x: Tensor) -> Tensor:
    """Images whose channels are innermost as (pixels, channels), a view."""
    return x.movedim(1, -1).flatten(0, -2)


def read(arg: Any) -> Any:
    if isinstance(arg, (Reader, StateReader, Units)):
        return arg.read()
    return [read(a) for a in arg] if isinstance(arg, list) else arg
