"""How long layers and networks take on this machine: by torch, or by onnxruntime on the CPU."""

from __future__ import annotations

import statistics
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Annotated, Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from bcnet.latency.onnx import OnnxNetwork, as_onnx, onnxruntime
from bcnet.utils.settings import Count, Positive, checked

LEAST_RUNS, MOST_RUNS = 5, 50
TURNS = 3
"""How often each figure is taken, with all others in between; the least counts, and what else the machine did hardly
does. One turn was off by up to a factor of 2."""
Once = Callable[[], object]


@checked
class TimingConfig:
    """How to measure."""

    batch: Annotated[Count, "inputs at once"] = 1
    threads: Annotated[Count | None, "threads of the CPU; left out: as many as the run uses"] = None
    backend: Annotated[Literal["torch", "onnxruntime"], "torch, or onnxruntime on the CPU"] = "torch"
    seconds: Annotated[Positive, "the most time for each figure of the table"] = 0.02

    def facts(self, device: torch.device) -> dict[str, Any]:
        """Where and how latency is measured, without which a figure means nothing."""
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
        threads = self.threads or torch.get_num_threads()
        return {**asdict(self), "device": name, "threads": threads, "torch": torch.__version__}


@dataclass(frozen=True)
class Operation:
    """A convolution or a linear layer at fixed sizes. ``lead`` are the sizes of the input beside batch and
    channels; ``kernel`` is empty for a linear layer."""

    inputs: int
    outputs: int
    groups: int
    lead: tuple[int, ...]
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...] | str
    dilation: tuple[int, ...]
    transposed: bool
    bias: bool

    def module(self) -> nn.Module:
        if not self.kernel:
            return nn.Linear(self.inputs, self.outputs, self.bias)
        kinds: Any = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
        if not self.transposed:
            kinds = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
        options = {"stride": self.stride, "padding": self.padding, "dilation": self.dilation, "groups": self.groups}
        made: nn.Module = kinds[len(self.kernel) - 1](self.inputs, self.outputs, self.kernel, bias=self.bias, **options)
        return made

    def example(self, batch: int) -> Tensor:
        shape = (batch, self.inputs, *self.lead) if self.kernel else (batch, *self.lead, self.inputs)
        return torch.randn(shape)


class Timer(ABC):
    """Makes a layer or a network ready to run, and says how many nanoseconds a run takes, the median of several.
    ``overhead`` of these are spent on calling a layer by itself, and not within a network."""

    overhead = 0.0

    def __init__(self, seconds: float, device: torch.device):
        self._seconds, self._now = seconds, clock(device.type == "cpu")

    @abstractmethod
    def layer(self, operation: Operation, batch: int) -> Once: ...

    @abstractmethod
    def network(self, network: nn.Module, inputs: tuple[Tensor, ...]) -> Once: ...

    def time(self, once: Once) -> float:
        return _median(once, self._seconds, self._now)


@contextmanager
def open_timer(config: TimingConfig, device: torch.device) -> Iterator[Timer]:
    """A timer with the threads of ``config``; torch gets its own back afterwards."""
    with threads(config.threads):
        yield _OnnxTimer(config) if config.backend == "onnxruntime" else _TorchTimer(config, device)


@contextmanager
def threads(number: int | None) -> Iterator[None]:
    """Use this many CPU threads inside; torch's own choice if None."""
    before = torch.get_num_threads()
    torch.set_num_threads(number or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class _TorchTimer(Timer):
    def __init__(self, config: TimingConfig, device: torch.device):
        super().__init__(config.seconds, device)
        self._device = device

    def layer(self, operation: Operation, batch: int) -> Once:
        return self.network(operation.module(), (operation.example(batch),))

    def network(self, network: nn.Module, inputs: tuple[Tensor, ...]) -> Once:
        network, inputs = network.to(self._device).eval(), tuple(x.to(self._device) for x in inputs)

        @torch.inference_mode()
        def once() -> None:
            network(*inputs)
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)

        return once


class _OnnxTimer(Timer):
    def __init__(self, config: TimingConfig):
        super().__init__(config.seconds, torch.device("cpu"))
        onnxruntime()
        nothing = Operation(1, 1, 1, (1, 1), (1, 1), (1, 1), (0, 0), (1, 1), False, False)
        self.overhead = min(self.time(self.layer(nothing, 1)) for _ in range(TURNS))

    def layer(self, operation: Operation, batch: int) -> Once:
        network, example = OnnxNetwork(onnx_layer(operation, batch)), operation.example(batch)
        return lambda: network(example)

    def network(self, network: nn.Module, inputs: tuple[Tensor, ...]) -> Once:
        inputs = tuple(x.cpu() for x in inputs)
        with as_onnx(network.cpu(), inputs) as made:
            return lambda: made(*inputs)


def clock(on_cpu: bool) -> Callable[[], int]:
    """A clock in nanoseconds: wall time, or, if one thread does all the work, only the time in which it had a core:
    other programs do not count then, and a pass takes as long as on an idle machine."""
    alone = on_cpu and torch.get_num_threads() == 1 and time.get_clock_info("thread_time").resolution <= 1e-6
    return time.thread_time_ns if alone else time.perf_counter_ns


def onnx_layer(operation: Operation, batch: int) -> bytes:
    """An ONNX model of one layer, written by hand: a hundred times faster than an export."""
    from onnx import TensorProto, helper, numpy_helper

    module: Any = operation.module()
    weight = module.weight.detach() if operation.kernel else module.weight.detach().T.contiguous()
    parts = [numpy_helper.from_array(weight.numpy(), "w")]
    parts += [numpy_helper.from_array(module.bias.detach().numpy(), "b")] if operation.bias else []
    names = ["x", *(part.name for part in parts)]
    if operation.kernel:
        pads = operation.padding
        padding = {"auto_pad": "SAME_UPPER"} if pads == "same" else {"pads": [*pads, *pads]} if pads != "valid" else {}
        options: dict[str, Any] = {"strides": operation.stride, "dilations": operation.dilation, **padding}
        options["group"] = operation.groups
        nodes = [helper.make_node("ConvTranspose" if operation.transposed else "Conv", names, ["y"], **options)]
    else:
        product = helper.make_node("MatMul", ["x", "w"], ["p" if operation.bias else "y"])
        nodes = [product, helper.make_node("Add", ["p", "b"], ["y"])] if operation.bias else [product]
    given = helper.make_tensor_value_info("x", TensorProto.FLOAT, list(operation.example(batch).shape))
    result = helper.make_tensor_value_info("y", TensorProto.FLOAT, None)
    graph = helper.make_graph(nodes, "layer", [given], [result], parts)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    written: bytes = model.SerializeToString()
    return written


def _median(once: Once, seconds: float, now: Callable[[], int]) -> float:
    """Nanoseconds of the median run: at least ``LEAST_RUNS``, then as many as fit into ``seconds``."""
    for _ in range(2):  # caches, and the choice of an algorithm
        once()
    times: list[int] = []
    for _ in range(MOST_RUNS):
        start = now()
        once()
        times.append(now() - start)
        if len(times) >= LEAST_RUNS and np.sum(times) > 1e9 * seconds:
            break
    return float(statistics.median(times))
