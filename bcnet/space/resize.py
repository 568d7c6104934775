"""A plain ``nn.Module`` at given widths: the user's own class with resized layers.

Parameters are replaced, and so are the attributes a forward pass reads (``groups``, ``num_features``,
split sizes …). What attributes mean is guessed from their values, so :class:`bcnet.space.NetworkSpace`
checks the result against the rewritten graph and falls back to that graph where they differ.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

from bcnet.space.axis import Axis, Numbers, Size
from bcnet.space.rewrite import Slot
from bcnet.space.state import duplicate, keep_as_buffer, state_of

Axes = Mapping[str, tuple[Axis, ...]]


def sliced(tensor: Tensor, axes: Sequence[Axis], units: Sequence[int], total: Sequence[int], side: str) -> Tensor:
    """The part of a parameter (built for ``total`` units) that ``units`` take: a view if it is one slice."""
    for dim, axis in enumerate(axes):
        if not axis.variables:
            continue
        pieces = axis.pieces(units, total, side)
        if pieces == ((0, tensor.shape[dim]),):
            continue
        parts = [tensor.narrow(dim, start, length) for start, length in pieces]
        tensor = parts[0] if len(parts) == 1 else torch.cat(parts, dim)
    counted = axes[0].numbers if axes else None
    if counted is not None:
        stays = [np.arange(start, start + n) for start, n in counted.axis.pieces(units, total, side)]
        tensor = _renumbered(tensor, np.concatenate(stays))
    return tensor


def block_of(axes: Sequence[Axis], units: Sequence[int], total: Sequence[int], side: str) -> tuple[slice, ...] | None:
    """The index of what :func:`sliced` takes, None where that is not one block of the parameter."""
    if axes and axes[0].numbers is not None:
        return None
    pieces = [axis.pieces(units, total, side) if axis.variables else () for axis in axes]
    if any(len(some) > 1 for some in pieces):
        return None
    return tuple(slice(some[0][0], sum(some[0])) if some else slice(None) for some in pieces)


def _renumbered(numbers: Tensor, stays: np.ndarray) -> Tensor:
    """Indices of channels after only the channels ``stays`` (ascending) are left."""
    return torch.searchsorted(torch.from_numpy(stays).to(numbers.device), numbers.contiguous()).to(numbers.dtype)


def selected(tensor: Tensor, axes: Sequence[Axis], kept: Sequence[np.ndarray], total: Sequence[int]) -> Tensor:
    """The part of a parameter (built for ``total`` units) that belongs to the units ``kept``."""
    for dim, axis in enumerate(axes):
        if axis.variables:
            tensor = tensor.index_select(dim, torch.from_numpy(axis.indices(kept, total)).to(tensor.device))
    counted = axes[0].numbers if axes else None
    return tensor if counted is None else _renumbered(tensor, counted.axis.indices(kept, total))


def shape_at(axes: Sequence[Axis], units: Sequence[int]) -> tuple[int, ...]:
    """The shape of a parameter with these axes at ``units``."""
    return tuple(axis.size.at(units) for axis in axes)


def tiled(tensor: Tensor, axes: Sequence[Axis], units: Sequence[int]) -> Tensor:
    """A tensor of the shape at ``units`` filled with the full one's values, repeated where it grows."""
    if axes and axes[0].numbers is not None:
        grown = [max(n, full) for n, full in zip(units, axes[0].numbers.full, strict=True)]
        return sliced(_grown(tensor, axes[0], axes[0].numbers, grown), axes, units, grown, "left")
    for dim, axis in enumerate(axes):
        if axis.variables:
            n = axis.size.at(units)
            index = torch.arange(n, device=tensor.device) % tensor.shape[dim]
            tensor = tensor.index_select(dim, index)
    return tensor


def _grown(tensor: Tensor, axis: Axis, numbers: Numbers, units: Sequence[int]) -> Tensor:
    """Indices of channels at ``units`` of at least the original's; entries of a new unit index its own channels."""
    full = [np.arange(n) for n in numbers.full]
    segment, unit = axis.places(units).T
    place: dict[tuple[int | None, int], list[int]] = {}
    for number, (s, u) in enumerate(numbers.axis.places(units).tolist()):
        place.setdefault((numbers.axis.segments[s].variable, u), []).append(number)
    found = np.full(len(unit), -1)
    found[axis.indices(full, units)] = numbers.axis.indices(full, units)[tensor.cpu().numpy()]
    for i in np.flatnonzero(found < 0).tolist():
        choices = place[axis.segments[segment[i]].variable, int(unit[i])]
        found[i] = choices[int(((segment[:i] == segment[i]) & (unit[:i] == unit[i])).sum()) % len(choices)]
    return torch.from_numpy(found).to(tensor)


def empty_state(state: Mapping[str, Tensor], axes: Axes, units: Sequence[int]) -> dict[str, Tensor]:
    """Tensors for ``state`` at ``units``, not yet filled; names that share a tensor share the new one, too."""
    new: dict[int, Tensor] = {}
    for name, old in state.items():
        if id(old) not in new:
            shape = shape_at(axes[name], units) if name in axes else old.shape
            empty = torch.empty(shape, dtype=old.dtype, device=old.device)
            new[id(old)] = nn.Parameter(empty, old.requires_grad) if isinstance(old, nn.Parameter) else empty
    return {name: new[id(old)] for name, old in state.items()}


def resized(template: nn.Module, axes: Axes, attributes: Sequence[Attribute], units: Sequence[int]) -> nn.Module:
    """A copy of ``template`` with empty parameters and the attributes of ``units`` (not yet initialised)."""
    network = duplicate(template)
    state = {name: tensor for name, tensor in state_of(network, axes).items() if name in axes}
    for name, tensor in empty_state(state, axes, units).items():
        _replace(network, name, tensor)
    for attribute in attributes:
        attribute.set(network, units)
    for path, module in network.named_modules():
        _set_known_attributes(module, path, axes, units)
    return network


