"""What holds for every traced network: counts, builds, slices and paths of a supernet. Shared by several tests."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.flop_counter import FlopCounterMode

from bcnet.space.network import NetworkSpace
from bcnet.space.widths import Side, Widths
from bcnet.supernet.supernet import Supernet

SIDES: tuple[Side, ...] = ("left", "right")


def some_widths(space: NetworkSpace, seed: int = 0) -> list[Widths]:
    return [space.min, space.sample(np.random.default_rng(seed))[0], space.max]


def tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def call(network: nn.Module, space: NetworkSpace, batch: int | None = None) -> list[Tensor]:
    """The outputs of a network on the first ``batch`` of the space's example inputs."""
    given = space.inputs if batch is None else tree_map(lambda t: t[:batch], space.inputs)
    return tensors(space.output(network(*given[0], **given[1])))


def close(found: list[Tensor], wanted: list[Tensor]) -> None:
    assert len(found) == len(wanted) > 0
    for a, b in zip(found, wanted, strict=True):
        scale = float(b.detach().abs().max()) + 1e-12
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-9 * scale)


@torch.no_grad()
def zeroed(model: nn.Module, space: NetworkSpace, widths: Widths, side: Side) -> nn.Module:
    """The original with all that belongs to dropped channels set to zero."""
    network = copy.deepcopy(model)
    full, units = space.units(space.max), space.units(widths)
    for name, tensor in network.named_parameters():
        for dim, axis in enumerate(space.coupling.axes.get(name, ())):
            dropped = torch.ones(tensor.shape[dim], dtype=torch.bool)
            for start, length in axis.pieces(units, full, side):
                dropped[start : start + length] = False
            tensor.index_fill_(dim, dropped.nonzero()[:, 0], 0.0)
    return network.eval()


@torch.no_grad()
def counted(network: nn.Module, space: NetworkSpace) -> int:
    """Multiply-accumulates of one input by torch's counter."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        counter = FlopCounterMode(display=False)
        with counter, sdpa_kernel(SDPBackend.MATH), torch.backends.mkldnn.flags(enabled=False):
            call(network, space, 1)
    return int(counter.get_total_flops()) // 2


def assert_weights_are_drawn(space: NetworkSpace, widths: Widths) -> None:
    """A fresh network holds nothing that happened to lie in memory."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)  # torch.empty then gives NaN
    try:
        network = space.build(widths)
    finally:
        torch.use_deterministic_algorithms(before)
    assert [name for name, tensor in network.state_dict().items() if tensor.isnan().any()] == []


def assert_counts(space: NetworkSpace, all_widths: list[Widths]) -> None:
    for widths in all_widths:
        network = space.build(widths).eval()
        assert space.costs["flops"](widths)[0] == counted(network, space)
        assert space.costs["params"](widths)[0] == sum(p.numel() for p in network.parameters())


def assert_full_width_is_the_original(model: nn.Module, space: NetworkSpace) -> None:
    close(call(space.build(space.max, weights_of=model).eval(), space), call(model.eval(), space))


def assert_slices_are_zeros(model: nn.Module, space: NetworkSpace, all_widths: list[Widths]) -> None:
    for widths in all_widths:
        for side in SIDES:
            sliced = space.build(widths, weights_of=model, side=side).eval()
            close(call(sliced, space), call(zeroed(model, space, widths, side), space))


def assert_paths_are_builds(space: NetworkSpace, all_widths: list[Widths]) -> None:
    """Every path of a supernet, in training mode, is the plain network of its widths, side and weights."""
    net = Supernet(space)
    args, kwargs = space.inputs
    given = kwargs or (args[0] if len(args) == 1 else args)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.add_(0.1 * torch.rand_like(parameter))
        for widths in all_widths:
            for side in net.sides:
                plain = space.build(widths, weights_of=net, side=side)
                close(tensors(net(given, widths, side)), call(plain, space))
