"""Several devices: every process trains its share of a batch on the same paths, as one process would.

Processes are launched by ``accelerate launch`` or ``torchrun``; Accelerate gives each its place and its device, and
carries the messages. All processes draw the same paths. Gradients and losses are averaged, and batch norm sees the
batch of all processes together; otherwise the result would differ from that of a single process. (torch's own
SyncBatchNorm runs on GPUs only and is a module; a path needs a function.)
"""

from __future__ import annotations

import atexit
import inspect
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from bcnet.errors import BcnetError
from bcnet.space.widths import Floats

T = TypeVar("T")
PATIENCE = timedelta(seconds=20)
"""How long processes wait for each other before they leave."""
LONGEST = timedelta(days=20)
"""How long they wait for each other's messages while one works alone: torch's default of half an hour is too short. A
process that has died is noticed by its connection. More milliseconds than fit into 31 bits are not safe in gloo."""
LOST = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "Socket closed")
"""What gloo says when another process has ended."""


@dataclass(frozen=True)
class Place:
    """Which of how many processes this one is, and the device it works on."""

    rank: int
    world: int
    device: torch.device

    @property
    def shard(self) -> tuple[int, int]:
        """What :func:`bcnet.data.load_data` takes."""
        return self.rank, self.world


def start(cpu: bool = False) -> Place:
    """Join the processes that this one was launched with, if any.

    Call it before loading data. The device is this process's GPU, or the CPU if there is none or ``cpu`` asks for it.
    """
    here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    on_cpu = cpu or not torch.cuda.is_available()
    if int(os.environ.get("WORLD_SIZE", "1")) < 2:
        return Place(0, 1, torch.device("cpu" if on_cpu else "cuda"))
    if not on_cpu and here > torch.cuda.device_count():
        raise BcnetError(
            f"{here} processes were launched on a machine with {torch.cuda.device_count()} GPUs: "
            "launch one for each GPU, or train on the CPU"
        )
    if dist.is_initialized():
        return Place(*world(), torch.device("cpu") if on_cpu else torch.device("cuda", torch.cuda.current_device()))
    try:
        from accelerate import Accelerator, InitProcessGroupKwargs
    except ImportError:
        raise BcnetError("training with several processes needs accelerate: pip install accelerate") from None
    accelerator = Accelerator(cpu=on_cpu, kwargs_handlers=[InitProcessGroupKwargs(timeout=LONGEST)])
    atexit.register(leave)
    return Place(accelerator.process_index, accelerator.num_processes, accelerator.device)


def leave() -> None:
    """Leave the other processes in order; called when the program ends.

    Threads that still wait for messages would abort it, so on CPUs the processes wait for each other, but not long for
    one that failed.
    """
    if dist.is_available() and dist.is_initialized():
        if dist.get_backend() == "gloo":
            with suppress(RuntimeError):
                dist.monitored_barrier(timeout=PATIENCE)
        dist.destroy_process_group()


_working_alone = False


def world() -> tuple[int, int]:
    """(rank, number of processes)."""
    if dist.is_available() and dist.is_initialized() and not _working_alone:
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


def main_process() -> bool:
    """Whether this is the process that writes files and talks to the user."""
    return world()[0] == 0


@contextmanager
def _alone() -> Iterator[None]:
    """Work while the other processes wait, so that nothing may be sent to them."""
    global _working_alone
    before, _working_alone = _working_alone, True
    try:
        yield
    finally:
        _working_alone = before


def decide(make: Callable[[], T]) -> T:
    """What ``make()`` returns in the first process, for all; a :class:`BcnetError` there is raised in all of them."""
    if world()[1] == 1:
        return make()
    outcome: list[Any] = [None, None]
    if main_process():
        with _alone():
            try:
                outcome[0] = make()
            except BcnetError as error:
                outcome[1] = str(error)
    dist.broadcast_object_list(outcome)
    if outcome[1] is not None:
        raise BcnetError(outcome[1])
    found: T = outcome[0]
    return found


def lost_another(error: RuntimeError) -> bool:
    """Whether an error of torch's says that another process has ended."""
    told = isinstance(error, dist.DistError) or any(words in str(error) for words in LOST)
    return dist.is_available() and dist.is_initialized() and told


def wait() -> None:
    """Wait until all processes have got here."""
    if world()[1] > 1:
        from accelerate.utils import wait_for_everyone

        wait_for_everyone()


@torch.no_grad()
def same_start(network: nn.Module) -> None:
    """Give every process the weights of the first."""
    if world()[1] > 1:
        from accelerate.utils import broadcast

        broadcast([*network.parameters(), *network.buffers()])


