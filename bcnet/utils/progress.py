"""What a person sees while bcnet works: bars on a terminal, plain lines elsewhere, both on stderr.

Whatever takes long tells a :class:`Listener` about its stages and steps. Training does so through
:func:`training_steps`, which reads the loss only a few times a second, because reading it waits for the device.
"""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from bcnet.errors import BcnetError

if TYPE_CHECKING:
    from torch import Tensor

READ_EVERY = 0.5
"""Seconds between two readings of the loss."""
LINE_EVERY, LINE_SHARE, LINE_AT_LAST = 5.0, 0.01, 600.0
"""A line is printed once both that many seconds have passed and that share of the work is done, or at the latest after
the last number of seconds."""
OVERALL = "the whole run"
SURE = 10.0, 0.05
"""Seconds, and a share of the whole plan, that must have passed before the clock corrects the plan."""
POINTS = 2000
"""The most points of one curve in TensorBoard."""


class Listener:
    """Is told how work is going; this one is silent. ``at`` is the work it was last told of."""

    at = ""

    def expect(self, seconds: Mapping[str, float]) -> None:
        """How long each coming stage is planned to take."""

    def stage(self, name: str, about: str) -> None:
        """A stage begins."""

    def step(self, name: str, done: int, total: int, figures: Mapping[str, float]) -> None:
        """``done`` of ``total`` steps of the work called ``name`` are done; ``figures`` may be empty."""

    def note(self, text: str) -> None:
        """Something a person should know."""

    def close(self) -> None:
        """There is nothing more to hear."""


class Lines(Listener):
    """One line per stage, and one now and then within it. Asked to stop, it interrupts the next step."""

    def __init__(self) -> None:
        self._stop = False
        self._told: dict[str, tuple[float, int]] = {}
        self._pace: dict[str, Pace] = {}
        self._figures: dict[str, Mapping[str, float]] = {}
        self._journey: Journey | None = None

    def expect(self, seconds: Mapping[str, float]) -> None:
        self._journey = Journey(seconds, time.monotonic())

    def stage(self, name: str, about: str) -> None:
        left = ""
        if self._journey is not None:
            self._journey.begin(name, time.monotonic())
            left = f" ({duration(self._journey.left(time.monotonic()))} left in all)"
        self._print(f"{name}: {about}{left}")

    def note(self, text: str) -> None:
        self._print(f"note: {text}")

    def step(self, name: str, done: int, total: int, figures: Mapping[str, float]) -> None:
        if self._stop:
            raise KeyboardInterrupt
        now = time.monotonic()
        if name != self.at:  # it begins, or resumes after other work whose time is not its own
            self._pace[name], self.at = Pace(now, done), name
        left = self._pace[name](now, done, total)
        self._figures[name] = figures or self._figures.get(name, {})
        self._show(name, done, total, _described(self._figures[name]), left)

    def ask_to_stop(self) -> None:
        self._stop = True

    def _show(self, name: str, done: int, total: int, figures: str, left: float) -> None:
        now = time.monotonic()
        since, at = self._told.setdefault(name, (now, done))
        passed, share = now - since, (done - at) / total
        if done < total and passed < LINE_AT_LAST and (passed < LINE_EVERY or share < LINE_SHARE):
            return
        self._told[name] = now, done
        time_left = f"{timedelta(seconds=round(left))} left" if done < total else ""
        self._print("  " + ", ".join(filter(None, (f"{name} {done:,}/{total:,}", figures, time_left))))

    def _print(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)


class Bars(Lines):
    """A live bar for all work at hand."""

    def __init__(self, console: Any = None) -> None:
        from rich import progress as rich
        from rich.console import Console

        super().__init__()
        self._console = console or Console(stderr=True, markup=False, highlight=False, emoji=False)
        name, left, figures = map(
            rich.TextColumn, ("  {task.description:<16}", "{task.fields[left]}", "{task.fields[figures]}")
        )
        columns = name, rich.BarColumn(), rich.MofNCompleteColumn(), left, figures
        self._bars = rich.Progress(*columns, console=self._console)
        self._tasks: dict[str, Any] = {}
        self._bars.start()

    def close(self) -> None:
        self._bars.stop()

    def _show(self, name: str, done: int, total: int, figures: str, left: float) -> None:
        if self._journey is not None:
            now = time.monotonic()
            self._overall(self._journey.share(now), self._journey.left(now))
        if name not in self._tasks:
            self._tasks[name] = self._bars.add_task(name, total=total, left="", figures="")
        time_left = str(timedelta(seconds=round(left)))
        self._bars.update(self._tasks[name], completed=done, total=total, left=time_left, figures=figures)

    def _overall(self, share: float, left: float) -> None:
        """The bar of the whole run, in percent, above those of the work at hand."""
        if OVERALL not in self._tasks:
            self._tasks[OVERALL] = self._bars.add_task(OVERALL, total=100, left="", figures="")
        figures = f"{duration(left)} left in all"
        self._bars.update(self._tasks[OVERALL], completed=int(100 * share), figures=figures)

    def _print(self, text: str) -> None:
        self._console.print(text, soft_wrap=True)


