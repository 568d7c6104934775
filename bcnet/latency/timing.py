"""How long layers and networks take on this machine: by torch, or by onnxruntime on the CPU."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, Literal, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from bcnet.latency.onnx import OnnxNetwork, as_onnx, onnxruntime
from bcnet.utils.settings import Count, Positive, checked

LEAST_RUNS, MOST_RUNS = 5, 50


@checked
class TimingConfig:
    """How to measure: ``batch`` inputs at once, ``threads`` of the CPU (torch's own number where left out),
    ``backend`` torch or onnxruntime, and up to ``seconds`` for each figure."""

    batch: Count = 1
    threads: Count | None = None
    backend: Literal["torch", "onnxruntime"] = "torch"
    seconds: Positive = 0.02

    def facts(self, device: torch.device) -> dict[str, Any]:
        """What a latency is worth nothing without: where and how it was measured."""
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


class Timer(Protocol):
    """Nanoseconds of one pass, the median of several; ``turns`` is how often each figure should be taken."""

    turns: int

    def layer(self, operation: Operation, batch: int) -> float: ...

    def network(self, network: nn.Module, inputs: tuple[Tensor, ...]) -> float: ...


@contextmanager
def open_timer(config: TimingConfig, device: torch.device) -> Iterator[Timer]:
    """A timer with the threads of ``config``; torch gets its own back afterwards."""
    with threads(config.threads):
        yield _OnnxTimer(config) if config.backend == "onnxruntime" else _TorchTimer(config, device)


@contextmanager
def threads(number: int | None) -> Iterator[None]:
    """So many threads of the CPU inside; torch's own choice where it is left open."""
    before = torch.get_num_threads()
    torch.set_num_threads(number or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class _TorchTimer:
    # The least of a few turns, each after all others have had theirs: what else the machine did, and where the
    # allocator put things, then counts little. One turn was off by up to a factor of 2.
    turns = 3

    def __init__(self, config: TimingConfig, device: torch.device):
        self._seconds, self._device = config.seconds, device

    def layer(self, operation: Operation, batch: int) -> float:
        return self.network(operation.module(), (operation.example(batch),))

    @torch.inference_mode()
    def network(self, network: nn.Module, inputs: tuple[Tensor, ...]) -> float:
        network, inputs = network.to(self._device).eval(), tuple(x.to(self._device) for x in inputs)

        def once() -> None:
            network(*inputs)
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)

        return _median(once, self._seconds)


class _OnnxTimer:
    turns = 1  # onnxruntime plans its memory, and exporting takes far longer than timing

    def __init__(self, config: TimingConfig):
        onnxruntime()
        self._seconds = config.seconds

    def layer(self, operation: Operation, batch: int) -> float:
        return self._time(OnnxNetwork(onnx_layer(operation, batch)), (operation.example(batch),))

    def network(self, network: nn.Module, inputs: tuple[Tensor, ...]) -> float:
        inputs = tuple(x.cpu() for x in inputs)
        with as_onnx(network.cpu(), inputs) as made:
            return self._time(made, inputs)

    def _time(self, network: OnnxNetwork, inputs: tuple[Tensor, ...]) -> float:
        return min(_median(lambda: network(*inputs), self._seconds) for _ in range(3))


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


def _median(once: Callable[[], object], seconds: float) -> float:
    """Nanoseconds of the median run: at least ``LEAST_RUNS``, then as many as fit into ``seconds``."""
    for _ in range(2):  # caches, and the choice of an algorithm
        once()
    times: list[int] = []
    for _ in range(MOST_RUNS):
        start = time.perf_counter_ns()
        once()
        times.append(time.perf_counter_ns() - start)
        if len(times) >= LEAST_RUNS and np.sum(times) > 1e9 * seconds:
            break
    return float(statistics.median(times))
