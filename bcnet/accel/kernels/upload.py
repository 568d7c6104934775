"""Tables of numbers sent to a GPU without waiting for it."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

SLOTS = 16
"""Tables that may be on their way at a time."""


class Uploads:
    """A ring of buffers in pinned memory: no allocation, and no wait before a buffer's turn comes again."""

    def __init__(self, device: torch.device):
        self._device = device
        self._buffers: list[Tensor] = [torch.empty(0, dtype=torch.int64)] * SLOTS
        self._sent: list[Any] = [None] * SLOTS
        self._turn = 0

    def send(self, table: NDArray[np.int64]) -> Tensor:
        """A flat copy of ``table`` on the device."""
        turn, count = self._turn, table.size
        self._turn = (turn + 1) % SLOTS
        if self._sent[turn] is None:
            self._sent[turn] = torch.cuda.Event()
        else:
            self._sent[turn].synchronize()
        if len(self._buffers[turn]) < count:
            self._buffers[turn] = torch.empty(2 * count, dtype=torch.int64, pin_memory=True)
        staged = self._buffers[turn][:count]
        staged.numpy()[:] = table.ravel()
        sent = staged.to(self._device, non_blocking=True)
        self._sent[turn].record(torch.cuda.current_stream(self._device))
        return sent
