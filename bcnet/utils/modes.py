"""Evaluation mode that is borrowed: afterwards every module is in the mode it was in."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn


@contextmanager
def evaluation_mode(network: nn.Module) -> Iterator[None]:
    """``network`` in evaluation mode; afterwards each of its modules is back in its own mode."""
    modes = {module: module.training for module in network.modules()}
    network.eval()
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode
