"""A training step on a GPU that is recorded once and then replayed as a whole.

The host launches every kernel of a step separately, a few hundred even for a small network, and a fast GPU waits for
it. A CUDA graph launches the forward and backward pass at once. It repeats what was recorded: the same kernels on the
same memory, with the batch and the random numbers (dropout) of the step. Whatever else Python decides in a forward is
not decided again, so a network that draws random numbers on the host is not recorded, nor one that waits for the GPU.

Autograd adds a gradient on the stream on which its parameter was first used, which may not be the one that records: a
network whose gradients were used before would break the recording. So it is recorded on separate leaves, aliases of the
parameters that no stream has seen.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from bcnet.errors import BcnetError, first_line
from bcnet.utils.random_state import swap_random_states

WARM_UP = 3
"""Steps that run normally before one is recorded: libraries set themselves up in them."""


class CudaGraphStep:
    """Replays ``learn(x, y)``, which sets the gradients of ``network`` and returns the losses (p,) of a batch; without
    ``network`` it keeps gradients in memory of its own that never moves.

    Batches of another shape than the recorded one run normally. So does everything, after a notice, if a step cannot be
    recorded.
    """

    def __init__(self, learn: Callable[[Tensor, Tensor], Tensor], network: nn.Module | None = None):
        self._learn, self._network = learn, nn.Module() if network is None else network
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
        with Waits(x.device) as waits:
            losses = self._learn(x, y)
        if _host_randomness() != before:
            self._give_up("the network draws random numbers on the host")
        elif waits.found and self._seen == WARM_UP:
            self._give_up("the network waits for the GPU")
        return losses

    def _record(self, x: Tensor, y: Tensor) -> None:
        try:
            self._recorded = _Recorded(self._learn, self._network, x, y)
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()
            self._give_up("there is too little memory beside")
        except RuntimeError as error:
            reason = first_line(error)
            try:
                _clean_up(x.device)
            except RuntimeError:
                raise BcnetError(
                    f"a step cannot be recorded as a CUDA graph: {reason}; resume with the engine plain"
                ) from error
            self._give_up(f"recording it failed ({reason})")

    def _give_up(self, reason: str) -> None:
        self._possible = False
        warnings.warn(f"steps are launched kernel by kernel, not as one CUDA graph: {reason}", stacklevel=4)


@contextmanager
def fresh_leaves(network: nn.Module) -> Iterator[None]:
    """Run on aliases of the parameters, which share their memory but nothing of autograd's; their gradients go to the
    parameters at the end."""
    aliases = {p: nn.Parameter(p.detach(), p.requires_grad) for p in network.parameters()}
    places = [(m._parameters, name, p) for m in network.modules() for name, p in m._parameters.items() if p is not None]
    try:
        for held, name, parameter in places:
            held[name] = aliases[parameter]
        yield
    finally:
        for held, name, parameter in places:
            held[name] = parameter
    for parameter, alias in aliases.items():
        parameter.grad = alias.grad


def _clean_up(device: torch.device) -> None:
    """Clean up after a failed recording: torch's generator still waits for its end, so it is reset (every step seeds
    it); raises if the GPU no longer works."""
    if device.type == "cuda":
        generator = torch.cuda.default_generators[device.index or 0]
        generator.graphsafe_set_state(torch.Generator(device).graphsafe_get_state())
        torch.rand(1, device=device)
        torch.cuda.synchronize(device)


class _Recorded:
    """One recorded step: its graph and the memory it reads and writes."""

    def __init__(self, learn: Callable[[Tensor, Tensor], Tensor], network: nn.Module, x: Tensor, y: Tensor):
        self.x, self.y = torch.empty_like(x), torch.empty_like(y)
        self.graph = torch.cuda.CUDAGraph()
        # Thread-local: a loader's threads may allocate pinned memory meanwhile.
        with torch.cuda.graph(self.graph, capture_error_mode="thread_local"), fresh_leaves(network):
            self.losses = learn(self.x, self.y)
        self.gradients = [(p, p.grad) for p in network.parameters()]

    def fits(self, x: Tensor, y: Tensor) -> bool:
        pairs = ((self.x, x), (self.y, y))
        return all(mine.shape == given.shape and mine.dtype == given.dtype for mine, given in pairs)

    def replay(self, x: Tensor, y: Tensor) -> Tensor:
        self.x.copy_(x)
        self.y.copy_(y)
        for parameter, gradient in self.gradients:
            parameter.grad = gradient  # a batch of another shape may have put its own there
        self.graph.replay()
        return self.losses.clone()


class Waits:
    """A context that notices operations on a GPU that the host waits for."""

    def __init__(self, device: torch.device):
        self.found = False
        self._on_gpu = device.type == "cuda"
        self._warnings = warnings.catch_warnings(record=True)

    def __enter__(self) -> Waits:
        if self._on_gpu:
            self._heard = self._warnings.__enter__()
            warnings.simplefilter("always")
            self._mode = torch.cuda.get_sync_debug_mode()
            torch.cuda.set_sync_debug_mode("warn")
        return self

    def __exit__(self, *error: Any) -> None:
        if not self._on_gpu:
            return
        torch.cuda.set_sync_debug_mode(self._mode)
        self._warnings.__exit__(*error)
        for heard in self._heard or ():
            text = str(heard.message)
            if "synchronizing CUDA operation" in text:
                self.found = True
            elif "debug mode is a prototype" not in text:  # which setting the mode itself causes
                warnings.warn_explicit(heard.message, heard.category, heard.filename, heard.lineno)


def _host_randomness() -> Any:
    """The states of the generators that a forward may draw from on the host, to be compared."""
    of_torch, of_numpy, of_python = swap_random_states()
    return of_torch.tolist(), [np.asarray(part).tolist() for part in of_numpy], of_python
