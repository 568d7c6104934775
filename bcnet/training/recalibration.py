"""Batch-norm statistics of a network whose channels were cut: taken anew from some training batches."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from bcnet.errors import BcnetError


@torch.no_grad()
def recalibrate(network: nn.Module, batches: Iterable[tuple[Tensor, Any]], *, bf16: bool = False) -> int:
    """Forget the running statistics of every batch norm and take the plain average over ``batches``.

    Weights, modes and momenta stay as they are, and dropout is off meanwhile. Returns how many batch norms there are;
    where there are none, nothing is run.
    """
    norms = [m for m in network.modules() if isinstance(m, _BatchNorm) and m.track_running_stats]
    if not norms:
        return 0
    device = next(network.parameters()).device
    modes = {module: module.training for module in network.modules()}
    momenta = [norm.momentum for norm in norms]
    given = iter(batches)
    first = next(given, None)
    if first is None:
        raise BcnetError("batch norm cannot be recalibrated without a batch: give some training batches")
    try:
        network.eval()
        for norm in norms:
            norm.reset_running_stats()
            norm.momentum = None  # a cumulative average, every batch with the same weight
            norm.training = True
        for x, _ in chain([first], given):
            with torch.autocast(device.type, torch.bfloat16, enabled=bf16):
                network(x.to(device))
    finally:
        for norm, momentum in zip(norms, momenta, strict=True):
            norm.momentum = momentum
        for module, mode in modes.items():
            module.training = mode
    return len(norms)
