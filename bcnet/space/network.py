"""The width space of a network: trace any CNN, cost any widths, build the network at any widths."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import gcd
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.nn.modules.conv import _ConvNd
from torch.utils._pytree import tree_map_only

from bcnet.errors import BcnetError, first_line
from bcnet.space.axis import Axis
from bcnet.space.capture import Capture, Example, arguments, capture, used_in_training
from bcnet.space.check import self_check
from bcnet.space.cost import Cost, QuadraticCost
from bcnet.space.counting import beyond_quadratic, flops, parameters, peak_memory
from bcnet.space.coupling import Coupling, couple
from bcnet.space.importance import Keep, KeptUnits, kept_units
from bcnet.space.learning import QUICK, learning, tell_lost, tell_resting
from bcnet.space.outputs import logits
from bcnet.space.resize import draw, empty_state, find_attributes, resized, selected, sliced
from bcnet.space.rewrite import CONSTANT, graph_network, slots
from bcnet.space.state import state_of, unwrapped
from bcnet.space.torch_export import tensors_in, without_autocast
from bcnet.space.widths import Side, Widths, WidthSpace, WidthVariable, candidates


def trace(
    model: nn.Module,
    example: Example,
    *,
    groups: int = 20,
    base: int = 1,
    round_to: int = 1,
    least: int = 1,
    ignore: Iterable[str] = (),
    init: Callable[[nn.Module], object] | None = None,
    output: Callable[[Any], Any] | None = None,
    check: bool = True,
) -> NetworkSpace:
    """The width space of ``model``, found from its graph on ``example``: one batch, a tuple of inputs, or a
    dictionary of named ones.

    ``groups`` and ``base`` set the candidates (see :func:`bcnet.space.candidates`); ``round_to`` makes them,
    and uniform scalings, multiples of a number that suits the hardware, so far as it divides the layer's own
    width; ``least`` is the fewest channels a layer may keep; ``ignore`` names layers whose output width must
    not change; ``init`` is called on every freshly built network, after its layers have drawn their weights.
    ``output`` picks what a task is about from an output that is not a tensor, ``lambda y: y["logits"]``; the usual
    ones are found without it. ``check=False`` skips the check of the result on a random network of the space.
    """
    model = unwrapped(model)
    graph = capture(model, example, output=output)
    state = {**state_of(model, graph.plain), **graph.numbers}
    used = {id(state[name]) for name in graph.used}
    unread = [name for name, p in state.items() if p.dim() and id(p) not in used]
    unused = bool(unread) and used_in_training(model, example, unread)
    training = None
    if unused:  # a layer for training only; what cannot be captured there stays unchanged
        with contextlib.suppress(BcnetError):
            training = capture(model, example, training=True, output=output)
            kept = state_of(model, training.plain)  # what evaluation mode computes anew is not state there
            training = training.with_constants({name: tensor for name, tensor in kept.items() if name not in state})
    coupling = couple(graph, state, ignore, training, _kernels(model), partial(beyond_quadratic, graph, state))
    varying = {name for name, axes in coupling.axes.items() if any(axis.variables or axis.numbers for axis in axes)}
    constants = {name: state[name] for name in (*graph.plain, *graph.numbers) if name not in varying}
    graph = graph.with_constants(constants)
    coupling = replace(coupling, fixed=tuple(row for row in coupling.fixed if row[0] not in constants))
    space = NetworkSpace(model, example, graph, coupling, (groups, base, round_to, least), init, output)
    if unused:
        space.learn_training(training)
    if graph.by_hand or (check and space.costs["flops"](space.max)[0] <= QUICK):
        space.graph = learning(model, graph, space.output)
    if check:
        self_check(space)
        tell_resting(model, graph)
    tell_lost(model, example, space.graph)
    return space


def _kernels(model: nn.Module) -> set[tuple[str, int]]:
    """Parameter dimensions that are a convolution's kernel, whatever the parameter is called (weight norm)."""
    found = set()
    for path, module in model.named_modules():
        if isinstance(module, _ConvNd):
            rank = len(module.kernel_size) + 2
            names = [f"{path}.{name}".lstrip(".") for name, p in module.named_parameters() if p.dim() == rank]
            found |= {(name, axis) for name in names for axis in range(2, rank)}
    return found


