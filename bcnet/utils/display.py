"""What a person sees while a run works: bars on a terminal, plain lines elsewhere, both on stderr."""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

LINE_EVERY = 10.0  # seconds between plain lines


class Listener:
    """Hears what a run does; this one is silent."""

    def stage(self, name: str, about: str) -> None:
        """A stage begins."""

    def step(self, name: str, done: int, total: int, figures: dict[str, float]) -> None:
        """A stage, or a network of it, has done so much."""

    def note(self, text: str) -> None:
        """Something a person should know."""


class Lines(Listener):
    """One line per stage, and one now and then within it."""

    def __init__(self) -> None:
        self._stop = False
        self._told = time.monotonic()
        self._rate: tuple[str, float, int] = ("", 0.0, 0)

    def stage(self, name: str, about: str) -> None:
        self._told = time.monotonic()
        self._print(f"{name}: {about}")

    def note(self, text: str) -> None:
        self._print(f"note: {text}")

    def step(self, name: str, done: int, total: int, figures: dict[str, float]) -> None:
        self.stop_if_asked()
        if time.monotonic() - self._told > LINE_EVERY or done == total:
            self._told = time.monotonic()
            self._print(f"  {name} {done:,}/{total:,} {self._describe(name, done, figures)}".rstrip())

    def ask_to_stop(self) -> None:
        self._stop = True

    def stop_if_asked(self) -> None:
        if self._stop:
            raise KeyboardInterrupt

    def close(self) -> None:
        """Nothing is left on the screen."""

    def _describe(self, name: str, done: int, figures: dict[str, float]) -> str:
        shown = {k: f"{v:.4g}" if v != int(v) else f"{int(v):,}" for k, v in figures.items() if k != "images"}
        if "images" in figures:
            before, since, at = self._rate
            now = time.monotonic()
            if before == name and now > since and done > at:
                shown["images/s"] = f"{(done - at) * figures['images'] / (now - since):,.0f}"
            self._rate = (name, now, done)
        return "  ".join(f"{key} {value}" for key, value in shown.items())

    def _print(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)


class Bars(Lines):
    """A live bar for what is being done."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        super().__init__()
        self._console = Console(stderr=True, markup=False, highlight=False, emoji=False)
        columns = TextColumn("  {task.description:<16}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
        figures = TextColumn("{task.fields[figures]}")
        self._bars = Progress(*columns, figures, console=self._console, transient=False)
        self._tasks: dict[str, Any] = {}
        self._bars.start()

    def step(self, name: str, done: int, total: int, figures: dict[str, float]) -> None:
        self.stop_if_asked()
        if name not in self._tasks:
            self._tasks[name] = self._bars.add_task(name, total=total, figures="")
        self._bars.update(self._tasks[name], completed=done)
        if figures:
            self._bars.update(self._tasks[name], figures=self._describe(name, done, figures))

    def close(self) -> None:
        self._bars.stop()

    def _print(self, text: str) -> None:
        self._console.print(text, soft_wrap=True)


@contextmanager
def shown() -> Iterator[Lines]:
    """A listener for this terminal; the first Ctrl-C ends the run after the step at hand, the second at once."""
    listener = Bars() if sys.stderr.isatty() else Lines()

    def interrupt(_: int, __: FrameType | None) -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        listener.ask_to_stop()
        listener.note("stopping after this step; Ctrl-C again stops at once")

    # Only the main thread may set handlers; elsewhere Ctrl-C acts as it always does.
    main = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGINT, interrupt) if main else None
    try:
        yield listener
    finally:
        if main:
            signal.signal(signal.SIGINT, before)
        listener.close()
