"""The loop that all training shares: batches, schedule, averages, checkpoints and what can go wrong.

A step is a function of the seed, its number and the weights, so training that was stopped anywhere resumes from its
last checkpoint and ends as if it had never stopped, on a CPU bit for bit.
"""

from __future__ import annotations

import math
import time
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from bcnet.data.source import Source
from bcnet.errors import BcnetError, NotFinite, first_line
from bcnet.training import checkpoint, distributed
from bcnet.training.allocator import tune_allocator
from bcnet.training.optim import Average, Optimisation, make_optimizer, set_rate
from bcnet.utils.progress import Progress as Progress
from bcnet.utils.safe_gradients import safe_gradients

CHECK_EVERY = 50
"""Steps between checks that the loss is still finite: each check waits for the device."""

History = list[tuple[int, float, float]]


class LoopConfig(Protocol):
    """What the loop needs of the settings of a training."""

    @property
    def optimisation(self) -> Optimisation: ...
    @property
    def seed(self) -> int: ...
    @property
    def checkpoint_minutes(self) -> float: ...
    @property
    def channels_last(self) -> bool: ...


class Loop(ABC):
    """Trains ``net`` in place. ``history`` has a row (epoch, mean loss, rate) for every epoch, its loss per ``unit``:
    one for people to read, where that which is minimised is a weighted sum of losses."""

    unit = 1.0

    def __init__(self, net: nn.Module, source: Source, config: LoopConfig, folder: str | Path | None):
        self.net, self.source, self.config = net, source, config
        self.optimisation = config.optimisation
        self.folder = None if folder is None else Path(folder)
        if not any(p.requires_grad for p in net.parameters()):
            raise BcnetError("all parameters of the network are frozen: set requires_grad of those to be trained")
        self.device = next(net.parameters()).device
        tune_allocator()
        if config.channels_last:
            net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        distributed.same_start(net)
        self.optimizer = make_optimizer(net, self.optimisation)
        self.average = Average(self.averaged(), self.optimisation.ema) if self.optimisation.ema else None
        self.history: History = []
        self.sum, self.step = torch.zeros((), dtype=torch.float64, device=self.device), 0
        self.parts = 1
        self._place: tuple[int, int] | None = None
        self.per_epoch = len(source)
        if not self.per_epoch:
            raise BcnetError("the training set gives no batch: it is empty or smaller than one batch")

    @abstractmethod
    def learn(self, x: Tensor, y: Tensor) -> Tensor:
        """Set the gradients to those of a batch, run in the parts of :meth:`split`; returns its losses, (p,)."""

    @abstractmethod
    def identity(self) -> Any:
        """What distinguishes checkpoints of this training from those of another network, as JSON."""

    def check(self, x: Tensor, y: Tensor) -> None:  # noqa: B027, checking is optional
        """Raise a :class:`BcnetError` if the network does not suit the first batch."""

    def record(self, losses: Tensor) -> None:  # noqa: B027, recording is optional
        """Record the losses of a step, (p,), averaged over all processes."""

    def averaged(self) -> Iterable[Any]:
        """The tensors that ``ema`` averages."""
        return self.net.parameters()

    def extra(self) -> dict[str, Any]:
        """What a checkpoint holds besides the loop's own state."""
        return {}

    def restore_extra(self, tree: dict[str, Any]) -> None:  # noqa: B027, most have nothing more to restore
        """Restore what :meth:`extra` returned."""

    def run(self, progress: Callable[[Progress], None] | None = None, epochs: int | None = None) -> None:
        """Train to the end of the schedule, or of its first ``epochs``, from a checkpoint if there is one."""
        if self.folder is not None:
            self._place = checkpoint.prepare(self.folder)
            if checkpoint.exists(self.folder):
                self._resume(self.folder)
        if not distributed.agree(self.step, self.device):
            raise BcnetError(f"the processes found different checkpoints: {self.folder} must be one folder for all")
        self.net.train()
        steps, saved = (epochs or self.optimisation.epochs) * self.per_epoch, time.monotonic()
        recent: list[Tensor] = []
        for number, (x, y) in enumerate(self._batches(steps)):
            step = self._step if number else self._first_step
            rate = self.optimisation.rate(self.step, self.per_epoch)
            set_rate(self.optimizer, rate)
            torch.manual_seed(step_seed(self.config.seed, self.step))
            losses = step(x, y)
            self.step += 1
            recent.append(losses)
            if self.step % CHECK_EVERY == 0 or self.step == steps:
                self._check_finite(recent)
                recent.clear()
            if self.step % self.per_epoch == 0:
                self._end_epoch(rate)
            if progress is not None:
                epoch = (self.step - 1) // self.per_epoch
                self._tell(progress, Progress(self.step, steps, epoch, rate, len(x), losses, self.unit))
            due = time.monotonic() - saved > 60 * self.config.checkpoint_minutes
            if self.folder is not None and (due or self.step == steps):
                self._check_finite(recent)
                self._save()
                saved = time.monotonic()
        distributed.wait()  # until all can read the last checkpoint

    def finish(self) -> None:
        """Replace the weights by their average, if there is one."""
        if self.average is not None:
            self.average.swap()

    def autocast(self) -> Any:
        return torch.autocast(self.device.type, torch.bfloat16) if self.optimisation.bf16 else nullcontext()

    def split(self, x: Tensor, y: Tensor) -> Iterator[tuple[Tensor, Tensor, float]]:
        """A batch in parts that fit into memory, each with its share of the loss."""
        for part, target in zip(x.chunk(self.parts), y.chunk(self.parts), strict=True):
            yield part, target, len(part) / len(x)

    def _batches(self, steps: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Batches from the current step to the last; a loader may not give fewer than it promised."""
        while self.step < steps:
            epoch, start = divmod(self.step, self.per_epoch)
            before = self.step
            for x, y in self.source.batches(epoch, start, self.device):
                if self.config.channels_last and x.dim() == 4:
                    x = x.contiguous(memory_format=torch.channels_last)
                yield x, y
            if self.step != before + self.per_epoch - start:
                raise BcnetError(
                    f"the training loader promised {self.per_epoch} batches an epoch but gave {self.step - before}"
                )

    def _step(self, x: Tensor, y: Tensor) -> Tensor:
        """One optimizer step; returns the losses, (p,)."""
        losses = distributed.average(self.net.parameters(), self._learn_within_memory(x, y))
        self.record(losses)
        if self.optimisation.clip:
            torch.nn.utils.clip_grad_norm_(self.net.parameters(), self.optimisation.clip)
        self.optimizer.step()
        if self.average is not None:
            self.average.update()
        self.sum += losses.mean()
        return losses

    def _first_step(self, x: Tensor, y: Tensor) -> Tensor:
        """The first step: what cannot work at all, such as inputs of another type than the weights, fails here."""
        try:
            self.check(x, y)
            torch.manual_seed(step_seed(self.config.seed, self.step))  # the check may have drawn for dropout
            return self._step(x, y)
        except (RuntimeError, TypeError, ValueError, LookupError, AttributeError) as error:
            if isinstance(error, BcnetError) or (isinstance(error, RuntimeError) and out_of_memory(error)):
                raise
            cause = first_line(error)
            form = f"{str(x.dtype).removeprefix('torch.')} {tuple(x.shape)}"
            raise BcnetError(f"the first training step, on inputs of {form}, fails: {cause}") from error

    def _learn_within_memory(self, x: Tensor, y: Tensor) -> Tensor:
        """Run a batch in halves, quarters, ... if it does not fit into memory as a whole."""
        for _ in range(len(x).bit_length() + 1):
            try:
                with safe_gradients(self.device):
                    return self.learn(x, y)
            except RuntimeError as error:
                if not out_of_memory(error):
                    raise
            if distributed.world()[1] > 1 or self.parts >= len(x):
                break
            self.parts = min(2 * self.parts, len(x))
            torch.cuda.empty_cache()
            warnings.warn(
                f"a batch of {len(x)} does not fit into the memory of {self.device}: it is run in {self.parts} parts "
                f"of {math.ceil(len(x) / self.parts)}, whose batch norm sees fewer images",
                stacklevel=2,
            )
        raise BcnetError(
            f"{math.ceil(len(x) / self.parts)} of {len(x)} images do not fit into the memory of {self.device}: "
            f"lower the batch size, use bf16, or train fewer paths a step; {self._kept()}"
        )

    def _end_epoch(self, rate: float) -> None:
        mean = float(self.sum) / self.per_epoch / self.unit
        self.sum.zero_()
        self.history.append((self.step // self.per_epoch, mean, rate))

    def _tell(self, progress: Callable[[Progress], None], state: Progress) -> None:
        """Call back; a KeyboardInterrupt raised there stops the training, and nothing is lost."""
        try:
            progress(state)
        except KeyboardInterrupt:
            self._save()
            raise

    def _check_finite(self, recent: list[Tensor]) -> None:
        """The losses of the last steps must be numbers; where they are not, the data may not be either."""
        if not recent or bool(torch.isfinite(torch.cat(recent)).all()):
            return
        first = next(n for n, losses in enumerate(recent) if not bool(torch.isfinite(losses).all()))
        epoch, place = divmod(self.step - len(recent) + first, self.per_epoch)
        batch = next(iter(self.source.batches(epoch, place, self.device)))
        if not all(bool(torch.isfinite(tensor).all()) for tensor in batch):
            raise BcnetError(f"batch {place + 1} of the training data holds values that are infinite or NaN: clean it")
        raise NotFinite(self._diverged("loss"))

    def _check_weights(self) -> None:
        """A finite loss can leave weights that are not finite, which must not become the last checkpoint."""
        norms = torch._foreach_norm([p.detach() for p in self.net.parameters()])
        if not bool(torch.isfinite(torch.stack(list(norms))).all()):
            raise NotFinite(self._diverged("weights"))

    def _diverged(self, what: str) -> str:
        rate = self.optimisation.rate(self.step - 1, self.per_epoch)
        return (
            f"the {what} became infinite or NaN by step {self.step} (learning rate {rate:.4g}): {self._kept()}; "
            "lower lr, add warmup or clip the gradient"
        )

    def _kept(self) -> str:
        saved = self.folder is not None and checkpoint.exists(self.folder)
        return f"the last good checkpoint is in {self.folder}" if saved else "nothing was saved yet"

    def _tree(self) -> dict[str, Any]:
        average = self.average
        return {
            "step": self.step,
            "parts": self.parts,
            "sum": float(self.sum),
            "history": [list(row) for row in self.history],
            "net": dict(self.net.state_dict().items()),
            "optimizer": self.optimizer.state_dict(),
            "average": None if average is None else {"updates": average.updates, "values": average.values},
            "shape": self.identity(),
            **self.extra(),
        }

    def _save(self) -> None:
        self._check_weights()
        if distributed.world()[0] == 0 and self.folder is not None:
            checkpoint.save(self.folder, *checkpoint.pack(self._tree()), self._place)

    def _resume(self, folder: Path) -> None:
        try:
            self.restore(folder)
        except checkpoint.NoCheckpoint as error:
            warnings.warn(f"{error.cause}; the training begins anew", stacklevel=3)

    def restore(self, folder: Path) -> None:
        """Restore the newest checkpoint in ``folder``."""
        tree = checkpoint.unpack(*checkpoint.load(folder))
        if tree.get("shape") != self.identity():
            raise BcnetError(f"the checkpoint in {folder} is of another network: choose another folder")
        try:
            self._take_back(tree)
        except (LookupError, TypeError, ValueError, AttributeError, RuntimeError) as error:
            if isinstance(error, BcnetError):
                raise
            raise BcnetError(
                f"the checkpoint in {folder} does not fit this training: remove the folder to start anew"
            ) from error

    def _take_back(self, tree: dict[str, Any]) -> None:
        self.net.load_state_dict(tree["net"])
        self.optimizer.load_state_dict(tree["optimizer"])
        for parameter, kept in self.optimizer.state.items():
            for name, value in kept.items():
                if isinstance(value, Tensor) and value.shape == parameter.shape:
                    kept[name] = torch.empty_like(parameter).copy_(value)  # in the parameter's memory format
        self.step, self.history = tree["step"], [(int(e), a, b) for e, a, b in tree["history"]]
        self.sum.fill_(tree["sum"])
        self.parts = tree["parts"]
        self.restore_extra(tree)
        if self.average is not None and tree["average"] is not None:
            self.average.updates = tree["average"]["updates"]
            for mine, kept in zip(self.average.values, tree["average"]["values"], strict=True):
                mine.copy_(kept)


def out_of_memory(error: RuntimeError) -> bool:
    """Whether an error of torch's says that a device is out of memory."""
    return isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)


def step_seed(seed: int, step: int) -> int:
    """The seed of torch's own random numbers (dropout) in a step; processes differ, since their images do."""
    return int(np.random.SeedSequence([seed, step, distributed.world()[0]]).generate_state(1)[0])
