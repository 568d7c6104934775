"""The self-check at the end of tracing: a random network of the space is built, run and counted.

What tracing found is held against torch itself, layer by layer: the shapes of a network at random widths, on two
batch sizes; its FLOPs by torch's own counter; and the weights that a supernet's path and a plain network take.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Mapping
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, fx
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from bcnet.errors import BcnetError
from bcnet.space.capture import one_more, tensors_in
from bcnet.space.counting import products
from bcnet.space.operators.table import name_of
from bcnet.space.resize import shape_at, sliced
from bcnet.space.walk import layer_of

if TYPE_CHECKING:
    from bcnet.space.network import NetworkSpace

_WAY_OUT = "trace(..., check=False) leaves this check out, and ignore=[...] keeps the layer at its width"


def self_check(space: NetworkSpace) -> None:
    """A :class:`BcnetError` that names the layer where a random network of ``space`` is not as tracing says."""
    widths = space.sample(np.random.default_rng(0))[0]
    units = space.units(widths)
    _check_slices(space, units)
    network: Any = space.from_graph(widths)
    nodes = {node.name: node for node in space.graph.graph.nodes}
    modes = sdpa_kernel(SDPBackend.MATH), torch.no_grad()  # attention as products, which torch's counter knows
    with modes[0], modes[1], FlopCounterMode(display=False) as counter:
        _Inspector(network, nodes, space, units, counter).run(*tensors_in(space.inputs))
        if space.graph.dynamic:
            _Inspector(network, nodes, space, None, counter).run(*tensors_in(one_more(space.inputs)))


def _check_slices(space: NetworkSpace, units: list[int]) -> None:
    """A path of a supernet and the plain network of its widths take the same part of every weight."""
    axes = space.coupling.axes
    totals = space.units(space.max + space.min)
    solved = space.total_units({name: shape_at(row, totals) for name, row in axes.items()})
    for name, row in axes.items():
        held = torch.arange(prod(shape_at(row, totals))).reshape(shape_at(row, totals))
        path, plain = (sliced(held, row, units, total, "right") for total in (totals, solved))
        if not torch.equal(path, plain) or path.shape != shape_at(row, units):
            raise BcnetError(
                f"{name}: a path of a supernet takes other weights than the plain network of its widths; {_WAY_OUT}"
            )


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
            cause = (str(error).splitlines() or [type(error).__name__])[0]
            sizes = "other widths" if self.units else f"a batch of {self.space.graph.batch + 1}"
            raise BcnetError(f"{_place(node or n)} does not run at {sizes}: {cause}; {_WAY_OUT}") from error
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
        if counted and counted != said:
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
