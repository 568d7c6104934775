"""Scores of some configurations, sharing what they have in common: the tree of :func:`score_all`, its branches pruned.

Configurations are walked depth first, so work that a prefix shares is done once, with one set of activations for each
level; what they need of it is kept for later calls. Where configurations have parted, each runs on alone.
Shared layers run at the widest of what is not chosen yet: scores differ from those of a path run alone by float32
rounding (relative 1e-5), and never depend on which other configurations were asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from math import prod
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, fx

from bcnet.accel.enumeration.prefix_tree import Tree, Work, grow_tree, shape_of
from bcnet.accel.enumeration.score_all import LEAVES, peak
from bcnet.accel.enumeration.walker import Options, Walker
from bcnet.data.source import Batch, Source
from bcnet.errors import BcnetError
from bcnet.space.axis import Size
from bcnet.space.network import NetworkSpace
from bcnet.space.widths import Floats, Widths
from bcnet.supernet.scoring import Evaluator
from bcnet.supernet.supernet import Supernet

Ranks = NDArray[np.int64]
SAMPLE = 256
"""Random configurations for which the shared part is chosen, about as many as a search asks for."""
ELEMENT = 32
"""The cost of an element written to memory, in multiply-accumulates: batch norm takes 0.5 to 1 ns for one on a CPU, and
a convolution 0.02 to 0.03 ns for the other."""


class SharedEvaluator(Evaluator):
    """An :class:`Evaluator` that shares prefixes, where the network's operators and ``memory`` (bytes) allow it.

    How many levels are shared is decided once, so that a configuration has one score. One that holds widths
    other than candidates runs alone, as do all with recalibrated statistics.
    """

    together = 512

    def __init__(
        self, net: Supernet, batches: Source | Iterable[Batch], *more: Any, memory: int = 2 << 30, **settings: Any
    ):
        super().__init__(net, batches, *more, **settings)
        self._options = Options(memory=memory, bf16=self.bf16)
        self._units = [[c // v.unit for c in v.candidates] for v in net.space.variables]
        self._walkers: list[Walker] = []
        self._tree = None if self.recalibrate else self._grown()
        if self._tree is None:
            self.together = Evaluator.together

    @property
    def shares(self) -> bool:
        """Whether configurations share work."""
        return self._tree is not None

    def _grown(self) -> Tree | None:
        try:
            tree = grow_tree(self.net.space)
        except BcnetError:  # an operator that mixes channels: configurations run one by one
            return None
        ranks = self._ranks(tree, self.net.space.sample(np.random.default_rng(0), SAMPLE))
        self._tail = best_tail(self.net.space, tree, self._units, ranks)
        x, _ = next(self._loaded())
        room = self._options.memory - peak(self._walker(tree, "left", dry=True), x)
        self._prefixes = Prefixes(tree, room)
        return tree if room >= 0 else None

    def _walker(self, tree: Tree, side: Any, dry: bool = False) -> Walker:
        return Walker(self.net, tree, self._units, side, self._options, dry, self._tail)

    def _ranks(self, tree: Tree, widths: Widths) -> Ranks:
        """Which candidate of each variable, in the tree's order: (n, L)."""
        return self.net.space.encode(widths)[:, list(tree.order)]

    def _arranged(self, rows: list[Widths]) -> list[Widths]:
        """Neighbours in the tree are neighbours here, so that each process has most of its prefixes to itself."""
        if self._tree is None or not rows:
            return rows
        table = np.stack(rows)[:, list(self._tree.order)]
        return [rows[i] for i in np.lexsort(table.T[::-1])]

    def _measure(self, rows: Sequence[Widths], table: Floats) -> Iterator[float]:
        shared = [self._tree is not None and self._of_candidates(row) for row in rows]
        for kind, measure in ((False, super()._measure), (True, self._measure_shared)):
            indices = [i for i, found in enumerate(shared) if found == kind]
            if indices:
                part = np.zeros((len(indices), *table.shape[1:]))
                yield from measure([rows[i] for i in indices], part)
                table[indices] = part

    def _of_candidates(self, row: Widths) -> bool:
        return all(c in v.candidates for v, c in zip(self.net.space.variables, row.tolist(), strict=True))

    @torch.no_grad()
    def _measure_shared(self, rows: Sequence[Widths], table: Floats) -> Iterator[float]:
        assert self._tree is not None
        ranks = self._ranks(self._tree, np.stack(rows))
        if not self._walkers:  # kept, as they hold every slice of the weights that was needed
            self._walkers = [self._walker(self._tree, side) for side in self.net.sides]
        total = torch.zeros(table.shape, dtype=torch.float64, device=self.device)
        count = 0
        for number, (x, y) in enumerate(self._loaded(), 1):
            for s, walker in enumerate(self._walkers):
                outputs = walk(walker, x, ranks, self._prefixes, number)
                while some := list(islice(outputs, LEAVES)):  # a task's small operators are faster one after the other
                    for row, output in some:
                        total[row, s] += len(x) * self._judged(output, y)
            count += len(x)
            yield number / len(self.batches)
        table[:] = (total / count).cpu().numpy()