class Journey:
    """How far a whole run has got: its plan, in seconds by stage, and a clock. Stages that took longer or shorter than
    planned scale the estimate of what is still to come."""

    def __init__(self, planned: Mapping[str, float], now: float):
        self._planned, self._now, self._since = dict(planned), "", now
        self._done, self._took = 0.0, 0.0
        self._sure = SURE[0] + SURE[1] * sum(planned.values())

    def begin(self, stage: str, now: float) -> None:
        """A stage begins, so the one before it has ended; those of a target are part of the stage ``targets``."""
        if stage not in self._planned:
            return
        self._done += self._planned.pop(self._now, 0.0)
        self._took += now - self._since if self._now else 0.0
        self._now, self._since = stage, now

    def left(self, now: float) -> float:
        """Seconds until the end."""
        stretch = (self._took + self._sure) / (self._done + self._sure)  # short stages tell little
        here = max(0.0, stretch * self._planned.get(self._now, 0.0) - (now - self._since))
        return here + stretch * sum(seconds for name, seconds in self._planned.items() if name != self._now)

    def share(self, now: float) -> float:
        """How much of the run is done, in 0..1."""
        passed, left = self._took + now - self._since, self.left(now)
        return passed / (passed + left) if passed + left else 0.0


class Pace:
    """Estimates how long the rest will take, from a start at which ``done`` steps were done."""

    def __init__(self, now: float, done: int):
        self._last, self._done, self._each = now, done, 0.0

    def __call__(self, now: float, done: int, total: int) -> float:
        """Seconds left. The time of a step changes with the widths it trains, hence a running mean."""
        if done > self._done and (now - self._last >= READ_EVERY or not self._each):
            each = (now - self._last) / (done - self._done)
            self._each = 0.8 * self._each + 0.2 * each if self._each else each
            self._last, self._done = now, done
        return (total - done) * self._each


class TensorBoard(Listener):
    """Also writes all figures as TensorBoard scalars, one curve per kind of work under ``folder``.

    A resumed run continues the curves; what it wrote after the checkpoint it resumes from is hidden.
    """

    def __init__(self, listener: Listener, folder: str | Path):
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise BcnetError("TensorBoard's scalars need tensorboard: pip install 'bcnet[tensorboard]'") from None
        self._listener, self._folder = listener, Path(folder)
        self._open: Callable[..., Any] = SummaryWriter
        self._writers: dict[str, Any] = {}
        self._written: dict[str, int] = {}
        self.stage, self.note, self.expect = listener.stage, listener.note, listener.expect  # type: ignore[method-assign]

    def step(self, name: str, done: int, total: int, figures: Mapping[str, float]) -> None:
        self._listener.step(name, done, total, figures)
        self.at = name
        if not figures:
            return
        if name not in self._writers:
            self._writers[name] = self._open(str(self._folder / name), purge_step=done)
        elif (done - self._written[name]) * POINTS < total and done < total:
            return
        self._written[name] = done
        for figure, value in figures.items():
            self._writers[name].add_scalar(figure, value, done)

    def close(self) -> None:
        for writer in self._writers.values():
            writer.close()
        self._listener.close()


@dataclass
class Progress:
    """What training reports after each step; ``loss``, told per ``unit``, waits for the device when it is read."""

    step: int
    steps: int
    epoch: int
    rate: float
    images: int
    losses: Tensor
    unit: float = 1.0

    @property
    def loss(self) -> float:
        return float(self.losses.mean()) / self.unit


def training_steps(listener: Listener, name: str) -> Callable[[Progress], None]:
    """A callback for ``train_supernet`` and ``retrain`` that tells ``listener`` how they are going.

    Of several processes, the first speaks for all.
    """
    last, images, begun = time.monotonic(), 0, False

    def tell(now: Progress) -> None:
        nonlocal last, images, begun
        rank, processes = _world()
        if rank > 0:
            return
        if begun and listener.at != name:  # it resumes after other work whose time is not its own
            last, images = time.monotonic(), -now.images * processes
        images, begun = images + now.images * processes, True
        figures: dict[str, float] = {}
        if time.monotonic() - last >= READ_EVERY or now.step == now.steps:
            loss = now.loss
            passed = max(time.monotonic() - last, 1e-9)  # includes the wait for the device
            figures = {"loss": loss, "lr": now.rate, **({"images/s": images / passed} if images else {})}
            last, images = time.monotonic(), 0
        listener.step(name, now.step, now.steps, figures)
        listener.at = name

    return tell


@contextmanager
def terminal_listener() -> Iterator[Listener]:
    """A listener for this terminal; the first Ctrl-C ends the work after the step at hand, the second at once."""
    listener = Bars() if sys.stderr.isatty() else Lines()

    def interrupt(_: int, __: FrameType | None) -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        listener.ask_to_stop()
        listener.note("stopping after this step; Ctrl-C again stops at once")

    # Only the main thread may set handlers; in others Ctrl-C acts as usual.
    main = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGINT, interrupt) if main else None
    try:
        yield listener
    finally:
        if main:
            signal.signal(signal.SIGINT, before)
        listener.close()


def duration(seconds: float) -> str:
    """``12 s``, ``3 min``, ``1.5 h``."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def _described(figures: Mapping[str, float]) -> str:
    return ", ".join(f"{key} {_short(value)}" for key, value in figures.items())


def _short(value: float) -> str:
    return f"{int(value):,}" if value == value // 1 or abs(value) >= 1000 else f"{value:.4g}"


def _world() -> tuple[int, int]:
    """(rank, number of processes)."""
    import torch.distributed as dist

    return (dist.get_rank(), dist.get_world_size()) if dist.is_available() and dist.is_initialized() else (0, 1)
