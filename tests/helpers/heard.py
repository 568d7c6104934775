"""A listener that remembers what it was told."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from bcnet.utils.progress import Listener


class Heard(Listener):
    """``steps`` by the name of the work; at step ``stop_at`` it interrupts."""

    def __init__(self, stop_at: int = 0):
        self.steps: dict[str, list[int]] = defaultdict(list)
        self.ended: dict[str, bool] = {}
        self.notes: list[str] = []
        self._stop_at = stop_at

    def step(self, name: str, done: int, total: int, figures: Mapping[str, float]) -> None:
        self.steps[name].append(done)
        self.ended[name] = done == total
        if done == self._stop_at:
            raise KeyboardInterrupt

    def note(self, text: str) -> None:
        self.notes.append(text)
