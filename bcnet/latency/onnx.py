"""Networks as ONNX files, run by onnxruntime on the CPU."""

from __future__ import annotations

import importlib
import logging
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bcnet.errors import BcnetError, first_line
from bcnet.space.state import duplicate
from bcnet.utils.modes import quiet


class OnnxNetwork(nn.Module):
    """An ONNX file, or its bytes, as a network, run by onnxruntime on the CPU with as many threads as torch uses."""

    def __init__(self, model: str | Path | bytes):
        super().__init__()
        runtime = onnxruntime()
        options = runtime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        model = str(model) if isinstance(model, Path) else model
        self._session = runtime.InferenceSession(model, options, providers=["CPUExecutionProvider"])

    @property
    def any_batch(self) -> bool:
        return all(isinstance(entry.shape[0], str) for entry in self._session.get_inputs())

    def forward(self, *inputs: Tensor) -> list[Tensor]:
        named = {entry.name: x.numpy() for entry, x in zip(self._session.get_inputs(), inputs, strict=True)}
        return [torch.from_numpy(array) for array in self._session.run(None, named)]


def write_onnx(
    network: nn.Module, inputs: tuple[Tensor, ...], path: Path, outputs: Sequence[str] | None = None
) -> bool:
    """Write ``network`` as a file; whether it takes batches of any size. ``outputs`` are names for its outputs."""
    names = ["input"] if len(inputs) == 1 else [f"input{i}" for i in range(len(inputs))]
    settings: dict[str, Any] = {"dynamo": True, "external_data": False, "input_names": names, "verbose": False}
    network = _contiguous(network.eval())
    with quiet_exports():
        for shapes in (any_batch(inputs), None):
            try:
                torch.onnx.export(network, inputs, str(path), dynamic_shapes=shapes, output_names=outputs, **settings)
                return OnnxNetwork(path).any_batch
            except Exception as error:  # the network's own code may tie it to a batch size: torch has no one class
                failure = error
    reason = first_line(failure)
    raise BcnetError(f"torch cannot write this network as ONNX ({reason}): export it as pt2") from failure


def _contiguous(network: nn.Module) -> nn.Module:
    """A copy of ``network`` with its weights in torch's own order: others, such as channels_last, tie torch's exporter
    to one batch size, also where ``is_contiguous`` does not tell them apart."""
    copied = duplicate(network)
    for tensor in (*copied.parameters(), *copied.buffers()):
        tensor.data = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device).copy_(tensor.data)
    return copied


@contextmanager
def as_onnx(network: nn.Module, inputs: tuple[Tensor, ...]) -> Iterator[OnnxNetwork]:
    """``network``, on the CPU, as onnxruntime runs it; its file exists as long as the context does."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "network.onnx"
        write_onnx(network, inputs, path)
        yield OnnxNetwork(path)


def any_batch(inputs: Sequence[Tensor]) -> tuple[dict[int, Any], ...]:
    """Arguments of torch's exporters that make a file take batches of any size."""
    batch = torch.export.Dim("batch", min=1)
    return tuple({0: batch} for _ in inputs)


def onnxruntime() -> Any:
    """The package, with those that torch needs to write ONNX; a sentence where one is missing."""
    try:
        for package in ("onnx", "onnxscript"):
            importlib.import_module(package)
        return importlib.import_module("onnxruntime")
    except ModuleNotFoundError as error:
        raise BcnetError(f'{error.name} is not installed: pip install "bcnet[onnx]"') from None


def quiet_exports() -> AbstractContextManager[None]:
    """Keep torch's own remarks on exporting from the user, and the pages it logs where one way fails and another is
    tried."""
    return quiet(logging.CRITICAL, "torch.onnx", "torch._guards", "torch._dynamo", "torch.export")