@torch.no_grad()
def average(parameters: Iterable[nn.Parameter], losses: Tensor) -> Tensor:
    """Replace every gradient by its mean over all processes, and return the mean of ``losses``, in one message."""
    if world()[1] == 1:
        return losses
    from accelerate.utils import reduce

    gradients = [p.grad for p in parameters if p.grad is not None]
    parts = [*gradients, losses]
    mean = reduce(torch.cat([part.reshape(-1) for part in parts]), "mean")
    pieces = [piece.view(part.shape) for piece, part in zip(mean.split([p.numel() for p in parts]), parts, strict=True)]
    torch._foreach_copy_(gradients, pieces[:-1])
    return pieces[-1]


def whole(batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """The whole batch that every process has its share of, the same on all."""
    if world()[1] == 1:
        return batch
    from accelerate.utils import gather

    x, y = (gather(part.contiguous()) for part in batch)
    return x, y


def add_up(table: Floats, device: torch.device) -> Floats:
    """The sum of a table over all processes, the same on all."""
    if world()[1] == 1:
        return table
    from accelerate.utils import reduce

    total: Floats = reduce(torch.from_numpy(table).to(device), "sum").cpu().numpy()
    return total


def agree(number: int, device: torch.device) -> bool:
    """Whether all processes have the same number."""
    if world()[1] == 1:
        return True
    from accelerate.utils import gather

    return len(set(gather(torch.tensor([number], device=device)).tolist())) == 1


def batch_norm(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool,
) -> Tensor:
    """``aten.batch_norm``; while training (where gradients are wanted) its batch is that of all processes together.

    Scoring needs no messages: every process sees whole batches.
    """
    if training and torch.is_grad_enabled() and world()[1] > 1:
        normalised: Tensor
        normalised, mean, var = _BatchNorm.apply(input, weight, bias, eps)
        if running_mean is not None and running_var is not None:
            running_mean.lerp_(mean.to(running_mean.dtype), momentum)
            running_var.lerp_(var.to(running_var.dtype), momentum)
        return normalised
    statistics = (running_mean, running_var, training, momentum, eps, cudnn_enabled)
    return torch.ops.aten.batch_norm.default(input, weight, bias, *statistics)


class _SharedBatchNorm(TorchFunctionMode):
    """Every batch norm of a plain network, as a module or in its graph, is :func:`batch_norm`."""

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = kwargs or {}
        if func is F.batch_norm:
            named = inspect.signature(F.batch_norm).bind(*args, **given)
            named.apply_defaults()
            return batch_norm(**named.arguments, cudnn_enabled=torch.backends.cudnn.enabled)
        return (batch_norm if func is torch.ops.aten.batch_norm.default else func)(*args, **given)


def shared_batch_norm() -> Any:
    """A context in which a plain network in training sees the batch of all processes."""
    return _SharedBatchNorm() if world()[1] > 1 else nullcontext()


class _BatchNorm(torch.autograd.Function):
    """Batch norm over the batch of all processes: one message forwards, one backwards.

    Also gives the mean and the unbiased variance of that batch.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        from accelerate.utils import gather

        axes, shape = _layout(x)
        channels, data = x.shape[1], x.float() if x.dtype != torch.float64 else x
        own_var, own_mean = torch.var_mean(data, axes, correction=0)
        count = own_mean.new_full((1,), x.numel() / channels)
        rows = gather(torch.cat([own_mean, own_var, count])[None])
        means, variances, counts = rows[:, :channels], rows[:, channels:-1], rows[:, -1:]
        total = counts.sum()
        mean = (counts * means).sum(0) / total
        var = (counts * (variances + (means - mean).square())).sum(0) / total
        scale = (var + eps).rsqrt()
        ctx.save_for_backward(x, weight, mean, scale, total)
        y = (data - mean.view(shape)) * scale.view(shape)
        if weight is not None:
            y = y * weight.view(shape)
        unbiased = var * (total / (total - 1).clamp(min=1))
        ctx.mark_non_differentiable(mean, unbiased)
        return (y if bias is None else y + bias.view(shape)).to(x.dtype), mean, unbiased

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        from accelerate.utils import reduce

        x, weight, mean, scale, total = ctx.saved_tensors
        axes, shape = _layout(x)
        given = gradient.to(mean.dtype)
        normalised = (x.to(mean.dtype) - mean.view(shape)) * scale.view(shape)
        own = torch.cat([given.sum(axes), (given * normalised).sum(axes)])
        whole = reduce(own, "sum") / total
        channels = len(mean)
        inner = given - whole[:channels].view(shape) - normalised * whole[channels:].view(shape)
        factor = scale if weight is None else scale * weight
        wanted = ctx.needs_input_grad
        return (
            (inner * factor.view(shape)).to(x.dtype) if wanted[0] else None,
            own[channels:].to(weight.dtype) if wanted[1] else None,
            own[:channels].to(gradient.dtype if weight is None else weight.dtype) if wanted[2] else None,
            None,
        )


def _layout(x: Tensor) -> tuple[list[int], list[int]]:
    """The axes that statistics are taken over, and the shape that spreads channels over ``x`` (n, c, ...)."""
    return [0, *range(2, x.dim())], [1, -1] + [1] * (x.dim() - 2)
