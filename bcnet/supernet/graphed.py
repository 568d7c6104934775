"""A training step on a GPU that is recorded once and then replayed as a whole.

The host launches every kernel of a step by itself, some hundreds even for a small network, and a fast GPU waits for
it. A CUDA graph is one launch for the way forwards and backwards. It repeats what was recorded: the same kernels on the
same memory, with the batch and the random numbers (dropout) of the step. Whatever else Python decides in a forward is
not decided again, so a network that draws random numbers on the host is not recorded.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

WARM_UP = 3
"""Steps that run as they are before one is recorded: libraries set themselves up in them."""


class Graphed:
    """``learn(x, y)``, which sets the gradients of ``parameters`` and gives the losses (p,) of a batch, replayed.

    Batches of another shape than the one recorded run as they are. So does everything, after a notice, where a step
    cannot be recorded.
    """

    def __init__(self, learn: Callable[[Tensor, Tensor], Tensor], parameters: Iterable[nn.Parameter]):
        self._learn, self._parameters = learn, list(parameters)
        self._seen = 0
        self._possible = True
        self._recorded: _Recorded | None = None

    def __call__(self, x: Tensor, y: Tensor) -> Tensor:
        if self._possible and self._recorded is None:
            if self._seen < WARM_UP:
                return self._warm_up(x, y)
            self._record(x, y)
        if self._recorded is None or not self._recorded.fits(x, y):
            return self._learn(x, y)
        return self._recorded.replay(x, y)

    def _warm_up(self, x: Tensor, y: Tensor) -> Tensor:
        self._seen += 1
        before = _host_randomness()
        losses = self._learn(x, y)
        if _host_randomness() != before:
            self._give_up("the network draws random numbers on the host")
        return losses

    def _record(self, x: Tensor, y: Tensor) -> None:
        try:
            self._recorded = _Recorded(self._learn, self._parameters, x, y)
        except RuntimeError as error:
            torch.cuda.empty_cache()
            self._give_up((str(error).splitlines() or [type(error).__name__])[0][:160])

    def _give_up(self, reason: str) -> None:
        self._possible = False
        warnings.warn(f"steps are launched kernel by kernel, not as one CUDA graph: {reason}", stacklevel=4)


class _Recorded:
    """One recorded step: its graph and the memory it reads and writes."""

    def __init__(self, learn: Callable[[Tensor, Tensor], Tensor], parameters: list[nn.Parameter], x: Tensor, y: Tensor):
        self.x, self.y = torch.empty_like(x), torch.empty_like(y)
        self.graph = torch.cuda.CUDAGraph()
        # Thread-local: a loader's threads may allocate pinned memory meanwhile.
        with torch.cuda.graph(self.graph, capture_error_mode="thread_local"):
            self.losses = learn(self.x, self.y)
        self.gradients = [(p, p.grad) for p in parameters]

    def fits(self, x: Tensor, y: Tensor) -> bool:
        pairs = ((self.x, x), (self.y, y))
        return all(mine.shape == given.shape and mine.dtype == given.dtype for mine, given in pairs)

    def replay(self, x: Tensor, y: Tensor) -> Tensor:
        self.x.copy_(x)
        self.y.copy_(y)
        for parameter, gradient in self.gradients:
            parameter.grad = gradient  # a batch of another shape has put its own there
        self.graph.replay()
        return self.losses.clone()


def _host_randomness() -> Any:
    """The states of the generators that a forward may draw from on the host, to be compared."""
    # The legacy global state of numpy is what a network would draw from.
    name, keys, *place = np.random.get_state(legacy=True)  # noqa: NPY002
    return torch.get_rng_state().tolist(), random.getstate(), (name, np.asarray(keys).tolist(), place)
