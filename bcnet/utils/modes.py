"""Modes that are borrowed: afterwards every module, and torch itself, is in the mode it was in."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
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


@contextmanager
def quiet(level: int, *loggers: str) -> Iterator[None]:
    """No warnings, and nothing below ``level`` from these loggers."""
    levels = {logger: logger.level for logger in map(logging.getLogger, loggers)}
    for logger in levels:
        logger.setLevel(level)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, own in levels.items():
            logger.setLevel(own)


@contextmanager
def training_possible() -> Iterator[None]:
    """Gradients are recorded and nothing is cast, whatever blocks of ``no_grad``, ``inference_mode`` or ``autocast``
    the caller is in.

    Works as a decorator, too.
    """
    import torch

    with ExitStack() as stack, torch.inference_mode(False), torch.enable_grad():
        for kind in ("cpu", "cuda"):
            if torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        yield
