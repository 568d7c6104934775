"""Several devices: every process trains its share of a batch on the same paths, as one process would.

Accelerate starts the processes and reduces gradients. Batch norm must see the whole batch for the result to
match one process; torch's own SyncBatchNorm runs on GPUs only, so the few lines that synchronise statistics
are here, on collectives that autograd knows.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from bcnet.errors import BcnetError


def world() -> tuple[int, int]:
    """(rank, number of processes)."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


def start() -> Any:
    """An ``accelerate.Accelerator`` where this process was launched as one of several, else None."""
    import os

    if int(os.environ.get("WORLD_SIZE", "1")) < 2:
        return None
    try:
        from accelerate import Accelerator
    except ImportError:
        raise BcnetError("training with several processes needs accelerate: pip install accelerate") from None
    return Accelerator(cpu=not torch.cuda.is_available())


class _Sum(torch.autograd.Function):
    """The sum of a tensor over all processes; so is its gradient's."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        total = x.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        total = gradient.clone()
        dist.all_reduce(total)
        return total


def batch_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor | None,
    var: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
    cudnn: bool,
) -> Tensor:
    """``aten.batch_norm`` whose batch is the batch of all processes together, where there are several."""
    if not training or world()[1] == 1:
        return torch.ops.aten.batch_norm.default(x, weight, bias, mean, var, training, momentum, eps, cudnn)
    axes = [0, *range(2, x.dim())]
    data = x.float()
    count = torch.full((1,), float(x.numel() // x.shape[1]), device=x.device)
    sums: Tensor = _Sum.apply(torch.cat([data.sum(axes), data.square().sum(axes), count]))
    n = x.shape[1]
    average = sums[:n] / sums[-1]
    variance = (sums[n : 2 * n] / sums[-1] - average.square()).clamp_min(0)
    if mean is not None and var is not None:
        with torch.no_grad():
            mean.lerp_(average.to(mean.dtype), momentum)
            var.lerp_((variance * sums[-1] / (sums[-1] - 1)).to(var.dtype), momentum)
    shape = [1, n] + [1] * (x.dim() - 2)
    scale = (variance + eps).rsqrt() * (1.0 if weight is None else weight.float())
    shift = -average * scale + (0.0 if bias is None else bias.float())
    return (data * scale.view(shape) + shift.view(shape)).to(x.dtype)


@torch.no_grad()
def share_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Replace every gradient by its mean over all processes, as one message."""
    size = world()[1]
    gradients = [p.grad for p in parameters if p.grad is not None]
    if size == 1 or not gradients:
        return
    flat = torch.cat([g.reshape(-1) for g in gradients])
    dist.all_reduce(flat)
    flat /= size
    offset = 0
    for gradient in gradients:
        gradient.copy_(flat[offset : offset + gradient.numel()].view_as(gradient))
        offset += gradient.numel()


@torch.no_grad()
def same_start(network: nn.Module) -> None:
    """Give every process the weights of the first."""
    if world()[1] > 1:
        for tensor in [*network.parameters(), *network.buffers()]:
            dist.broadcast(tensor, 0)
