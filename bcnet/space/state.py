"""The state of a network: its parameters, its buffers, and the tensors that its modules keep as plain attributes."""

from __future__ import annotations

import copy
from collections.abc import Iterable

import torch
from torch import Tensor, nn

_PARALLEL = nn.DataParallel, nn.parallel.DistributedDataParallel


def state_of(network: nn.Module, plain: Iterable[str] = ()) -> dict[str, Tensor]:
    """Parameters and buffers by name, and the tensors called ``plain`` where they are attributes."""
    found: dict[str, Tensor] = dict(network.named_parameters(remove_duplicate=False))
    found |= network.named_buffers(remove_duplicate=False)
    for name in plain:
        if name not in found:
            path, _, leaf = name.rpartition(".")
            found[name] = getattr(network.get_submodule(path), leaf)
    return found


def plain_tensors(network: nn.Module) -> dict[str, Tensor]:
    """Tensors that modules keep as attributes and did not compute, by name."""
    return {
        f"{path}.{leaf}".lstrip("."): value
        for path, module in network.named_modules()
        if not isinstance(module, torch.jit.ScriptModule)
        for leaf, value in vars(module).items()
        if isinstance(value, Tensor) and value.dim() and value.is_leaf and not value.requires_grad
    }


def keep_as_buffer(network: nn.Module, name: str, tensor: Tensor) -> None:
    """Set the buffer ``name`` to ``tensor``; it replaces a plain attribute of that name, and is saved with the weights,
    as what it holds depends on the widths."""
    path, _, leaf = name.rpartition(".")
    module = network.get_submodule(path)
    vars(module).pop(leaf, None)
    module._buffers[leaf] = tensor
    module._non_persistent_buffers_set.discard(leaf)


def unwrapped(model: nn.Module) -> nn.Module:
    """The network within ``torch.compile``, ``DataParallel`` or ``DistributedDataParallel``, which compute the same."""
    within = model.module if isinstance(model, _PARALLEL) else getattr(model, "_orig_mod", None)
    return unwrapped(within) if isinstance(within, nn.Module) else model


def duplicate(model: nn.Module) -> nn.Module:
    """A copy of a model, even of one that keeps computed tensors (as old-style weight norm does)."""
    kept = [value for module in model.modules() for value in vars(module).values()]
    memo = {id(t): t.detach().clone() for t in kept if isinstance(t, Tensor) and not t.is_leaf}
    return copy.deepcopy(model, memo)
