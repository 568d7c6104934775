"""Tables of numbers sent to a GPU without waiting for it.

A CUDA graph that is being recorded reads its tables again at every replay: they get memory of their own, which is
never used for anything else.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

SLOTS = 16
"""Tables that may be on their way at a time."""
SPARE = 2
"""Tables of one step, for which there must be memory before it is recorded: none may be pinned meanwhile."""


class Uploads:
    """A ring of buffers in pinned memory: no allocation, and no wait before a buffer's turn comes again."""

    def __init__(self, device: torch.device):
        self._device = device
        self._buffers: list[Tensor] = [torch.empty(0, dtype=torch.int64)] * SLOTS
        self._sent: list[Any] = [None] * SLOTS
        self._turn = 0
        self._spare: list[Tensor] = []
        self._recorded: list[Tensor] = []

    def send(self, table: NDArray[np.int64]) -> Tensor:
        """A flat copy of ``table`` on the device."""
        if torch.cuda.is_current_stream_capturing():
            return self._record(table)
        turn, count = self._turn, table.size
        self._turn = (turn + 1) % SLOTS
        if self._sent[turn] is None:
            self._sent[turn] = torch.cuda.Event()
        else:
            self._sent[turn].synchronize()
        if len(self._buffers[turn]) < count:
            self._buffers[turn] = _pinned(2 * count)
        self._spare = [buffer for buffer in self._spare if len(buffer) >= count]
        self._spare += [_pinned(2 * count) for _ in range(SPARE - len(self._spare))]
        staged = self._buffers[turn][:count]
        staged.numpy()[:] = table.ravel()
        sent = staged.to(self._device, non_blocking=True)
        self._sent[turn].record(torch.cuda.current_stream(self._device))
        return sent

    def _record(self, table: NDArray[np.int64]) -> Tensor:
        if not self._spare or len(self._spare[-1]) < table.size:
            raise RuntimeError("a step was recorded that had not run before")
        self._recorded.append(self._spare.pop()[: table.size])
        self._recorded[-1].numpy()[:] = table.ravel()
        return self._recorded[-1].to(self._device, non_blocking=True)


def _pinned(count: int) -> Tensor:
    return torch.empty(count, dtype=torch.int64, pin_memory=True)
