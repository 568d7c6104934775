"""The self-check at the end of tracing: a random network of the space is built, run and counted.

What tracing found is held against torch itself, layer by layer: the shapes of a network at random widths, on two
batch sizes; its FLOPs by torch's own counter; the weights that a supernet's path and a plain network take, and what
both answer.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Mapping
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, fx, nn
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from bcnet.errors import BcnetError, first_line
from bcnet.space.axis import Axis
from bcnet.space.capture import one_more
from bcnet.space.counting import products
from bcnet.space.learning import alike
from bcnet.space.operators.table import name_of
from bcnet.space.resize import shape_at, sliced, tiled
from bcnet.space.rewrite import graph_network, put
from bcnet.space.torch_export import tensors_in
from bcnet.space.walk import layer_of

if TYPE_CHECKING:
    from bcnet.space.network import NetworkSpace

_WAY_OUT = "trace(..., check=False) leaves this check out, and ignore=[...] keeps the layer at its width"


def self_check(space: NetworkSpace) -> None:
    """Raise a :class:`BcnetError` that names the layer where a random network of ``space`` is not as traced."""
    widths = space.sample(np.random.default_rng(0))[0]
    units, totals = space.units(widths), space.units(space.max + space.min)
    held, views = _supernet(space, units, totals)
    kept = [np.arange(total - n, total) for n, total in zip(units, totals, strict=True)]
    network = space.from_graph(widths, held, kept)
    nodes = {node.name: node for node in space.graph.graph.nodes}
    modes = sdpa_kernel(SDPBackend.MATH), torch.no_grad()  # attention as products, which torch's counter knows
    with modes[0], modes[1]:
        with FlopCounterMode(display=False) as counter:
            plain = _answers(_Inspector(network, nodes, space, units, counter).run, space)
            if space.graph.dynamic:
                _Inspector(network, nodes, space, None, counter).run(*tensors_in(one_more(space.inputs)))
        path = _answers(lambda *x: functional_call(network, views, x, tie_weights=False), space)
        if not all(alike(a, b) for a, b in zip(path, plain, strict=True)):
            raise BcnetError(
                f"{_first_difference(space, network, units, views)}: a path of a supernet answers otherwise than the "
                f"plain network of its widths; {_WAY_OUT}"
            )
        if space.graph.functions:
            _check_functions(space, units, views)


def _check_functions(space: NetworkSpace, units: list[int], views: Mapping[str, Tensor]) -> None:
    """Functions with gradients of their own must run at other widths."""
    try:
        _answers(graph_network(space.graph, space.slots, units, views).eval(), space)
    except Exception as error:
        names = ", ".join(dict.fromkeys(call.function.__name__ for call in space.graph.functions))
        raise BcnetError(
            f"{names} of {type(space.model).__name__} does not run at other widths: {first_line(error)}; give a "
            f"torch.autograd.Function no sizes; {_WAY_OUT}"
        ) from error


@torch.no_grad()
def _supernet(space: NetworkSpace, units: list[int], totals: list[int]) -> tuple[nn.Module, dict[str, Tensor]]:
    """What a supernet holds, and the views of it that the right path of ``units`` takes: those of a plain network."""
    axes, held, views = space.coupling.axes, nn.Module(), {}
    solved = space.total_units({name: shape_at(row, totals) for name, row in axes.items()})
    for name, tensor in space.state_of(space.model).items():
        whole = tiled(tensor.detach(), axes[name], totals) if name in axes else tensor.detach().clone()
        put(held, name, whole)
        views[name] = sliced(whole, axes[name], units, totals, "right") if name in axes else whole
        if name in axes and not _same_part(views[name], whole, axes[name], units, (totals, solved)):
            raise BcnetError(
                f"{name}: a path of a supernet takes other weights than the plain network of its widths; {_WAY_OUT}"
            )
    return held, views


def _same_part(
    view: Tensor, whole: Tensor, axes: tuple[Axis, ...], units: list[int], totals: tuple[list[int], list[int]]
) -> bool:
    """Whether a view is as large as its widths say, and both accounts of what a supernet holds give the same."""
    if totals[0] != totals[1]:
        numbers = torch.arange(whole.numel()).reshape(whole.shape)
        path, plain = (sliced(numbers, axes, units, total, "right") for total in totals)
        if not torch.equal(path, plain):
            return False
    return view.shape == shape_at(axes, units)


def _answers(run: Callable[..., Any], space: NetworkSpace) -> list[Tensor]:
    """The outputs of a network for the example, with the same random numbers each time."""
    with torch.random.fork_rng(devices=[t.device for t in space.example if t.is_cuda]):
        torch.manual_seed(0)
        return tensors_in(run(*tensors_in(space.inputs)))


def _first_difference(space: NetworkSpace, plain: fx.GraphModule, units: list[int], views: Mapping[str, Tensor]) -> str:
    """Where the plain network and the path of a supernet begin to differ."""
    path = graph_network(space.graph, space.slots, units, views).eval()
    steps = [_Recorder(network) for network in (path, plain)]
    for step in steps:
        _answers(step.run, space)
    first = next((name for name, found in steps[0].results.items() if not alike(found, steps[1].results[name])), "")
    node = next((n for n in space.graph.graph.nodes if n.name == first), None)
    return _place(node) if node is not None else type(space.model).__name__


class _Recorder(fx.Interpreter):
    """Runs a network node by node and keeps the first tensor of every result, by the node."""

    def __init__(self, network: fx.GraphModule):
        super().__init__(network)
        self.extra_traceback = False
        self.results: dict[str, Tensor] = {}

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        found = tensors_in(result)
        if "captured" in n.meta and found:
            self.results[n.meta["captured"]] = found[0].clone()
        return result


class _Inspector(fx.Interpreter):
    """Runs a network node by node; where ``units`` are given, its shapes and FLOPs must be those of the space."""

    def __init__(
        self,
        network: fx.GraphModule,
        nodes: Mapping[str, fx.Node],
        space: NetworkSpace,
        units: list[int] | None,
        counter: FlopCounterMode,
    ):
        super().__init__(network)
        self.extra_traceback = False
        self.nodes, self.space, self.units, self.counter = nodes, space, units, counter

    def run_node(self, n: fx.Node) -> Any:
        node = self.nodes.get(n.meta.get("captured", ""))
        before = self.counter.get_total_flops()
        try:
            with _plain_kernels(n):
                result = super().run_node(n)
        except Exception as error:
            sizes = "other widths" if self.units else f"a batch of {self.space.graph.batch + 1}"
            raise BcnetError(f"{_place(node or n)} does not run at {sizes}: {first_line(error)}; {_WAY_OUT}") from error
        if node is not None and self.units is not None and node.op == "call_function":
            self._check_shapes(node, result)
            self._check_flops(node, (self.counter.get_total_flops() - before) // 2)
        return result

    def _check_shapes(self, node: fx.Node, result: Any) -> None:
        said = self.space.coupling.sizes.get(node.name, ())
        for sizes, tensor, val in zip(said, tensors_in(result), tensors_in(node.meta.get("val")), strict=False):
            expected = tuple(size.at(self.units or []) for size in sizes)
            if expected != tuple(tensor.shape) and not _depends_on_data(val):
                raise BcnetError(
                    f"{_place(node)} gives shape {tuple(tensor.shape)} at other widths, but {expected} was expected; "
                    f"{_WAY_OUT}"
                )

    def _check_flops(self, node: fx.Node, counted: int) -> None:
        rows = products(node, self.space.coupling)
        said = sum(prod(size.at(self.units or []) for size in row) for row in rows)
        if any(_depends_on_data(v) for n in node.all_input_nodes for v in tensors_in(n.meta.get("val"))):
            if said:
                warnings.warn(
                    f"{_place(node)} works on as many rows as the values of its input say, and its FLOPs are counted "
                    "for one; to leave that part out trace a module that wraps the network",
                    stacklevel=2,
                )
        elif counted and counted != said:
            raise BcnetError(
                f"{_place(node)} has {counted:,} FLOPs by torch's counter, but the space says {said:,}; say what it "
                f'multiplies with bcnet.space.register("{name_of(node.target)}", couple=..., macs=...)'
            )


def _place(node: fx.Node) -> str:
    return f"{layer_of(node) or node.name} ({name_of(node.target)})"


def _depends_on_data(val: Tensor) -> bool:
    sizes: list[Any] = list(val.shape)
    return any(isinstance(n, torch.SymInt) and n.node.hint is None for n in sizes)


@contextlib.contextmanager
def _plain_kernels(node: fx.Node) -> Iterator[None]:
    """Recurrent layers as products, which torch's counter knows, and not as one kernel of oneDNN."""
    if not name_of(node.target).startswith(("aten::lstm", "aten::gru", "aten::rnn")):
        yield
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # setting the flag reads others that warn
        with torch.backends.mkldnn.flags(enabled=False):
            yield
