"""Weights that make up for dropped channels, by least squares: what a layer read of them is read from those that stay.

A layer that reads channels ``x`` computes ``W x``. Where only the channels ``K`` stay, the dropped ones are predicted
from them, ``x_D ~ A x_K + b``, and the layer goes on with ``W_K + W_D A`` and, if it has a bias, with ``W_D b`` more of
it (otherwise a norm that follows takes the constant up, once its statistics are recalibrated). ``A`` needs only the
covariances of channels in the given network, which one pass over some batches measures for any widths to come.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from numpy.typing import ArrayLike
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from bcnet.errors import BcnetError
from bcnet.space.importance import Keep, Kept, kept_units
from bcnet.space.network import NetworkSpace

RIDGE = 1e-2
"""Of the mean variance of a layer's channels, added to each: keeps ``A`` small where channels say the same."""
WIDEST = 4096
"""Layers that read more are left as they are: their covariances would be larger than the network."""


class _Moments:
    """Sums over all positions of all images of what a layer reads: count, channels (C,), products (C, C)."""

    def __init__(self, channels: int, device: torch.device):
        self.count = 0
        self.sum = torch.zeros(channels, dtype=torch.float64, device=device)
        self.products = torch.zeros(channels, channels, dtype=torch.float64, device=device)

    def add(self, x: Tensor) -> None:
        """Positions ``x`` (n, C)."""
        rows = x.double()
        self.count += len(rows)
        self.sum += rows.sum(0)
        self.products += rows.T @ rows

    def predict(self, kept: Tensor, dropped: Tensor) -> tuple[Tensor, Tensor]:
        """``A`` (D, K) and ``b`` (D,) of the least squares ``x_D ~ A x_K + b``."""
        mean = self.sum / self.count
        covariance = self.products / self.count - torch.outer(mean, mean)
        among = covariance[kept][:, kept]
        ridge = RIDGE * among.diagonal().mean().clamp_min(torch.finfo(torch.float32).tiny)
        among.diagonal().add_(ridge)
        a = torch.linalg.solve(among, covariance[kept][:, dropped]).T
        return a, mean[dropped] - a @ mean[kept]


class Reconstruction:
    """What the layers of ``network`` read, measured on ``batches`` of ``(x, y)``, to make up for any cut of it.

    Convolutions without groups and linear layers are adjusted, as far as they are modules with weights of their own;
    everything else is cut as it is. Evaluation mode is used meanwhile, and the network is left as it was.
    """

    def __init__(self, space: NetworkSpace, network: nn.Module, batches: Iterable[tuple[Tensor, Any]]):
        self.space, self.network = space, network
        self._moments = {name: _Moments(n, device) for name, n, device in self._readers()}
        self._measure(batches)

    def source(self, kept: Kept) -> nn.Module:
        """A copy of the network whose layers read only the units ``kept`` of every variable: what
        ``space.build(widths, weights_of=..., keep=kept)`` is given."""
        network = copy.deepcopy(self.network)
        total = [v.count for v in self.space.coupling.variables]
        for name, moments in self._moments.items():
            axis = self.space.coupling.axes[f"{name}.weight"][1]
            stay = axis.indices(kept, total)
            if 0 < len(stay) < len(moments.sum):
                layer = network.get_submodule(name)
                assert isinstance(layer, nn.Linear | _ConvNd)
                _adjust(layer, moments, torch.from_numpy(stay).to(moments.sum.device))
        return network

    def _readers(self) -> Iterable[tuple[str, int, torch.device]]:
        """Layers that read channels which vary: name, channels, device."""
        layers = {n: m for n, m in self.network.named_modules() if isinstance(m, nn.Linear | _ConvNd)}
        uses = Counter(id(layer.weight) for layer in layers.values())
        for name, layer in layers.items():
            weight, axes = layer.weight, self.space.coupling.axes.get(f"{name}.weight")
            mixed = isinstance(layer, _ConvNd) and (layer.transposed or layer.groups > 1)
            if axes is None or not axes[1].variables or mixed or uses[id(weight)] > 1 or weight.shape[1] > WIDEST:
                continue
            yield name, weight.shape[1], weight.device

    @torch.no_grad()
    def _measure(self, batches: Iterable[tuple[Tensor, Any]]) -> None:
        modes = {module: module.training for module in self.network.modules()}
        hooks = [
            self.network.get_submodule(name).register_forward_pre_hook(partial(_read, moments))
            for name, moments in self._moments.items()
        ]
        seen = 0
        try:
            self.network.eval()
            for x, _ in batches:
                self.network(x)
                seen += 1
        finally:
            for hook in hooks:
                hook.remove()
            for module, mode in modes.items():
                module.training = mode
        if not seen:
            raise BcnetError("dropped channels are made up for by what layers read: give at least one batch")
        self._moments = {name: m for name, m in self._moments.items() if m.count}


def inherited(
    space: NetworkSpace, network: nn.Module, widths: ArrayLike, keep: Keep, reconstruction: Reconstruction | None = None
) -> nn.Module:
    """The network at ``widths`` (L,) with the channels of ``network`` that ``keep`` says, dropped ones made up for."""
    kept = kept_units(space, space.units(space.check(widths)), keep, network)
    return space.build(widths, weights_of=reconstruction.source(kept) if reconstruction else network, keep=kept)


def _read(moments: _Moments, layer: nn.Module, inputs: tuple[Tensor, ...]) -> None:
    x = inputs[0] if isinstance(layer, nn.Linear) else inputs[0].movedim(1, -1)
    moments.add(x.reshape(-1, x.shape[-1]))


@torch.no_grad()
def _adjust(layer: nn.Linear | _ConvNd, moments: _Moments, stay: Tensor) -> None:
    """Let ``layer`` read the channels ``stay`` in the place of all."""
    mask = torch.ones_like(moments.sum, dtype=torch.bool)
    mask[stay] = False
    gone = mask.nonzero().flatten()
    a, b = moments.predict(stay, gone)
    weight = layer.weight.double()
    lost = weight[:, gone]
    layer.weight[:, stay] += torch.einsum("od...,dk->ok...", lost, a).to(layer.weight.dtype)
    if layer.bias is not None:
        # A convolution reads zeros beyond the border, where this is a little too much.
        layer.bias += (lost.flatten(2).sum(2) if lost.dim() > 2 else lost).mv(b).to(layer.bias.dtype)
