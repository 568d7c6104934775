"""A supernet whose paths are views: any traced network, run at any widths on shared weights.

The supernet holds ``total`` channels of every width variable under the original's own parameter names. A
path slices them, no copies and no masks (a concatenation, whose channels lie apart, is gathered), and runs
the captured graph with its size constants filled in: one mechanism that is exact for every network that can
be traced. Batch norm has one affine pair per channel, shared by both sides, and batch statistics.
"""

from __future__ import annotations

import contextlib
import copy
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_unflatten

from bcnet.errors import BcnetError
from bcnet.space.axis import Axis
from bcnet.space.network import NetworkSpace
from bcnet.space.operators.table import bind
from bcnet.space.resize import block_of, sliced
from bcnet.space.rewrite import Slot, held_by, put, rewrite
from bcnet.space.widths import Side
from bcnet.supernet.principle import Principle, get_principle
from bcnet.training import distributed

Stats = dict[str, Tensor]
Tap = Callable[[Tensor, str], Tensor]
Cut = tuple[int, tuple[Axis, ...], tuple[int, ...]]
"""A tensor of the state that a path cuts: its number, its axes, and their variables."""


@dataclass(frozen=True)
class Selection:
    """The channels that one (widths, side) selects; ``sizes`` fill the graph's slots."""

    units: tuple[int, ...]
    side: Side
    sizes: tuple[int, ...]