class Prefixes:
    """What was computed for prefixes and is still needed: at most ``room`` bytes, the least recently used goes."""

    def __init__(self, tree: Tree, room: int):
        self._tree, self._room = tree, room
        self._held: dict[tuple[object, ...], dict[fx.Node, Any]] = {}

    def keep(self, key: tuple[object, ...], values: dict[fx.Node, Any], level: int) -> None:
        """What later levels read of the ``values`` at ``level``."""
        of = self._tree.level_of
        self._held[key] = {
            node: value
            for node, value in values.items()
            if node is self._tree.output or any(of.get(user, -1) > level for user in node.users)
        }
        self._room -= _bytes(self._held[key])
        while self._room < 0:
            self._room += _bytes(self._held.pop(next(iter(self._held))))

    def get(self, key: tuple[object, ...]) -> dict[fx.Node, Any] | None:
        found = self._held.pop(key, None)
        if found is not None:
            self._held[key] = found
        return found


def _bytes(values: dict[fx.Node, Any]) -> int:
    return sum(t.untyped_storage().nbytes() for t in values.values() if isinstance(t, Tensor))


def walk(walker: Walker, x: Tensor, ranks: Ranks, kept: Prefixes, batch: int) -> Iterator[tuple[int, Tensor]]:
    """The row of each of ``ranks`` (n, L), candidates in the tree's order, and its output on ``x``.

    ``kept`` has what earlier walks on this ``batch`` came upon.
    """
    keys = [(batch, walker.side, *row) for row in ranks.tolist()]
    descent = _Descent(walker, ranks, kept, keys)
    descent.stand(keys[0][:2], lambda: walker.start(x))
    yield from descent.outputs(list(range(len(ranks))), 0)
    walker.values.clear()


@dataclass(frozen=True)
class _Descent:
    """The recursion of :func:`walk`: a class, since closures that call themselves would keep the activations alive."""

    walker: Walker
    ranks: Ranks
    kept: Prefixes
    keys: Sequence[tuple[object, ...]]

    def stand(self, key: tuple[object, ...], compute: Callable[[], None]) -> None:
        """Bring the walker to the prefix ``key``, with its values."""
        found = self.kept.get(key)
        if found is not None:
            self.walker.values.update(found)
        else:
            compute()
            self.kept.keep(key, self.walker.values, len(key) - 2)

    def outputs(self, rows: list[int], depth: int) -> Iterator[tuple[int, Tensor]]:
        """The outputs of ``rows``, which agree in their first ``depth`` candidates."""
        walker, ranks = self.walker, self.ranks
        if depth == walker.tail:
            for row in rows:
                walker.choose_rest(ranks[row, depth:].tolist())
                yield row, walker.output
            return
        for rank in sorted({int(ranks[row, depth]) for row in rows}):
            some = [row for row in rows if ranks[row, depth] == rank]
            walker.take(depth, rank)
            self.stand(self.keys[some[0]][: depth + 3], partial(walker.run, depth + 1))
            yield from self.outputs(some, depth + 1)
        walker.leave(depth)


def best_tail(space: NetworkSpace, tree: Tree, units: Sequence[Sequence[int]], ranks: Ranks) -> int:
    """How many levels to share, for configurations ``ranks`` (n, L): as many as make the fewest operations."""
    chosen = np.stack([np.array(units[v])[ranks[:, place]] for place, v in enumerate(tree.order)], axis=1)
    widest = np.array([units[v][-1] for v in tree.order])
    shared, alone = [], []
    for level, works in enumerate(tree.levels):
        prefixes = np.unique(chosen[:, :level], axis=0)
        rows = np.hstack([prefixes, np.tile(widest[level:], (len(prefixes), 1))])
        # Of siblings, a running sum computes the widest only; the others are its parts.
        last = np.ones(len(rows), dtype=bool)
        if level:
            last[:-1] = (rows[1:, : level - 1] != rows[:-1, : level - 1]).any(axis=1)
        shared.append(sum(_operations(space, tree, work, rows, last) for work in works))
        alone.append(sum(_operations(space, tree, work, chosen) for work in works))
    totals = [sum(shared[: tail + 1]) + sum(alone[tail + 1 :]) for tail in range(len(tree.order) + 1)]
    return int(np.argmin(totals))


def _operations(
    space: NetworkSpace, tree: Tree, work: Work, rows: NDArray[np.int64], last: NDArray[np.bool_] | None = None
) -> float:
    """The operations of one node for one image, summed over units (n, L) in the tree's order; ``last`` are those whose
    products are counted where these are shared."""
    axes = space.coupling.axes.get(space.graph.state_of.get(getattr(work.args.get("weight"), "name", ""), ""))
    shape = shape_of(work.node)
    outputs = np.full(len(rows), prod(shape[1:]))
    if work.layout is not None:
        outputs = outputs // shape[work.layout.dim] * _sizes(work.layout.axis.size, tree, rows)
    found = ELEMENT * float(outputs.sum())
    if axes is not None and len(axes) > 1:
        products = outputs * prod(shape_of(work.args["weight"])[2:]) * _sizes(axes[1].size, tree, rows)
        found += float(products.sum() if last is None or work.contracts is None else products[last].sum())
    return found


def _sizes(size: Size, tree: Tree, rows: NDArray[np.int64]) -> NDArray[np.int64]:
    """A size at units (n, L) in the tree's order: (n,)."""
    found = np.full(len(rows), size.constant)
    for variable, coefficient in size.terms:
        found += coefficient * rows[:, tree.place[variable]]
    return found
