"""Whether batches fit into main memory, checked before anything is trained: a system that runs out of it kills the
program without a word. A GPU reports it, and batches are then run in parts."""

from __future__ import annotations

import math
from pathlib import Path

import torch
from torch import Tensor, nn

from bcnet.errors import BcnetError
from bcnet.search.constraints import format_cost

MEMINFO = Path("/proc/meminfo")
BACKWARD = 3
"""Copies of the largest activation that a step holds besides what is kept for the backward pass, as measured."""


def check_batch(model: nn.Module, batch: Tensor, training: bool) -> None:
    """Raise a :class:`BcnetError` if ``model`` needs more memory for ``batch`` (n, ...) than is free."""
    free = free_memory()
    if free is None or batch.device.type != "cpu" or len(batch) <= 2:
        return
    each = _bytes(model, batch[:2].clone(), training) / 2  # a view would count as the whole batch
    if each * len(batch) > free:
        fits = max(1, 2 ** int(math.log2(max(1.0, free / each))))
        kind, key = ("training step", "batch_size") if training else ("look", "eval_batch_size")
        raise BcnetError(
            f"a {kind} at {len(batch):,} inputs of shape {tuple(batch.shape[1:])} takes about "
            f"{format_cost('memory', each * len(batch))} of memory, and {format_cost('memory', free)} are free: take "
            f"batches of {fits:,} (loading.{key}), or smaller images"
        )


def free_memory() -> int | None:
    """Bytes that are still available, swap included; None if the system does not say."""
    try:
        lines = MEMINFO.read_text().splitlines()
        found = {key: int(rest.split()[0]) for key, _, rest in (line.partition(":") for line in lines) if rest}
        return 1024 * (found["MemAvailable"] + found["SwapFree"])
    except (OSError, ValueError, LookupError):
        return None


def _bytes(model: nn.Module, x: Tensor, training: bool) -> int:
    """The bytes that a pass of ``model`` over ``x`` holds at the same time, without the weights."""
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        answer = model.eval()(x)  # in evaluation mode running statistics do not change
    del answer
    most = max(kept.values(), default=0)
    return (sum(kept.values()) if training else 0) + BACKWARD * most