class Supernet(nn.Module):
    """The supernet of ``space`` under a principle (``ua``, ``bc``, ``bcv2``, ``bcv2-printed``).

    ``net(x, widths, side)`` runs one path. ``space.build(widths, weights_of=net, side=side)`` gives the
    same path as a plain network.
    """

    def __init__(self, space: NetworkSpace, principle: Principle | str = "bcv2"):
        super().__init__()
        self._space = space
        self._principle = get_principle(principle) if isinstance(principle, str) else principle
        totals = [self._principle.total(v) for v in space.variables]
        self._total = space.units(totals)
        self._known = [{width: width // v.unit for width in v.candidates} for v in space.variables]
        network = space.build(np.array(totals), grow=True)
        for name, parameter in network.named_parameters(remove_duplicate=False):
            put(self, name, parameter)
        for name, buffer in network.named_buffers(remove_duplicate=False):
            put(self, name, buffer)
        self._graph = _PathGraph(space)
        self._tapped: _PathGraph | None = None
        self._state = [held_by(self, name) for name in self._graph.names]
        self._cuts = self._graph.cuts()
        self._blocks: dict[tuple[object, ...], tuple[slice, ...] | None] = {}
        self._latest: tuple[Selection | None, list[tuple[slice, ...] | None]] = (None, [])

    def __setattr__(self, name: str, value: Any) -> None:
        # What is private here is no layer, and a network's layer may have the same name.
        if name.startswith("_"):
            object.__setattr__(self, name, value)
        else:
            super().__setattr__(name, value)

    @property
    def space(self) -> NetworkSpace:
        return self._space

    @property
    def principle(self) -> Principle:
        return self._principle

    @property
    def sides(self) -> tuple[Side, ...]:
        """The sides that differ from each other under this principle."""
        return self._principle.sides

    def __deepcopy__(self, memo: dict[int, Any]) -> Supernet:
        """A supernet with weights of its own; what describes the network is shared."""
        memo |= {id(shared): shared for shared in (self._space, self._graph, self._tapped)}
        twin = memo[id(self)] = type(self).__new__(type(self))
        twin.__dict__ = copy.deepcopy(self.__dict__, memo)
        return twin

    def select(self, widths: ArrayLike, side: Side = "left") -> Selection:
        """The channels that a path takes."""
        units = self._units_of(widths)
        if side not in ("left", "right"):
            raise BcnetError(f"side is {side!r}, but it must be left or right")
        taken: Side = side if side in self._principle.sides else "left"
        return Selection(units, taken, tuple([size.at(units) for size in self._graph.sizes]))

    def _units_of(self, widths: ArrayLike) -> tuple[int, ...]:
        """Widths in units. Candidates are looked up: to check an array took 4 % of a step of a tiny network."""
        if isinstance(widths, (tuple, list, np.ndarray)):
            row = widths.tolist() if isinstance(widths, np.ndarray) else widths
            with contextlib.suppress(KeyError, TypeError, ValueError):
                return tuple([known[width] for known, width in zip(self._known, row, strict=True)])
        checked = self._space.check(widths)
        if checked.ndim != 1:
            raise BcnetError("a path takes the widths of one network, a row of numbers")
        return tuple(self._space.units(checked))

    def forward(self, x: Any, widths: ArrayLike, side: Side = "left", stats: Stats | None = None) -> Any:
        """The output of one path on ``x`` (n, C, H, W), or on the tuple or dictionary that the network takes.

        Batch norm uses the statistics of this batch, or those in ``stats`` (see :meth:`statistics`).
        """
        selection = self.select(widths, side)
        return self.run(selection, x, self.views(selection), stats)

    @property
    def total_units(self) -> list[int]:
        """Units the supernet holds of every variable."""
        return self._total

    def state(self) -> list[Tensor]:
        """Parameters and buffers in the order the graph takes them."""
        return [owner[leaf] for owner, leaf in self._state]

    def axes(self) -> list[tuple[Axis, ...] | None]:
        """How each of :meth:`state` is made up of variables; None where it does not vary."""
        return self._graph.axes

    def views(self, selection: Selection) -> list[Tensor]:
        """The slices of :meth:`state` that a path uses; running statistics, which it does not, are left whole."""
        return self.cut(self.state(), selection)

    def cut(self, state: Sequence[Tensor], selection: Selection) -> list[Tensor]:
        """The slices of tensors, in the order of :meth:`state`, that a path uses."""
        found = list(state)
        for (number, axes, _), block in zip(self._cuts, self.blocks(selection), strict=True):
            found[number] = self.sliced(found[number], axes, selection) if block is None else found[number][block]
        return found

    def sliced(self, tensor: Tensor, axes: tuple[Axis, ...], selection: Selection) -> Tensor:
        """What a path uses of a tensor: a view where it is a single block."""
        return sliced(tensor, axes, selection.units, self._total, selection.side)

    def blocks(self, selection: Selection) -> list[tuple[slice, ...] | None]:
        """Indices of the slices that a path uses, None for one that is not a single block."""
        if self._latest[0] is not selection:
            self._latest = selection, [self.block(selection, cut) for cut in self._cuts]
        return self._latest[1]

    def block(self, selection: Selection, cut: Cut) -> tuple[slice, ...] | None:
        """The index of the slice that a path uses of one of :attr:`cuts`, None where it is not a single block."""
        number, axes, variables = cut
        key = (number, selection.side, *[selection.units[v] for v in variables])
        if key not in self._blocks:
            self._blocks[key] = block_of(axes, selection.units, self._total, selection.side)
        return self._blocks[key]

    @property
    def cuts(self) -> list[Cut]:
        """What of :meth:`state` a path uses slices of."""
        return self._cuts

    def run(
        self, selection: Selection, x: Any, views: Sequence[Tensor], stats: Stats | None = None, tap: Tap | None = None
    ) -> Any:
        """Run the graph on views that :meth:`views` gave (or on leaves made of them).

        ``tap(x, name)`` may change the output of every batch norm; ``name`` is that of its weight.
        """
        if tap is not None and self._tapped is None:
            self._tapped = _PathGraph(self._space, tapped=True)
        graph = self._graph if tap is None or self._tapped is None else self._tapped
        return graph.call(x, self._given(views, stats), selection.sizes, stats is None, self.training, tap)

    @torch.no_grad()
    def statistics(self, selection: Selection, x: Any, views: Sequence[Tensor]) -> Stats:
        """The statistics of the batch ``x`` at every batch norm of a path, by buffer name; dropout is off."""
        stats = {
            name: torch.zeros_like(self.sliced(views[i], self._graph.axes[i] or (), selection))
            for i, name in self._graph.statistics.items()
        }
        self._graph.call(x, self._given(views, stats), selection.sizes, True, False)
        return stats

    def _given(self, views: Sequence[Tensor], stats: Stats | None) -> list[Tensor | None]:
        """What the graph takes for its state: views, with ``stats`` in place of running statistics."""
        given: list[Tensor | None] = list(views)
        for i, name in self._graph.statistics.items():
            given[i] = None if stats is None else stats[name]
        return given


_GIVEN = ("state_", "sizes_", "batch_", "train_", "const_", "tap_")


def _tap(tap: Tap, x: Tensor, name: str) -> Tensor:
    return tap(x, name)


class _PathGraph:
    """The captured graph as one Python function of (inputs, state, sizes, flags)."""

    def __init__(self, space: NetworkSpace, tapped: bool = False):
        if not space.graph.dynamic:
            raise BcnetError(
                f"the graph of {type(space.model).__name__} was captured for batches of {space.graph.batch} only: "
                "its forward must not depend on the batch size"
            )
        self.names: list[str] = []
        self.sizes = sorted({slot.size for slot in space.slots}, key=lambda s: (s.constant, s.terms))
        self.statistics: dict[int, str] = {}
        self.tapped = tapped
        self.call = self._compile(space)
        self.axes = [space.coupling.axes.get(name) for name in self.names]

    def cuts(self) -> list[Cut]:
        """What a path cuts of the state."""
        return [
            (number, axes, tuple(sorted(frozenset[int]().union(*(axis.variables for axis in axes)))))
            for number, axes in enumerate(self.axes)
            if axes is not None and number not in self.statistics
        ]

    def _compile(self, space: NetworkSpace) -> Callable[..., Any]:
        numbers = {size: i for i, size in enumerate(self.sizes)}
        tables: dict[fx.Graph, dict[str, fx.Node]] = {}

        def table(graph: fx.Graph) -> dict[str, fx.Node]:
            if graph not in tables:
                tables[graph] = {n: graph.placeholder(n) for n in _GIVEN}
            return tables[graph]

        def state(graph: fx.Graph, name: str, kind: str) -> fx.Node:
            if kind == "constant":
                number = list(space.graph.constants).index(name)
                return graph.call_function(operator.getitem, (table(graph)["const_"], number))
            self.names.append(name)
            return graph.call_function(operator.getitem, (table(graph)["state_"], len(self.names) - 1))

        def fill(graph: fx.Graph, slot: Slot) -> fx.Node:
            return graph.call_function(operator.getitem, (table(graph)["sizes_"], numbers[slot.size]))

        graph = rewrite(space.graph, space.slots, fill, state)
        self._free_batch_norm(graph, table(graph))
        module = fx.GraphModule(dict(space.graph.parts), graph)
        forward = module.forward
        constants = {torch.device("cpu"): list(space.graph.constants.values())}
        plain = space.graph.output.is_leaf()

        def call(
            x: Any,
            views: Sequence[Tensor | None],
            sizes: Sequence[int],
            batch: bool,
            train: bool,
            tap: Tap | None = None,
        ) -> Any:
            given = (x,) if isinstance(x, Tensor) else space.flat(x)
            device = given[0].device
            if device not in constants:
                constants[device] = [c.to(device) for c in space.graph.constants.values()]
            output = forward(*given, views, sizes, batch, train, constants[device], tap)
            if plain:
                return output
            whole = tree_unflatten(output, space.graph.output)
            return whole if space.graph.adapted else space.output(whole)

        return call

    def _free_batch_norm(self, graph: fx.Graph, given: dict[str, fx.Node]) -> None:
        """Batch norm takes its statistics as arguments, and its mode (like dropout's) as a flag; a momentum of 1
        makes the statistics it leaves behind those of the batch."""
        for node in list(graph.nodes):
            if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
                continue
            args = bind(node.target, node.args, node.kwargs)
            name = node.target._schema.name
            if name == "aten::batch_norm":
                node.target = distributed.batch_norm
                if args["running_mean"] is not None:
                    for buffer in (args["running_mean"], args["running_var"]):
                        self.statistics[buffer.args[1]] = self.names[buffer.args[1]]
                    args |= {"training": given["batch_"], "momentum": 1.0}
                node.args, node.kwargs = tuple(args.values()), {}
                if self.tapped and args["weight"] is not None:
                    with graph.inserting_after(node):
                        changed = graph.call_function(_tap, (given["tap_"], node, self.names[args["weight"].args[1]]))
                    node.replace_all_uses_with(changed, lambda user, tapped=changed: user is not tapped)
            elif "dropout" in name:
                node.args, node.kwargs = tuple({**args, "train": given["train_"]}.values()), {}