def _replace(network: nn.Module, name: str, tensor: Tensor) -> None:
    if isinstance(tensor, nn.Parameter):
        path, _, leaf = name.rpartition(".")
        network.get_submodule(path)._parameters[leaf] = tensor
    else:
        keep_as_buffer(network, name, tensor)


# Names under which a layer keeps its weight: plain, with weight norm, with spectral norm, old and parametrised.
_WEIGHTS = ("weight", "weight_orig", "weight_v", *(f"parametrizations.weight.original{i}" for i in ("1", "")))


def _set_known_attributes(module: nn.Module, path: str, axes: Axes, units: Sequence[int]) -> None:
    """Sizes that torch's own layers keep as attributes; ``groups`` is among those found by their values."""
    prefix = f"{path}." if path else ""
    shapes = [shape_at(axes[prefix + name], units) for name in _WEIGHTS if prefix + name in axes]
    shape = shapes[0] if shapes else None
    if isinstance(module, _ConvNd) and shape is not None:
        first, second = shape[0], shape[1] * module.groups
        transposed = isinstance(module, _ConvTransposeNd)
        module.out_channels, module.in_channels = (second, first) if transposed else (first, second)
    elif isinstance(module, nn.Linear) and shape is not None:
        module.out_features, module.in_features = shape
    elif isinstance(module, _NormBase):
        known = axes.get(f"{prefix}running_mean") or axes.get(f"{prefix}weight")
        if known is not None:
            module.num_features = shape_at(known, units)[0]
    elif isinstance(module, nn.GroupNorm) and shape is not None:
        module.num_channels = shape[0]
    elif isinstance(module, nn.LayerNorm) and shape is not None:
        module.normalized_shape = shape
    elif isinstance(module, (nn.RNNBase, nn.RNNCellBase)):
        from_input, from_state = list(module.parameters())[:2]
        module.input_size = from_input.shape[1]
        if not getattr(module, "proj_size", 0):  # otherwise the hidden width is fixed
            module.hidden_size = from_state.shape[1]
        if isinstance(module, nn.RNNBase):
            module._init_flat_weights()


@dataclass(frozen=True)
class Attribute:
    """An attribute of a module that holds sizes: ``factor`` times each of ``sizes``."""

    path: str
    name: str
    factor: int
    sizes: tuple[Size, ...]
    listed: bool

    def set(self, network: nn.Module, units: Sequence[int]) -> None:
        module = network.get_submodule(self.path)
        values = [self.factor * size.at(units) for size in self.sizes]
        setattr(module, self.name, type(getattr(module, self.name))(values) if self.listed else values[0])


def find_attributes(template: nn.Module, holes: Sequence[Slot]) -> tuple[Attribute, ...]:
    """Attributes that explain the size constants of the graph: equal to one, or to a small multiple of it, in the
    innermost module around the layer that uses it."""
    found: dict[tuple[str, str], Attribute] = {}
    modules = dict(template.named_modules(remove_duplicate=False))
    for factors in ((1,), (2, 3, 4)):
        for layer, full, sizes in _constants(holes):
            path: str | None = layer if layer in modules else ""
            while path is not None:
                matching = _matching(modules[path], path, full, sizes, factors) if path in modules else []
                for attribute in matching:
                    found.setdefault((attribute.path, attribute.name), attribute)
                path = None if matching or not path else path.rpartition(".")[0]
    return tuple(found.values())


def _constants(holes: Sequence[Slot]) -> list[tuple[str, list[int], list[Size]]]:
    """``(layer, constants, sizes)`` of each list of sizes in the graph, and of each single size."""
    lists: dict[tuple[str, str], list[Slot]] = {}
    found = []
    for slot in holes:
        found.append((slot.layer, [slot.full], [slot.size]))
        if slot.item is not None:
            lists.setdefault((slot.node.name, slot.name), []).append(slot)
    for slots in lists.values():
        whole = slots[0].argument
        if all(isinstance(n, int) for n in whole):
            sizes = {slot.item: slot.size for slot in slots}
            found.append((slots[0].layer, whole, [sizes.get(i, Size(n)) for i, n in enumerate(whole)]))
    return found


def _matching(
    module: nn.Module, path: str, full: list[int], sizes: list[Size], factors: tuple[int, ...]
) -> list[Attribute]:
    """Attributes of a module that are one of ``factors`` times the constants ``full``."""
    found = []
    for name, value in vars(module).items():
        if type(value) in (list, tuple) and list(value) == full and factors == (1,):
            found.append(Attribute(path, name, 1, tuple(sizes), True))
        elif type(value) is int and len(full) == 1 and full[0] > 1 and value in [f * full[0] for f in factors]:
            found.append(Attribute(path, name, value // full[0], tuple(sizes), False))
    return found


@torch.no_grad()
def draw(network: nn.Module, original: Mapping[str, Tensor], axes: Axes, units: Sequence[int]) -> None:
    """Fresh weights as the user's own layers draw them (``reset_parameters``); what no layer draws
    (a bare parameter such as layer scale) takes the original's values."""
    for name, tensor in [*network.named_parameters(), *network.named_buffers()]:
        if name in original:
            values = tiled(original[name], axes[name], units) if name in axes else original[name]
            tensor.copy_(values)
    for path, module in network.named_modules():
        reset: Callable[[], Any] | None = getattr(module, "reset_parameters", None)
        if callable(reset) and not hasattr(module, "parametrizations"):
            try:
                reset()
            except Exception as error:
                warnings.warn(f"{path} cannot draw weights itself ({error}), so it keeps the original's", stacklevel=3)
