"""What the rows of benchmarks/speed_rows.py share: a device with sizes that suit it, and the ways to step."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from without_gpu import reference

from bcnet.accel.fused_step import FusedEngine, PlainStep
from bcnet.search import Constraints
from bcnet.space.network import NetworkSpace, trace
from bcnet.supernet.supernet import Supernet
from bcnet.training.cuda_graph import CudaGraphStep

ROUNDS, STEPS = 3, 20
MOST, LASTING = 200, 4.0
"""Steps of a recipe, and seconds after which there are no more."""
Action = Callable[[], object]
Network = TypeVar("Network", bound=nn.Module)


class Bench:
    """A device, and sizes that suit it; ``warm`` runs everything for a moment, on few images."""

    def __init__(self, device: str, warm: bool = False):
        self.device, self.tiny, self.warm = device, device == "cpu", warm or device == "cpu"

    def batch(self, count: int, size: int, classes: int = 10, whole: bool = False) -> tuple[Tensor, Tensor]:
        x = torch.randn(2 if self.tiny else 16 if self.warm and not whole else count, 3, size, size)
        x = x.to(self.device, memory_format=torch.channels_last)
        return x, torch.randint(0, classes, (len(x),), device=self.device)

    def ms(self, steps: int = STEPS, **actions: Action) -> dict[str, float]:
        """Milliseconds of actions once they are warm, by turns: of each the median of three."""
        found: dict[str, list[float]] = {name: [] for name in actions}
        for action in actions.values():
            for _ in range(2 if self.warm else 6):
                action()
        for _ in range(1 if self.warm else ROUNDS):
            for name, action in actions.items():
                self.wait()
                start = time.perf_counter()
                for _ in range(1 if self.warm else steps):
                    action()
                self.wait()
                found[name].append(1e3 * (time.perf_counter() - start) / (1 if self.warm else steps))
        return {f"{name}_ms": sorted(times)[len(times) // 2] for name, times in found.items()}

    def steps(self, name: str, make: Callable[[Tensor, Tensor], Action], x: Tensor, y: Tensor) -> dict[str, Any]:
        """Up to 200 steps of an action on a batch, at most some seconds of them, and the memory they take; where the
        batch does not fit, in parts as a training does."""
        parts, action = 1, None
        while action is None:
            try:
                action = make(x, y)
                for _ in range(2 if self.tiny else 5):  # warm, and recorded
                    action()
            except torch.OutOfMemoryError:
                parts, action = 2 * parts, None
                x, y = x[: len(x) // 2], y[: len(y) // 2]
                torch.cuda.empty_cache()
        count, begun = 0, self._now()
        while count < (2 if self.tiny else MOST) and (count % 5 or self._now() - begun < LASTING):
            action()
            count += 1
        seconds = self._now() - begun
        memory = 0.0 if self.tiny else torch.cuda.max_memory_allocated() / 2**30
        found = {"steps": count, "parts": parts, "images_per_second": count * len(x) / seconds, "gib": memory}
        return {f"{name}_{key}": value for key, value in found.items()}

    def _now(self) -> float:
        self.wait()
        return time.perf_counter()

    def wait(self) -> None:
        if not self.tiny:
            torch.cuda.synchronize()

    def on(self, network: Network) -> Network:
        return network.to(self.device, memory_format=torch.channels_last).train()  # type: ignore[call-overload]

    def engine(self, net: Supernet) -> FusedEngine:
        return FusedEngine(net, reference, torch.float32) if self.tiny else FusedEngine(net)

    def fused(self, network: nn.Module, x: Tensor, y: Tensor, teacher: nn.Module | None = None) -> Action:
        """A fused step with SGD."""
        network = self.on(network)
        kernels = (reference, torch.float32) if self.tiny else (None, torch.bfloat16)
        step = PlainStep(network, x, loss_of, teacher, *kernels)
        sgd = self.sgd(network)
        return lambda: (step(x, y), sgd.step())

    def sgd(self, network: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(network.parameters(), 1e-3, 0.9, fused=not self.tiny)

    def plain(self, network: nn.Module, x: Tensor, y: Tensor, teacher: nn.Module | None = None) -> Action:
        """PyTorch's step: autocast, channels last, a CUDA graph."""
        network = self.on(network)

        def learn(images: Tensor, labels: Tensor) -> Tensor:
            network.zero_grad(set_to_none=self.tiny)
            with torch.autocast(self.device, torch.bfloat16):
                with torch.no_grad():
                    taught = None if teacher is None else teacher(images)
                found = loss_of(network(images), labels, taught)
            found.backward()
            return found.detach()[None]

        step = learn if self.tiny else CudaGraphStep(learn, network)
        sgd = self.sgd(network)
        return lambda: (step(x, y), sgd.step())

    def compiled(self, network: nn.Module, x: Tensor, y: Tensor) -> Action:
        """PyTorch's step by torch.compile, which makes CUDA graphs of its own."""
        network = self.on(network)
        call = network if self.tiny else torch.compile(network, mode="reduce-overhead")
        sgd = self.sgd(network)

        def step() -> None:
            sgd.zero_grad()
            with torch.autocast(self.device, torch.bfloat16):
                F.cross_entropy(call(x), y).backward()
            sgd.step()

        return step


def loss_of(output: Any, y: Tensor, taught: Any) -> Tensor:
    labelled = F.cross_entropy(output.float(), y)
    if taught is None:
        return labelled
    return 0.1 * labelled + 0.9 * F.cross_entropy(output.float(), taught.float().softmax(1))


def uniform(space: NetworkSpace, budget: str) -> Any:
    return Constraints(space, space.costs, [budget]).uniform()


def supernet_of(model: nn.Module, size: int, groups: int) -> Supernet:
    """On the CPU, as all that is not timed."""
    space = trace(model, torch.randn(2, 3, size, size), groups=groups, check=False)
    return Supernet(space, "bcv2").train()
