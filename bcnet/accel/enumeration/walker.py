"""One side of a supernet, walked through the tree of widths level by level.

A walker stands at a node of the tree: the variables chosen so far have their units, all others are at their
widest. It holds one set of activations per level.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from pydantic import model_validator
from torch import Tensor, fx

from bcnet.accel.enumeration.level import Stacking
from bcnet.accel.enumeration.maker import Maker
from bcnet.accel.enumeration.prefix_tree import Tree
from bcnet.errors import BcnetError
from bcnet.space.axis import Axis
from bcnet.space.resize import sliced
from bcnet.space.widths import Side
from bcnet.supernet.supernet import Supernet
from bcnet.utils.settings import Natural, checked


@checked
class Options:
    """How all widths are scored.

    ``memory`` bounds the bytes of activations held at any time (the workspaces of convolution libraries are
    not counted). ``bf16`` runs dense layers but the last in bfloat16, with float32 running sums and statistics;
    ``fused`` then uses Triton kernels on a GPU. ``average`` also scores the mean of both sides' logits, and
    ``overlap`` lets a GPU work on both sides at the same time; each takes twice the memory.
    """

    memory: Natural = 2 << 30
    bf16: bool = False
    fused: bool = False
    average: bool = False
    overlap: bool = False

    @model_validator(mode="after")
    def _fits_together(self) -> Options:
        if self.fused and not self.bf16:
            raise BcnetError("fused kernels compute in bfloat16: set bf16 as well, or leave out fused")
        return self

    @property
    def dtype(self) -> torch.dtype | None:
        return torch.bfloat16 if self.bf16 else None


class Walker:
    """The activations of one side at one place of the tree.

    ``candidates`` are the units that each variable may take, ascending. ``dtype`` is that of dense layers
    and of the activations between them; batch statistics, running sums and the output layer are float32 or
    wider. ``sums`` holds running sums, or the results of all candidates where a computation makes them at once.
    Levels after ``tail`` do not branch: they run once all variables are chosen (:meth:`choose_rest`), at just
    these units. A ``dry`` walker computes nothing, on the meta device, and holds every running sum to the end.
    """

    def __init__(
        self,
        net: Supernet,
        tree: Tree,
        candidates: Sequence[Sequence[int]],
        side: Side,
        options: Options,
        dry: bool = False,
        tail: int | None = None,
    ):
        self.tree, self.candidates, self.side, self.dry = tree, candidates, side, dry
        self.tail = len(tree.order) if tail is None else tail
        self.dtype, self.fused = options.dtype, options.fused
        self.widest = [c[-1] for c in candidates]
        self.units = list(self.widest)
        self.rank = [0] * len(candidates)
        self.values: dict[fx.Node, Any] = {}
        self.sums: dict[fx.Node, Any] = {}
        self.state = _widest_state(net, self.widest, side)
        if dry:
            self.state = {node: tensor.to("meta") for node, tensor in self.state.items()}
        self._space = net.space
        self._input = _input_of(net)
        slots = {(s.node, s.name, s.item): s.size for s in net.space.slots}
        maker = _fused_maker()(self, slots) if self.fused else Maker(self, slots)
        self._levels = [maker.level(works) for works in tree.levels]

    def axes_of(self, node: fx.Node) -> tuple[Axis, ...] | None:
        """The axes of a parameter or buffer."""
        return self._space.coupling.axes.get(self._space.graph.state_of.get(node.name, ""))

    def start(self, x: Tensor) -> None:
        """Begin with a batch ``x`` (n, C, H, W): everything that depends on no width."""
        x = x if self.dtype is None else x.to(self.dtype)
        self.values = {self._input: x.contiguous(memory_format=torch.channels_last) if self.fused else x}
        self.run(0)

    def choose(self, depth: int, rank: int) -> None:
        """Give the variable ``tree.order[depth]`` its candidate ``rank``, in ascending order.

        Candidates may be left out, but not by the fused computations, which make all of them with the first.
        """
        self.take(depth, rank)
        self.run(depth + 1)

    def take(self, depth: int, rank: int) -> None:
        """As :meth:`choose`, but nothing is computed."""
        variable = self.tree.order[depth]
        self.rank[depth] = rank
        self.units[variable] = self.candidates[variable][rank]

    def choose_rest(self, ranks: Sequence[int]) -> None:
        """Give the variables after the ``tail`` first ones their candidates, one rank for each."""
        for variable, rank in zip(self.tree.order[self.tail :], ranks, strict=True):
            self.units[variable] = self.candidates[variable][rank]
        for level in range(self.tail + 1, len(self._levels)):
            self.run(level)
        for variable in self.tree.order[self.tail :]:
            self.units[variable] = self.widest[variable]

    def leave(self, depth: int) -> None:
        """Forget the choice of the variable ``tree.order[depth]``."""
        variable = self.tree.order[depth]
        self.units[variable] = self.widest[variable]
        self._forget(depth + 1)
        for computation in self._levels[depth + 1]:
            self.sums.pop(computation.node, None)

    @property
    def finishes(self) -> bool:
        """Whether the last level begins by computing all candidates at once, and then treats images apart."""
        last = self._levels[-1]
        stacks = bool(last) and isinstance(last[0], Stacking) and last[0].stacks
        return stacks and all(computation.apart for computation in last[1:])

    def finish(self) -> Tensor:
        """The logits for every candidate of the last variable, (candidates, n, classes)."""
        first, *rest = self._levels[-1]
        assert isinstance(first, Stacking)
        found = first.stacked()
        if rest:
            self.values[first.node] = found.flatten(0, 1)
            for computation in rest:
                self.values[computation.node] = computation.run()
            found = self.output.unflatten(0, found.shape[:2])
        self._forget(len(self._levels) - 1)
        return found

    @property
    def output(self) -> Tensor:
        found: Tensor = self.values[self.tree.output]
        return found

    def run(self, level: int) -> None:
        self._forget(level)
        for computation in self._levels[level]:
            self.values[computation.node] = computation.run()
            for node in computation.dies:
                del self.values[node]

    def _forget(self, level: int) -> None:
        for computation in self._levels[level]:
            self.values.pop(computation.node, None)


def _fused_maker() -> type[Maker]:
    try:
        from bcnet.accel.enumeration.gpu_level import FusedMaker
    except ModuleNotFoundError as error:
        if error.name != "triton":
            raise
        raise BcnetError("fused scoring needs Triton, which comes with torch for CUDA: leave out fused") from None
    return FusedMaker


def _input_of(net: Supernet) -> fx.Node:
    graph = net.space.graph
    if len(graph.inputs) != 1:
        raise BcnetError("only networks with one input can be scored all at once: score widths one by one")
    return next(n for n in graph.graph.nodes if n.name == graph.inputs[0])


def _widest_state(net: Supernet, widest: Sequence[int], side: Side) -> dict[fx.Node, Tensor]:
    """Parameters, buffers and constants as the widest path sees them, by the graph's placeholders."""
    space, graph = net.space, net.space.graph
    total = space.units([net.principle.total(v) for v in space.variables])
    tensors = {**dict(net.named_parameters(remove_duplicate=False)), **dict(net.named_buffers(remove_duplicate=False))}
    found: dict[fx.Node, Tensor] = {}
    for node in graph.graph.nodes:
        if node.name in graph.constants:
            found[node] = graph.constants[node.name].to(next(net.parameters()).device)
        elif node.name in graph.state_of:
            name = graph.state_of[node.name]
            axes = space.coupling.axes.get(name)
            tensor = tensors[name].detach()
            found[node] = tensor if axes is None else sliced(tensor, axes, widest, total, side)
    return found
