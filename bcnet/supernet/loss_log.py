"""The loss of every path that was trained, comparable across training, for the prior.

A loss of step t is divided by the loss expected at that step: a running mean of the steps' mean losses,
``e_t = decay * e_(t-1) + (1 - decay) * mean_t`` from ``e_0 = 0``, divided by ``1 - decay^t`` so that the start counts
no zeros. Below 1 is better than widths usually did at that time. The memory is short on purpose (ten steps): a longer
one lags behind a falling loss and would make every width of the early steps look good.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from bcnet.errors import BcnetError
from bcnet.space.widths import Floats

_PENDING = 256
"""Steps whose losses may stay on the device, so that logging does not make the host wait for it."""

_DTYPES = {"steps": np.int64, "widths": np.int32, "losses": np.float32, "normalised": np.float32}


class LossLog:
    """Rows of (step, widths (L,), loss, normalised loss), one for every path of every step.

    Memory is bounded: at ``capacity`` rows the older half is forgotten. A loss that is not finite is kept,
    but takes no part in the expected loss nor in :meth:`best`.
    """

    def __init__(self, variables: int, decay: float = 0.9, capacity: int = 1 << 18):
        if variables < 1 or capacity < 2 or not 0 <= decay < 1:
            raise BcnetError("a loss log needs at least 1 variable, 2 rows of capacity and a decay in [0, 1)")
        self.variables, self.decay, self.capacity = variables, decay, capacity
        self._rows = 0
        self._store: dict[str, list[NDArray[Any]]] = {name: [] for name in _DTYPES}
        self._pending: list[tuple[int, NDArray[np.int32], Tensor]] = []
        self._mean, self._weight = 0.0, 0.0

    def append(self, step: int, widths: ArrayLike, losses: Tensor | ArrayLike) -> None:
        """The losses (p,) of a step's paths of ``widths`` (p, L); a tensor may stay on its device for a while."""
        rows = np.array(widths, dtype=np.int32, ndmin=2)
        values = losses.detach() if isinstance(losses, Tensor) else torch.from_numpy(np.array(losses, dtype=np.float32))
        if rows.shape != (values.numel(), self.variables) or not 0 < len(rows) <= self.capacity:
            raise BcnetError(
                f"a step needs one loss for each of its widths of {self.variables} variables, "
                f"got widths {rows.shape} and {values.numel()} losses"
            )
        self._pending.append((step, rows, values.reshape(-1).float()))
        if len(self._pending) >= _PENDING:
            self._flush()

    def __len__(self) -> int:
        self._flush()
        return self._rows

    @property
    def steps(self) -> NDArray[np.int64]:
        return self._column("steps")

    @property
    def widths(self) -> NDArray[np.int32]:
        return self._column("widths")

    @property
    def losses(self) -> NDArray[np.float32]:
        return self._column("losses")

    @property
    def normalised(self) -> NDArray[np.float32]:
        return self._column("normalised")

    def best(self, m: int = 100, after: int = 0) -> tuple[NDArray[np.int64], Floats]:
        """The at most ``m`` different configurations (m, L) of least mean normalised loss (m,), best first.

        Steps before ``after`` are left out. Losses of the same widths (both sides, or drawn again) are averaged.
        """
        use = np.isfinite(self.normalised) & (self.steps >= after)
        unique, which = np.unique(self.widths[use].astype(np.int64), axis=0, return_inverse=True)
        which = which.reshape(-1)
        means = np.bincount(which, weights=self.normalised[use], minlength=len(unique)) / np.maximum(
            np.bincount(which, minlength=len(unique)), 1
        )
        order = np.argsort(means, kind="stable")[: max(m, 0)]
        return unique[order], means[order]

    def tensors(self) -> dict[str, Tensor]:
        """Everything there is to save, for :func:`bcnet.training.checkpoint.save`."""
        columns = {name: torch.from_numpy(self._column(name).copy()) for name in _DTYPES}
        running = torch.tensor([self._mean, self._weight, self.decay, float(self.capacity)], dtype=torch.float64)
        return {**columns, "running": running}

    @classmethod
    def from_tensors(cls, tensors: dict[str, Tensor]) -> LossLog:
        """The log whose :meth:`tensors` these are; it goes on exactly as that one would have."""
        try:
            columns = {name: tensors[name].numpy() for name in _DTYPES}
            mean, weight, decay, capacity = tensors["running"].tolist()
            log = cls(columns["widths"].shape[1], decay, int(capacity))
            rows = len(columns["steps"])
            fits = all(
                column.shape == log._shape(name, rows) and column.dtype == _DTYPES[name]
                for name, column in columns.items()
            )
        except (KeyError, ValueError, TypeError, IndexError, OverflowError):
            fits = False
        if not fits or rows > log.capacity:
            raise BcnetError("the loss log in this checkpoint is damaged")
        log._store = {name: [column.copy()] for name, column in columns.items()}
        log._rows, log._mean, log._weight = rows, mean, weight
        return log

    def _shape(self, name: str, rows: int) -> tuple[int, ...]:
        return (rows, self.variables) if name == "widths" else (rows,)

    def _column(self, name: str) -> NDArray[Any]:
        self._flush()
        return self._joined(name)

    def _flush(self) -> None:
        """Fetch the losses that are still on the device, all at once, and store their rows."""
        if not self._pending:
            return
        pending, self._pending = self._pending, []
        losses = torch.cat([values for _, _, values in pending]).cpu().numpy()
        begin = 0
        for step, rows, _ in pending:
            self._add(step, rows, losses[begin : begin + len(rows)])
            begin += len(rows)

    def _add(self, step: int, widths: NDArray[np.int32], losses: NDArray[np.float32]) -> None:
        finite = losses[np.isfinite(losses)].astype(np.float64)
        if len(finite):
            self._mean = self.decay * self._mean + (1 - self.decay) * float(finite.mean())
            self._weight = self.decay * self._weight + (1 - self.decay)
        expected = self._mean / self._weight if self._weight else math.nan
        normalised = np.where(np.isfinite(losses), losses / expected if expected else 1.0, np.nan)
        if self._rows + len(losses) > self.capacity:
            forgotten = max(self._rows - self.capacity // 2, self._rows + len(losses) - self.capacity)
            self._store = {name: [self._joined(name)[forgotten:]] for name in _DTYPES}
            self._rows -= forgotten
        row = {"steps": np.full(len(losses), step), "widths": widths, "losses": losses, "normalised": normalised}
        for name, values in row.items():
            self._store[name].append(values.astype(_DTYPES[name]))
        self._rows += len(losses)

    def _joined(self, name: str) -> NDArray[Any]:
        """A column as one array, and kept as such."""
        parts = self._store[name]
        if len(parts) != 1:
            parts[:] = [np.concatenate([np.empty(self._shape(name, 0), _DTYPES[name]), *parts])]
        return parts[0]
