"""Load stored weights into a network: exactly its names, shapes and types, and only finite numbers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from bcnet.errors import BcnetError


def load_into(network: nn.Module, tensors: Mapping[str, Tensor], file: Path) -> None:
    """Load the weights that ``file`` held into ``network``, or say what does not fit."""
    state = network.state_dict()
    names = [*(n for n in state if n not in tensors), *(n for n in tensors if n not in state)]
    if names:
        where = "the file" if names[0] in state else "the network"
        raise BcnetError(f"{file} does not fit its network: {names[0]!r} is missing in {where}")
    for name, expected in state.items():
        found = tensors[name]
        if found.shape != expected.shape:
            raise BcnetError(
                f"{file} does not fit its network: {name!r} is {tuple(found.shape)} in the file, "
                f"but {tuple(expected.shape)} in the network"
            )
        if found.dtype != expected.dtype:
            raise BcnetError(
                f"{file} does not fit its network: {name!r} is of {_kind(found)} in the file, "
                f"but of {_kind(expected)} in the network"
            )
        if not finite(found):
            raise BcnetError(f"{file} holds weights that are infinite or NaN: {name!r} has some")
    network.load_state_dict(dict(tensors), strict=True)


def finite(tensor: Tensor) -> bool:
    return not tensor.is_floating_point() or bool(torch.isfinite(tensor).all())


def _kind(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