def _kind_of(model: nn.Module) -> tuple[torch.device | None, torch.dtype | None]:
    """Where a model computes, and how precisely, by its first parameter that is no integer."""
    found = next((p for p in model.parameters() if p.is_floating_point()), None)
    return (None, None) if found is None else (found.device, found.dtype)


class NetworkSpace(WidthSpace):
    """A :class:`WidthSpace` that knows its network. Made by :func:`trace`.

    ``costs`` has ``flops`` (multiply-accumulates), ``params`` and ``memory`` (bytes of the peak
    activation); ``fixed`` lists layers that cannot vary, with the reason.
    """

    def __init__(
        self,
        model: nn.Module,
        example: Example,
        graph: Capture,
        coupling: Coupling,
        grid: tuple[int, int, int, int],
        init: Callable[[nn.Module], object] | None = None,
        output: Callable[[Any], Any] | None = None,
    ):
        groups, base, round_to, least = grid
        if round_to < 1:
            raise BcnetError(f"round_to is {round_to}, but widths are rounded to multiples of at least 1")
        steps = [v.unit * gcd(v.count, round_to // gcd(round_to, v.unit)) for v in coupling.variables]
        variables = [
            WidthVariable(v.name, candidates(v.count * v.unit, groups, base, step, least), v.layers, v.unit)
            for v, step in zip(coupling.variables, steps, strict=True)
        ]
        super().__init__(variables, steps, least)
        self.model, self.graph, self.coupling, self.init = model, graph, coupling, init
        self._example, self._inputs = tuple(tensors_in(arguments(example))), graph.given
        self._traced_as, self.output = _kind_of(model), output or logits
        self.fixed = coupling.fixed
        self.slots = slots(graph, coupling)
        self.costs: dict[str, Cost] = {
            "flops": flops(graph, coupling),
            "params": parameters(state_of(model), coupling),
            "memory": peak_memory(graph, coupling),
        }
        self._attributes = find_attributes(model, self.slots)
        self._own_class: bool | None = None
        self._trains_otherwise = False

    @property
    def example(self) -> tuple[Tensor, ...]:
        """The example input, where the model is now and as precise: it may have been moved since it was traced."""
        return tuple(tensors_in(self._follow(self._example)))

    @property
    def inputs(self) -> Any:
        """The arguments and keywords that the graph was captured with, as :attr:`example` is."""
        return self._follow(self._inputs)

    def _follow(self, given: Any) -> Any:
        (_, was), (device, precision) = self._traced_as, _kind_of(self.model)
        if self._traced_as == (device, precision):
            return given
        return tree_map_only(Tensor, lambda t: t.to(device, precision if t.dtype == was else t.dtype), given)

    def learn_training(self, graph: Capture | None) -> None:
        """The network has layers for training only; their ``graph`` shows which attributes hold sizes."""
        self._trains_otherwise = True
        if graph is not None and self.coupling.training is not None:
            self._attributes = find_attributes(self.model, [*self.slots, *slots(graph, self.coupling.training)])

    def state_of(self, network: nn.Module) -> dict[str, Tensor]:
        """What may vary in ``network``: parameters, buffers, plain attributes with channels, indices of channels."""
        found = state_of(network, (name for name in self.graph.plain if name in self.coupling.axes))
        return {**self.graph.numbers, **found}

    def units(self, widths: ArrayLike) -> list[int]:
        """Widths (L,) in units of their variables; widths beyond ``l`` are allowed (a supernet's total)."""
        return [int(w) // v.unit for w, v in zip(np.asarray(widths).tolist(), self.variables, strict=True)]

    def flat(self, inputs: Example) -> tuple[Tensor, ...]:
        """The tensors of one batch in the order in which the graph takes them."""
        args, kwargs = arguments(inputs)
        if set(kwargs) != set(self.inputs[1]):
            wanted = ", ".join(self.inputs[1]) or "no names"
            raise BcnetError(f"the batch has {', '.join(kwargs) or 'no names'}, but the example input has {wanted}")
        return tuple(tensors_in((args, {name: kwargs[name] for name in self.inputs[1]})))

    @property
    def reducible_flops(self) -> float:
        """The share of the FLOPs that shrinks with the widths."""
        cost = self.costs["flops"]
        full = int(cost(self.max)[0])
        return 1 - cost.q0 / full if full and isinstance(cost, QuadraticCost) else 0.0

    @property
    def own_class(self) -> bool:
        """Whether the user's class itself runs at other widths; otherwise networks are built from its graph."""
        if self._own_class is None:
            rng = np.random.default_rng(0)
            reasons = [self._differs(w) for w in (self.max, self.min, self.sample(rng)[0])]
            self._own_class = not any(reasons)
            if not self._own_class:
                if not self.graph.dynamic:
                    raise BcnetError(
                        f"{type(self.model).__name__} itself does not run at other widths, and its graph runs on "
                        f"batches of {self.graph.batch} only: its forward must not depend on the batch size"
                    )
                why = next(reason for reason in reasons if reason)
                left_out = "its Python code and its own gradients" if self.graph.lost else "its Python code"
                warnings.warn(
                    f"{type(self.model).__name__} itself does not run at other widths ({why}), so networks are built "
                    f"from its exported graph: plain layers under the same names, without {left_out}",
                    stacklevel=3,
                )
        return self._own_class

    def build(
        self,
        widths: ArrayLike,
        weights_of: nn.Module | None = None,
        side: Side = "left",
        *,
        keep: Keep | None = None,
        grow: bool = False,
    ) -> nn.Module:
        """A plain network at ``widths`` (L,): fresh weights, or slices of ``weights_of``.

        ``weights_of`` is the original network or a supernet (anything whose state has the original's
        names). ``side`` says which of its channels are taken, or ``keep`` does: the most important ones by a
        criterion (``"l2"``, see :func:`bcnet.space.importance.importance`) or by your own scores, or the ones
        given, an array for each variable (:func:`bcnet.space.importance.kept_units`); their order is kept.
        ``grow`` allows widths beyond the original's.
        """
        checked = np.asarray(widths, dtype=np.int64) if grow else self.check(widths)
        if checked.ndim != 1:
            raise BcnetError("build takes the widths of one network, a row of numbers")
        if keep is not None and weights_of is None:
            raise BcnetError("keep says which channels of a network stay: give that network as weights_of")
        kept = None if keep is None or weights_of is None else kept_units(self, self.units(checked), keep, weights_of)
        network = (self._own if self.own_class else self._from_graph)(checked)
        if weights_of is None:
            self._draw(network, checked)
            if self.init is not None:
                self.init(network)
        else:
            self.copy_weights(network, checked, weights_of, side, kept)
        return network

    @torch.no_grad()
    def _draw(self, network: nn.Module, widths: Widths) -> None:
        """Fresh weights for ``network``; the layers of a graph cannot draw any, so those of the user's class do."""
        original, units = self.state_of(self.model), self.units(widths)
        draw(network, original, self.coupling.axes, units)
        if self.own_class:
            return
        try:
            layers = self._own(widths)
        except Exception as error:
            why = f"{type(self.model).__name__} cannot take other widths ({first_line(error)})"
            warnings.warn(f"{why}, so networks begin with the original's weights", stacklevel=3)
            return
        draw(layers, original, self.coupling.axes, units)
        drawn = {**dict(layers.named_parameters()), **dict(layers.named_buffers())}
        for name, tensor in [*network.named_parameters(), *network.named_buffers()]:
            if name in drawn and drawn[name].shape == tensor.shape:
                tensor.copy_(drawn[name])

    @torch.no_grad()
    def copy_weights(
        self, network: nn.Module, widths: Widths, source: nn.Module, side: Side = "left", kept: KeptUnits | None = None
    ) -> None:
        """Fill ``network`` (built at ``widths``) with the channels of ``source`` that ``side`` takes, or
        with its units ``kept``."""
        given = self.state_of(source)
        known: list[int] | None = getattr(source, "total_units", None)  # a supernet knows what it holds
        total = known or self.total_units({name: tensor.shape for name, tensor in given.items()})
        units = self.units(widths)
        for name, tensor in self.state_of(network).items():
            if name.startswith(CONSTANT) and name.removeprefix(CONSTANT) in self.graph.constants:
                continue
            if name not in given:
                raise BcnetError(f"weights_of has no parameter {name!r}: it must be the traced network or its supernet")
            axes = self.coupling.axes.get(name)
            if axes is None:
                tensor.copy_(given[name])
            elif kept is None:
                tensor.copy_(sliced(given[name], axes, units, total, side))
            else:
                tensor.copy_(selected(given[name], axes, kept, total))

    def total_units(self, shapes: Mapping[str, Sequence[int]]) -> list[int]:
        """How many units of each variable a state of these shapes (the original's or a supernet's) holds, from one
        equation per axis, ``constant + sum(repeat * units) = size``; where these leave a choice, the counts of the
        original or of a ``bcv2`` supernet."""
        full = np.array(self.coupling.counts)
        sizes = {(axis.size, shapes[name][dim]): name for name, dim, axis in self._varying_axes() if name in shapes}
        for usual in (full, np.array(self.units(self.max + self.min))):
            if all(size.at(usual) == n for size, n in sizes):
                return [int(n) for n in usual]
        matrix = np.zeros((len(sizes), len(full)))
        for row, (size, _) in zip(matrix, sizes, strict=True):
            for variable, k in size.terms:
                row[variable] = k
        beyond = np.array([n - size.at(full) for size, n in sizes])
        total = np.rint(full + np.linalg.lstsq(matrix, beyond, rcond=None)[0]).astype(np.int64)
        for (size, n), name in sizes.items():
            if size.at(total) != n:
                raise BcnetError(
                    f"the shape of {name!r} in weights_of fits no widths: it must be the traced network or its supernet"
                )
        return [int(n) for n in total]

    def _varying_axes(self) -> Iterator[tuple[str, int, Axis]]:
        """``(name, dimension, axis)`` of every parameter dimension that varies."""
        for name, axes in self.coupling.axes.items():
            yield from ((name, dim, axis) for dim, axis in enumerate(axes) if axis.variables)

    def _own(self, widths: Widths) -> nn.Module:
        return resized(self.model, self.coupling.axes, self._attributes, self.units(widths)).train()

    def _from_graph(self, widths: Widths, graph: Capture | None = None) -> GraphModule:
        units = self.units(widths)
        tensors = empty_state(self.state_of(self.model), self.coupling.axes, units)
        return graph_network(graph or self.graph, self.slots, units, tensors)

    def from_graph(self, widths: Widths, source: nn.Module | None = None, kept: KeptUnits | None = None) -> GraphModule:
        """The captured operators at ``widths`` with the weights of ``source``, else the original's, in evaluation
        mode."""
        network = self._from_graph(widths, self.graph.plain_operators)
        self.copy_weights(network, widths, source or self.model, kept=kept)
        return network.eval()

    def _by_graph(self, widths: Widths) -> Any:
        """The graph's output for the example."""
        try:
            return self.from_graph(widths)(*tensors_in(self.inputs))
        except RuntimeError as error:
            if self._traced_as == _kind_of(self.model):
                raise
            why = first_line(error)
            raise BcnetError(
                f"{type(self.model).__name__} was moved or converted after it was traced, and its graph does not run "
                f"that way ({why:.120}): trace it again as it is now"
            ) from error

    @torch.no_grad()
    def _differs(self, widths: Widths) -> str:
        """Why the user's class and the graph disagree at ``widths``; empty if they agree."""
        if self.graph.numbers:
            return "its forward picks channels by number"
        args, kwargs = self.inputs
        devices = [t.device for t in self.example if t.is_cuda]
        with torch.random.fork_rng(devices=devices), without_autocast():
            torch.manual_seed(0)
            expected = self._by_graph(widths)
            try:
                own = self._own(widths)
                self.copy_weights(own, widths, self.model)
                torch.manual_seed(0)
                found = own.eval()(*args, **kwargs)
                found = self.output(found) if self.graph.adapted else found
                if self._trains_otherwise:
                    own.train()(*args, **kwargs)
            except Exception as error:
                return first_line(error)
        pairs = list(zip(tensors_in(found), tensors_in(expected), strict=False))
        if len(tensors_in(found)) != len(tensors_in(expected)) or not all(
            a.shape == b.shape and torch.allclose(a, b, rtol=1e-3, atol=1e-4) for a, b in pairs
        ):
            return "its output then differs from its graph's"
        return ""
