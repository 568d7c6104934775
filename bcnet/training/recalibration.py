"""Batch-norm statistics of a network whose channels were cut: taken anew from some training batches."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import chain
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from bcnet.errors import BcnetError
from bcnet.utils.modes import evaluation_mode


@torch.no_grad()
def recalibrate(network: nn.Module, batches: Iterable[tuple[Tensor, Any]], *, bf16: bool = False) -> int:
    """Replace the running statistics of every batch norm by their plain average over ``batches``.

    Weights and modes stay as they are, and dropout is off meanwhile. Returns how many batch norms took statistics;
    where a network has none, no batch is asked for.
    """
    if not any(name.rpartition(".")[2] == "running_mean" for name, _ in network.named_buffers()):
        return 0
    device = next(network.parameters()).device
    given = iter(batches)
    first = next(given, None)
    if first is None:
        raise BcnetError("batch norm cannot be recalibrated without a batch: give some training batches")
    averaging = _Averaging()
    with evaluation_mode(network):
        for x, _ in chain([first], given):
            averaging.batches += 1
            with averaging, torch.autocast(device.type, torch.bfloat16, enabled=bf16):
                network(x.to(device))
    for name, buffer in network.named_buffers():
        if name.rpartition(".")[2] == "num_batches_tracked":
            buffer.fill_(averaging.batches)
    return len(averaging.seen)


class _Averaging(TorchFunctionMode):
    """Batch norms, a layer's or a graph's, take the statistics of the batch and average them with those before."""

    def __init__(self) -> None:
        super().__init__()
        self.batches = 0
        self.seen: set[int] = set()

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        names = _ARGUMENTS.get(func)
        given = {**dict(zip(names or (), args, strict=False)), **(kwargs or {})}
        if names is None or given.get("running_mean") is None:
            return func(*args, **(kwargs or {}))
        self.seen.add(id(given["running_mean"]))
        return func(**given | {"training": True, "momentum": 1 / self.batches})


_LAYER = ("input", "running_mean", "running_var", "weight", "bias", "training", "momentum", "eps")
_OPERATOR = ("input", "weight", "bias", "running_mean", "running_var", "training", "momentum", "eps", "cudnn_enabled")
_ARGUMENTS: dict[Any, tuple[str, ...]] = {
    F.batch_norm: _LAYER,
    torch.batch_norm: _OPERATOR,
    torch.ops.aten.batch_norm.default: _OPERATOR,
}
