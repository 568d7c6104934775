"""Scores of all configurations of a small space at once, the same as one by one with batch statistics.

The tree of widths is walked depth first, once for every scoring batch: work that a prefix of widths shares is
done once, and the candidates of a layer come from one widest computation (see
:mod:`bcnet.accel.enumeration.prefix_tree`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from bcnet.accel.enumeration.allocations import Allocations
from bcnet.accel.enumeration.prefix_tree import Tree, grow_tree
from bcnet.accel.enumeration.walker import Options, Walker
from bcnet.data.source import Batch
from bcnet.errors import BcnetError
from bcnet.space.widths import Floats, Side, Widths
from bcnet.supernet.supernet import Supernet

MAX_WIDTHS = 1_000_000
LEAVES = 64  # logits that are scored in one go


@dataclass(frozen=True)
class AllScores:
    """Scores of all configurations, in the order of ``itertools.product(*candidates)``.

    ``accuracy`` and ``loss`` are (sides, n), means over all images; ``average_accuracy`` and
    ``average_loss`` (n,) are those of the mean of both sides' logits, where they were asked for.
    """

    candidates: tuple[tuple[int, ...], ...]
    sides: tuple[Side, ...]
    accuracy: Floats
    loss: Floats
    average_accuracy: Floats | None = None
    average_loss: Floats | None = None

    @property
    def widths(self) -> Widths:
        """All widths scored, (n, L)."""
        grids = np.meshgrid(*[np.array(c, dtype=np.int64) for c in self.candidates], indexing="ij")
        return np.stack([g.reshape(-1) for g in grids], axis=-1)


@torch.no_grad()
def score_all(
    net: Supernet,
    batches: Iterable[tuple[Tensor, Tensor]],
    candidates: Sequence[Sequence[int]] | None = None,
    options: Options | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> AllScores:
    """Score all widths that ``candidates`` (of each variable; default: the space's own) span.

    ``batches`` are (x, y): images (n, C, H, W) and classes (n,); batch statistics are those of one batch.
    ``progress`` is called with (done, all) paths, counting a path once for every batch. A network with an
    operator whose work widths cannot share is refused: score it one by one.
    """
    options = options or Options()
    chosen = _check_candidates(net, candidates)
    rows = list(batches)
    if not rows:
        raise BcnetError("there is nothing to score on: the validation set is empty")
    tree = grow_tree(net.space)
    units = _units(net, chosen)
    average = options.average and len(net.sides) == 2
    lanes = _lanes(len(net.sides)) if options.overlap and rows[0][0].is_cuda else ()
    teams = _teams(net, options, rows[0][0])
    largest = max((x for x, _ in rows), key=len)
    if (needed := _needed(net, tree, units, largest, options)) > options.memory:
        raise BcnetError(
            f"scoring all widths in batches of {len(largest)} images holds up to {needed / 2**20:,.0f} MiB, but the "
            f"cap is {options.memory / 2**20:,.0f} MiB: raise the cap or score in smaller batches"
        )
    walkers = {side: Walker(net, tree, units, side, options) for side in net.sides}
    tally = _Tally(tree, units, len(net.sides) + average, len(rows) * len(teams), progress, lanes)
    for x, y in rows:
        for team in teams:
            _Walk([walkers[side] for side in team], [net.sides.index(side) for side in team], tally, y).run(x)
    accuracy, loss = (tally.sums / sum(len(y) for _, y in rows)).cpu().numpy()
    n = len(net.sides)
    joint = (accuracy[n], loss[n]) if average else (None, None)
    return AllScores(chosen, net.sides, accuracy[:n], loss[:n], *joint)


@cache
def _lanes(count: int) -> tuple[torch.cuda.Stream, ...]:
    """A stream for each side: where the work of one side leaves multiprocessors idle, that of the other fills them.

    Always the same ones, since memory that was freed is used again on its own stream only.
    """
    return tuple(torch.cuda.Stream() for _ in range(count))


def _check_candidates(net: Supernet, candidates: Sequence[Sequence[int]] | None) -> tuple[tuple[int, ...], ...]:
    variables = net.space.variables
    if candidates is None:
        chosen = tuple(v.candidates for v in variables)
    else:
        if len(candidates) != len(variables):
            raise BcnetError(
                f"this space has {len(variables)} width variables, but candidates of {len(candidates)} were given"
            )
        chosen = tuple(tuple(sorted({int(c) for c in row})) for row in candidates)
        for variable, row in zip(variables, chosen, strict=True):
            if not row:
                raise BcnetError(f"variable {variable.name!r} was given no candidate")
        for extreme in (0, -1):
            net.space.check([row[extreme] for row in chosen])
        for variable, row in zip(variables, chosen, strict=True):
            if any(c % variable.unit for c in row):
                raise BcnetError(f"candidates of variable {variable.name!r} must be multiples of {variable.unit}")
    size = math.prod(len(row) for row in chosen)
    if size > MAX_WIDTHS:
        raise BcnetError(
            f"there are {size:,} widths, but all are scored at once up to {MAX_WIDTHS:,} only: give fewer candidates"
        )
    return chosen


def _units(net: Supernet, candidates: Sequence[Sequence[int]]) -> list[list[int]]:
    return [[c // v.unit for c in row] for v, row in zip(net.space.variables, candidates, strict=True)]


def _teams(net: Supernet, options: Options, x: Tensor) -> list[tuple[Side, ...]]:
    """The sides that are walked together, which hold their activations at the same time."""
    together = (options.average and len(net.sides) == 2) or (options.overlap and x.is_cuda)
    return [net.sides] if together else [(side,) for side in net.sides]


def _needed(net: Supernet, tree: Tree, units: Sequence[Sequence[int]], x: Tensor, options: Options) -> int:
    """Bytes that a walk on ``x`` would hold, found by going down the widest path without computing anything."""
    team = _teams(net, options, x)[0]
    return sum(peak(Walker(net, tree, units, side, options, dry=True), x) for side in team)


def within_memory(net: Supernet, batches: Sequence[Batch], options: Options) -> list[Batch]:
    """``batches`` of the same images as :func:`score_all` can score them within ``options.memory``: halved until they
    fit, in parts of nearly one size, which leaves batch norm the statistics of fewer images."""
    if not batches:
        return []
    x = max((x for x, _ in batches), key=len)
    tree, units = grow_tree(net.space), _units(net, [v.candidates for v in net.space.variables])
    size = len(x)
    while size > 1 and _needed(net, tree, units, x[:size], options) > options.memory:
        size = -(-size // 2)
    counts = [max(1, -(-len(y) // size)) for _, y in batches]
    return [
        part
        for (x, y), count in zip(batches, counts, strict=True)
        for part in zip(x.tensor_split(count), y.tensor_split(count), strict=True)
    ]


def peak(walker: Walker, x: Tensor) -> int:
    """The most bytes that one side holds: activations of the widest path, all running sums, and logits."""
    with Allocations() as allocations:
        walker.start(torch.empty(x.shape, dtype=x.dtype, device="meta"))
        for depth, variable in enumerate(walker.tree.order[: walker.tail]):
            for rank in range(len(walker.candidates[variable])):
                walker.choose(depth, rank)
        walker.choose_rest([len(walker.candidates[v]) - 1 for v in walker.tree.order[walker.tail :]])
        logits = walker.output
    scoring = 4 * (LEAVES + max(map(len, walker.candidates))) * logits.numel() * 4
    return allocations.peak + scoring


class _Walk:
    """One batch through the tree: the walkers of one or both sides take the same steps."""

    def __init__(self, walkers: Sequence[Walker], rows: Sequence[int], tally: _Tally, y: Tensor):
        self.walkers, self.rows, self.tally, self.y = walkers, rows, tally, y

    @property
    def _lanes(self) -> list[tuple[Walker, AbstractContextManager[Any]]]:
        """Each walker with the stream it works on."""
        if not self.tally.lanes:
            return [(walker, nullcontext()) for walker in self.walkers]
        return [(w, torch.cuda.stream(lane)) for w, lane in zip(self.walkers, self.tally.lanes, strict=True)]

    def run(self, x: Tensor) -> None:
        self.tally.part()
        for walker, lane in self._lanes:
            with lane:
                walker.start(x)
        self._descend(0, 0)
        self.tally.flush(self.rows, self.y)

    def _descend(self, depth: int, index: int) -> None:
        tree = self.walkers[0].tree
        if depth == len(tree.order):
            self.tally.add(self.rows, self.y, [index], [w.output for w in self.walkers])
            return
        variable = tree.order[depth]
        stride = self.tally.strides[variable]
        ranks = range(len(self.walkers[0].candidates[variable]))
        if depth + 1 == len(tree.order) and all(w.finishes for w in self.walkers):
            logits = []
            for walker, lane in self._lanes:
                with lane:
                    logits.append(walker.finish())
            self.tally.add(self.rows, self.y, [index + rank * stride for rank in ranks], logits)
            return
        for rank in ranks:
            for walker, lane in self._lanes:
                with lane:
                    walker.choose(depth, rank)
            self._descend(depth + 1, index + rank * stride)
        for walker in self.walkers:
            walker.leave(depth)


class _Tally:
    """Collects logits and scores them, many leaves in one go.

    ``sums`` (2, rows, widths) are sums over images of hits and losses; the rows are the sides and, where
    asked for, the mean of their logits. Logits come from ``lanes``, which wait while they are scored.
    """

    def __init__(
        self,
        tree: Tree,
        units: Sequence[Sequence[int]],
        rows: int,
        walks: int,
        progress: Callable[[int, int], None] | None,
        lanes: Sequence[torch.cuda.Stream] = (),
    ):
        self.lanes = lanes
        counts = [len(row) for row in units]
        self.strides = [math.prod(counts[i + 1 :]) for i in range(len(counts))]
        self.sums = torch.zeros(2, rows, math.prod(counts), dtype=torch.float64)
        self.waiting: list[tuple[list[int], list[Tensor]]] = []
        self.progress, self.done, self.all = progress, 0, walks * math.prod(counts)

    def add(self, rows: Sequence[int], y: Tensor, indices: list[int], logits: list[Tensor]) -> None:
        """Take the logits of some widths: (n, classes) of one, or (k, n, classes), for every row."""
        self.waiting.append((indices, [t if t.dim() == 3 else t[None] for t in logits]))
        if sum(len(i) for i, _ in self.waiting) >= LEAVES:
            self.flush(rows, y)

    def part(self) -> None:
        """Make the lanes wait for work that was done outside them."""
        for lane in self.lanes:
            lane.wait_stream(torch.cuda.current_stream())

    def flush(self, rows: Sequence[int], y: Tensor) -> None:
        if not self.waiting:
            return
        for lane in self.lanes:
            torch.cuda.current_stream().wait_stream(lane)
        indices = [i for row, _ in self.waiting for i in row]
        logits = [torch.cat([t[k] for _, t in self.waiting]).float() for k in range(len(rows))]
        self.waiting.clear()
        numbers = list(rows)
        if len(self.sums[0]) > len(rows) > 1:
            logits.append(torch.stack(logits).mean(0))
            numbers.append(len(self.sums[0]) - 1)
        if self.sums.device != y.device:
            self.sums = self.sums.to(y.device)
        # From pinned memory, since any other copy waits for all work of the GPU.
        where = torch.tensor(indices, pin_memory=y.is_cuda).to(y.device, non_blocking=True)
        for number, scores in zip(numbers, logits, strict=True):
            hits = (scores.argmax(-1) == y).sum(-1)
            losses = (
                F.cross_entropy(scores.transpose(1, 2), y.expand(len(scores), -1), reduction="none").double().sum(-1)
            )
            self.sums[0, number, where] += hits
            self.sums[1, number, where] += losses
        self.part()
        self.done += len(indices)
        if self.progress is not None:
            self.progress(self.done, self.all)
