"""The computations of a level on a GPU: a layer, its batch norm and what follows as few passes over memory.

All in channels-last bfloat16. A 1x1 convolution that widens takes its batch norm into its weights,
since the mean and variance of W x follow from the mean and the Gram matrix of x. A dense layer makes the parts
of all its candidates at once, and two passes over them give the statistics and the normalised results of every
sum; where its groups of channels are large, one kernel makes the sums and their statistics. A depthwise
convolution gathers its statistics while it runs.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from bcnet.accel.enumeration.level import Computation, Dense, Part, PerUnits, Reader, Stacking, StateReader, cut, read
from bcnet.accel.enumeration.maker import Maker
from bcnet.accel.enumeration.prefix_tree import Work
from bcnet.accel.kernels import enum_conv as gpu_conv
from bcnet.accel.kernels import enum_depthwise as gpu_depthwise
from bcnet.accel.kernels import enum_fold as gpu_fold
from bcnet.accel.kernels import enum_norm as kernels

GLOBAL_POOL = ("aten::adaptive_avg_pool2d", [1, 1])


class Moments:
    """Column sums (C,) and Gram matrix (C, C) of an activation, in float32; computed once for its value."""

    def __init__(self) -> None:
        self._known: dict[fx.Node, tuple[Any, Tensor, Tensor]] = {}

    def of(self, node: fx.Node, value: Tensor) -> tuple[Tensor, Tensor]:
        found = self._known.get(node)
        if found is None or found[0]() is not value:
            sums, gram = gpu_fold.moments(kernels.matrix(value)[None])
            found = self._known[node] = (weakref.ref(value), sums[0], gram[0])
        return found[1], found[2]


def _side_by_side(values: Sequence[Tensor]) -> Tensor:
    """Images of one shape as (k, rows, columns): a view where they lie one after the other in memory."""
    rows = [kernels.matrix(value) for value in values]
    starts = [value.storage_offset() for value in values]
    step = starts[1] - starts[0] if len(starts) > 1 else 0
    together = len({value.untyped_storage()._cdata for value in values}) == 1
    if together and starts == [starts[0] + step * k for k in range(len(values))]:
        return rows[0].as_strided((len(rows), *rows[0].shape), (step, *rows[0].stride()), starts[0])
    return torch.stack(rows)


class Folded(Computation):
    """A 1x1 convolution with its batch norm in its weights; ReLU and global pooling where they follow.

    Where all candidates of its input are there at once (see :class:`Normed`) and pooling makes its own results
    small, it runs for all of them at once too.
    """

    def __init__(self, walker: Any, chain: Sequence[Work], layers: tuple[Dense, dict[str, Any]], moments: Moments):
        super().__init__(walker, chain)
        self.dense, self.norm = layers
        self.moments = moments
        kinds = [w.kind for w in chain]
        self.relu, self.pool = "aten::relu" in kinds, GLOBAL_POOL[0] in kinds
        self.depth = chain[0].level - 1
        # The convolution's weight, (out, in) in float32.
        self._weight = PerUnits(
            walker, self.dense.weight.variables, lambda: self.dense.weight.read().flatten(1).contiguous()
        )

    def run(self) -> Tensor:
        walker, x = self.walker, self.dense.x
        rank = walker.rank[self.depth]
        if rank == 0 and self._together and isinstance(walker.sums.get(x.node), list):
            rows = _side_by_side(walker.sums[x.node])
            walker.sums[self.node] = self._pooled(rows, *gpu_fold.moments(rows), walker.values[x.node])
        results = walker.sums.get(self.node)
        if results is None:
            return self._one(walker.values[x.node])
        if rank + 1 == len(results) and not walker.dry:
            del walker.sums[self.node]
        return results[rank]

    @property
    def _together(self) -> bool:
        """Whether a level that chooses another variable makes its input and pools its results."""
        walker, x = self.walker, self.dense.x
        here = self.depth >= 0 and walker.tree.level_of[x.node] == self.depth + 1
        other = walker.tree.order[self.depth] not in self.dense.weight.variables
        return here and other and self._pools(walker.values[x.node])

    def _pools(self, x: Tensor) -> bool:
        return self.pool and x.shape[2] * x.shape[3] in (1, 2, 4, 8, 16, 32, 64, 128)

    def _one(self, held: Tensor) -> Tensor:
        """The result for one input, which was computed at the units ``held``."""
        sums, gram = self.moments.of(self.dense.x.node, held)
        value = self.dense.x.read()
        start = (value.storage_offset() - held.storage_offset()) % held.shape[1]
        kept = slice(start, start + value.shape[1])
        rows = kernels.matrix(value)
        sums, gram = sums[None, kept], gram[None, kept, kept]
        if self._pools(value):
            return self._pooled(rows[None], sums, gram, value)[0]
        (weight,), (shift,) = self._fold(sums, gram, len(rows), rows.dtype)
        y = torch._addmm_activation(shift, rows, weight.t()) if self.relu else torch.addmm(shift, rows, weight.t())
        result = kernels.image(y, (len(value), *value.shape[2:]))
        return result.mean((2, 3), keepdim=True, dtype=torch.float32) if self.pool else result

    def _fold(self, sums: Tensor, gram: Tensor, rows: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        return gpu_fold.fold(self._weight(), sums, gram, rows, _norm(self.norm), dtype)

    def _pooled(self, rows: Tensor, sums: Tensor, gram: Tensor, like: Tensor) -> list[Tensor]:
        """The results (n, C, 1, 1) for k inputs (k, rows, columns), images shaped as ``like``."""
        weight, shift = self._fold(sums, gram, rows.shape[1], rows.dtype)
        found = gpu_fold.dense_pool(rows, weight, shift, self.relu, like.shape[2] * like.shape[3])
        return list(found[:, :, :, None, None])


class Normed(Stacking):
    """A dense layer, its batch norm, and an addition, ReLU and global pooling where they follow."""

    def __init__(
        self,
        walker: Any,
        chain: Sequence[Work],
        layers: tuple[Dense, dict[str, Any]],
        around: tuple[Reader | None, bool],
    ):
        super().__init__(walker, chain)
        self.dense, self.norm = layers
        self.other, self.relu = around
        self.pool = chain[-1].kind == GLOBAL_POOL[0]
        self._weights: dict[int, Tensor] = {}
        self._packed: dict[int, Tensor] = {}
        sizes = (self.dense.weight.tensor.shape[2:], self.dense.rest["stride"], self.dense.rest["padding"])
        self._square = all(size[0] == size[1] for size in sizes)
        self._form: tuple[int, int, int] = (sizes[0][0], sizes[1][0], sizes[2][0])

    def run(self) -> Tensor:
        walker, dense = self.walker, self.dense
        if not dense.shared:
            x = dense.x.read()
            return self._all(x, [(((0, x.shape[1]),), dense.weight.read(), read(dense.bias))])[0]
        rank, units = walker.rank[dense.depth], walker.candidates[dense.variable]
        if rank == 0:
            walker.sums[self.node] = self._candidates()
        results = walker.sums[self.node]
        if rank + 1 == len(units) and not walker.dry:
            del walker.sums[self.node]
        return results[rank]

    @property
    def stacks(self) -> bool:
        """Pooled results are small, so that what follows can take them all at once."""
        return self.dense.shared and self.pool

    def stacked(self) -> Tensor:
        return _side_by_side(self._candidates())[..., None, None]

    def _candidates(self) -> list[Tensor]:
        """The results of all candidates."""
        return self._all(self.walker.values[self.dense.x.node], self._parts())

    def _parts(self) -> list[Part]:
        """What each candidate adds."""
        walker, dense = self.walker, self.dense
        found, before = [], walker.units[dense.variable]
        for rank, units in enumerate(walker.candidates[dense.variable]):
            walker.units[dense.variable] = units
            found.append(dense.parts(rank))
        walker.units[dense.variable] = before
        return found

    def _all(self, x: Tensor, parts: Sequence[Part]) -> list[Tensor]:
        """The results of the sums over the first 1, 2, ... parts."""
        groups = gpu_conv.Groups.of([pieces for pieces, _, _ in parts])
        if self._square and groups and parts[0][2] is None and gpu_conv.fits(x, parts[0][1], groups):
            return self._jointly(x, groups, [weight for _, weight, _ in parts])
        return self._finish([self._layer(cut(x, 1, pieces), weight, bias) for pieces, weight, bias in parts])

    def _jointly(self, x: Tensor, groups: gpu_conv.Groups, weights: Sequence[Tensor]) -> list[Tensor]:
        """All sums from one kernel, which also gathers their statistics."""
        key = id(weights[0])  # the layer keeps every cut of its weight
        if key not in self._packed:
            self._packed[key] = gpu_conv.packed(weights)
        sums, found, size = gpu_conv.convolve(x, self._packed[key], groups, self._form)
        other = None if self.other is None else kernels.matrix(self.other.read())
        affine = gpu_conv.norm(found, len(x), _norm(self.norm))
        if self.pool:
            return [t[:, :, None, None] for t in gpu_conv.apply_pool(sums, affine, other, self.relu, len(x))]
        return [kernels.image(t, (len(x), *size)) for t in gpu_conv.apply(sums, affine, other, self.relu)]

    def _layer(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """The convolution of x, (n, C, H, W) in channels-last memory."""
        rest = self.dense.rest
        if id(weight) not in self._weights:  # the layer keeps every cut of its weight, so that its id stays its own
            self._weights[id(weight)] = weight.contiguous(memory_format=torch.channels_last)
        weight = self._weights[id(weight)]
        if weight.shape[2:] == (1, 1) and rest["stride"] == [1, 1] and rest["padding"] == [0, 0] and bias is None:
            rows = kernels.matrix(x) @ weight.flatten(1).t()
            return kernels.image(rows, (len(x), *x.shape[2:]))
        x = x.contiguous(memory_format=torch.channels_last)
        y = torch.conv2d(x, weight, bias, rest["stride"], rest["padding"], rest["dilation"])
        return y.contiguous(memory_format=torch.channels_last)

    def _finish(self, parts: Sequence[Tensor]) -> list[Tensor]:
        n, _, height, width = parts[0].shape
        rows = [kernels.matrix(part) for part in parts]
        other = None if self.other is None else kernels.matrix(self.other.read())
        affine = kernels.statistics(rows, _norm(self.norm))
        if self.pool:
            return [t[:, :, None, None] for t in kernels.normalise_pool(rows, affine, other, self.relu, n)]
        found = kernels.normalise(rows, affine, other, self.relu, inplace=len(rows) == 1)
        return [kernels.image(t, (n, height, width)) for t in found]


class Depthwise(Computation):
    """A depthwise convolution, its batch norm, and ReLU where it follows."""

    def __init__(self, walker: Any, chain: Sequence[Work], conv: dict[str, Any], norm: dict[str, Any], relu: bool):
        super().__init__(walker, chain)
        self.conv, self.norm, self.relu = conv, norm, relu
        weight = conv["weight"]
        # (taps, channels) in float32
        self._weight = PerUnits(walker, weight.variables, lambda: weight.read().flatten(1).t().contiguous())

    def run(self) -> Tensor:
        x = self.conv["input"].read()
        stride, pad = self.conv["stride"][0], self.conv["padding"][0]
        rows, affine = gpu_depthwise.depthwise(x, self._weight(), stride, pad, _norm(self.norm))
        (result,) = kernels.normalise([rows], affine, None, self.relu, inplace=True)
        kernel = self.conv["weight"].tensor.shape[2:]
        size = [(s + 2 * pad - k) // stride + 1 for s, k in zip(x.shape[2:], kernel, strict=True)]
        return kernels.image(result, (len(x), size[0], size[1]))


class FusedMaker(Maker):
    """Makes the computations above where their layers are found, and plain ones everywhere else."""

    def __init__(self, *args: Any):
        super().__init__(*args)
        self._moments = Moments()

    def _chain(self, work: Work, works: Sequence[Work]) -> list[Work]:
        rows = {w.node: w for w in works}
        norm = self._only_user(work, "aten::batch_norm", rows) if _layer_kind(work) else None
        if norm is None or norm.args["weight"] is None:
            return super()._chain(work, works)
        chain = [work, norm, *self._after(norm, work, rows)]
        if _layer_kind(work) == "depthwise":
            return chain if chain[-1].kind != "aten::add" and len(chain) <= 3 else super()._chain(work, works)
        pool = self._only_user(chain[-1], GLOBAL_POOL[0], rows)
        if pool is not None and list(pool.args["output_size"]) == GLOBAL_POOL[1]:
            chain.append(pool)
        return chain if self._fits(chain) else super()._chain(work, works)

    def _fits(self, chain: Sequence[Work]) -> bool:
        """Whether all candidates of a chain can be made at once: nothing in it depends on the one chosen."""
        work = chain[0]
        dense = Dense(self.walker, work, self._named(work))
        if not dense.shared:
            return True
        other, _ = self._surroundings(chain)
        level_of = self.walker.tree.level_of
        return (
            dense.variable not in dense.axes[0].variables
            and len(self.walker.candidates[dense.variable]) <= kernels.MAX_PARTS
            and (other is None or level_of[other.node] < work.level)
        )

    def _exact(self, work: Work) -> StateReader:
        """The weight of a layer, not rounded to bfloat16."""
        weight = work.args["weight"]
        return StateReader(self.walker, weight, self.walker.axes_of(weight))

    def _computation(self, chain: list[Work]) -> Computation:
        if len(chain) == 1 or chain[1].kind != "aten::batch_norm":
            return super()._computation(chain)
        work, norm = chain[0], self._named(chain[1])
        given, other, relu = self._named(work), *self._surroundings(chain)
        if _layer_kind(work) == "depthwise":
            return Depthwise(self.walker, chain, {**given, "weight": self._exact(work)}, norm, relu)
        dense = Dense(self.walker, work, given)
        if other is None and _widens(dense):
            dense.weight = self._exact(work)
            return Folded(self.walker, chain, (dense, norm), self._moments)
        return Normed(self.walker, chain, (dense, norm), (other, relu))


def _norm(args: Mapping[str, Any]) -> kernels.BatchNorm:
    """A batch norm at the current units."""
    return args["weight"].read(), args["bias"].read(), args["eps"]


def _layer_kind(work: Work) -> str | None:
    """How these computations run a work: as a ``dense`` or a ``depthwise`` convolution of images, or not at all."""
    args = work.args
    if work.kind != "aten::conv2d" or list(args["dilation"]) != [1, 1] or isinstance(args["padding"], str):
        return None
    if work.contracts is not None:
        return "dense"
    shape = args["weight"].meta["val"].shape
    square = shape[2] == shape[3] and len(set(args["stride"])) == len(set(args["padding"])) == 1
    return "depthwise" if square and args["groups"] == shape[0] and shape[1] == 1 and args["bias"] is None else None


def _widens(dense: Dense) -> bool:
    """A plain 1x1 convolution of one run of channels, with more outputs than inputs."""
    rest, shape = dense.rest, dense.weight.tensor.shape
    plain = tuple(shape[2:]) == (1, 1) and list(rest["stride"]) == [1, 1] and list(rest["padding"]) == [0, 0]
    return plain and dense.bias is None and len(dense.axes[1].segments) == 1 and shape[0] >= shape[1]
