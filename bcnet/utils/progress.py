"""What a person sees of a training: a bar on a terminal, a few lines elsewhere, TensorBoard's scalars if wanted.

The loss is read a few times a second only: reading it makes the program wait for the device.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from bcnet.errors import BcnetError

if TYPE_CHECKING:
    from rich.console import Console


READ_EVERY = 0.5
"""Seconds between two readings."""
LINE_EVERY, LINE_SHARE, LINE_AT_LAST = 5.0, 0.01, 600.0
"""A line is due after so many seconds and so much of the training, or after that many seconds at the latest."""
POINTS = 2000
"""The most points of one curve in TensorBoard."""


@dataclass(frozen=True)
class Reading:
    """A look at a training: ``speed`` in images a second over all processes, ``left`` in seconds."""

    step: int
    steps: int
    epoch: int
    loss: float
    rate: float
    speed: float
    left: float

    def __str__(self) -> str:
        facts = f"epoch {self.epoch + 1}, loss {self.loss:.4g}, {self.speed:,.0f} images/s, lr {self.rate:.3g}"
        return f"{facts}, {timedelta(seconds=round(self.left))} left"


class Step(Protocol):
    """What a training tells after each step (:class:`bcnet.training.loop.Progress`)."""

    step: int
    steps: int
    epoch: int
    images: int

    @property
    def loss(self) -> float: ...
    @property
    def rate(self) -> float: ...


class Meter:
    """Turns the reports of every step into a reading now and then."""

    def __init__(self) -> None:
        self._last, self._step, self._images = time.monotonic(), 0, 0
        self._readings, self._seconds = 0, 0.0

    def __call__(self, now: Step) -> Reading | None:
        """A reading, if it is time for one; the first and the last step always have one."""
        self._images += now.images * _world()[1]
        if self._readings == 0:
            self._step = now.step - 1
        elif time.monotonic() - self._last < READ_EVERY and now.step < now.steps:
            return None
        loss = now.loss
        time_now = time.monotonic()  # after the wait for the device
        passed = max(time_now - self._last, 1e-9)
        each = passed / (now.step - self._step)
        # The first step is slow and does not count; later the speed changes with the widths, hence a running mean.
        self._seconds = each if self._readings < 2 else 0.8 * self._seconds + 0.2 * each
        speed = self._images / passed
        self._last, self._step, self._images = time_now, now.step, 0
        self._readings += 1
        return Reading(now.step, now.steps, now.epoch, loss, now.rate, speed, (now.steps - now.step) * self._seconds)


class Display(Protocol):
    """Where readings are shown."""

    def show(self, reading: Reading) -> None: ...
    def close(self) -> None: ...


class Bar:
    """A live bar on a terminal."""

    def __init__(self, title: str, console: Console):
        from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            TaskProgressColumn(),
            TextColumn("{task.fields[facts]}"),
        )
        self._bars = Progress(*columns, console=console)
        self._task = self._bars.add_task(title, total=None, facts="")
        self._bars.start()

    def show(self, reading: Reading) -> None:
        self._bars.update(self._task, completed=reading.step, total=reading.steps, facts=str(reading))
        if reading.step == reading.steps:
            self._bars.stop()  # so that the terminal is free for the next bar

    def close(self) -> None:
        self._bars.stop()


class Lines:
    """A line now and then, where there is no terminal."""

    def __init__(self, title: str, console: Console):
        self._title, self._console = title, console
        self._time, self._step = 0.0, 0

    def show(self, reading: Reading) -> None:
        passed, share = time.monotonic() - self._time, (reading.step - self._step) / reading.steps
        due = passed >= LINE_AT_LAST or (passed >= LINE_EVERY and share >= LINE_SHARE)
        if not due and self._step > 0 and reading.step < reading.steps:
            return
        self._time, self._step = time.monotonic(), reading.step
        done = f"{reading.step:,} of {reading.steps:,} steps"
        self._console.print(f"{self._title}: {done}, {reading}", soft_wrap=True, markup=False, highlight=False)

    def close(self) -> None:
        """Nothing is left to do."""


class Board:
    """Loss, learning rate and speed as TensorBoard's scalars under ``folder``; a resumed training goes on there."""

    def __init__(self, folder: str | Path):
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise BcnetError("TensorBoard's scalars need tensorboard: pip install 'bcnet[tensorboard]'") from None
        self._open: Callable[..., Any] = SummaryWriter
        self._writer: Any = None
        self._folder, self._step = str(folder), 0

    def show(self, reading: Reading) -> None:
        if self._writer is None:
            # What a stopped run wrote after its last checkpoint is hidden.
            self._writer = self._open(self._folder, purge_step=reading.step)
        elif (reading.step - self._step) * POINTS < reading.steps and reading.step < reading.steps:
            return
        self._step = reading.step
        for name, value in (("loss", reading.loss), ("lr", reading.rate), ("images per second", reading.speed)):
            self._writer.add_scalar(name, value, reading.step)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


@contextmanager
def training_bar(
    title: str, console: Console | None = None, tensorboard: str | Path | None = None
) -> Iterator[Callable[[Step], None]]:
    """A callback for ``train_supernet`` and ``retrain`` that shows how they get on, on stderr.

    Of several processes the first shows it for all.
    """
    displays: list[Display] = []
    if _world()[0] == 0:
        if tensorboard is not None:
            displays.append(Board(tensorboard))
        displays.append(_screen(title, console))
    meter = Meter()

    def tell(now: Step) -> None:
        reading = meter(now) if displays else None
        if reading is not None:
            for display in displays:
                display.show(reading)

    try:
        yield tell
    finally:
        for display in displays:
            display.close()


@contextmanager
def counting_bar(title: str, console: Console | None = None) -> Iterator[Callable[[int, int], None]]:
    """A callback (done, all): a bar on a terminal, a line now and then elsewhere, from its first call on."""
    from rich.progress import Progress as Bars

    console = console or _stderr()
    bars = Bars(console=console) if console.is_terminal else None
    task = bars.add_task(title, total=None) if bars else None
    told = 0.0

    def tell(done: int, total: int) -> None:
        nonlocal told
        if bars is not None and task is not None:
            bars.start()
            bars.update(task, completed=done, total=total)
        elif done == total or time.monotonic() - told >= LINE_EVERY:
            told = time.monotonic()
            console.print(f"{title}: {done:,} of {total:,}", soft_wrap=True, markup=False, highlight=False)

    try:
        yield tell
    finally:
        if bars is not None:
            bars.stop()


def _world() -> tuple[int, int]:
    """(rank, number of processes)."""
    import torch.distributed as dist

    return (dist.get_rank(), dist.get_world_size()) if dist.is_available() and dist.is_initialized() else (0, 1)


def _screen(title: str, console: Console | None) -> Display:
    console = console or _stderr()
    return Bar(title, console) if console.is_terminal else Lines(title, console)


def _stderr() -> Console:
    from rich.console import Console

    return Console(file=sys.stderr, markup=False, highlight=False, emoji=False)
