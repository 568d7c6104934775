"""How long a forward pass takes, measured: the median of alternating passes, so that all see the same machine."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from bcnet.latency.onnx import OnnxNetwork, write_onnx

ROUNDS = 50
LONGEST = 5.0  # seconds of measuring


@torch.inference_mode()
def compare_latency(networks: Mapping[str, nn.Module], example: Tensor) -> dict[str, float]:
    """Milliseconds of one forward pass on ``example``, by name."""
    times: dict[str, list[float]] = {name: [] for name in networks}
    end = time.monotonic() + LONGEST
    for turn in range(ROUNDS + 3):
        for name, network in networks.items():
            start = time.perf_counter()
            network(example)
            if example.is_cuda:
                torch.cuda.synchronize()
            if turn >= 3:  # the first passes warm caches up
                times[name].append(1e3 * (time.perf_counter() - start))
        if turn > 5 and time.monotonic() > end:
            break
    return {name: float(np.median(values)) for name, values in times.items()}


def compare_backend(networks: Mapping[str, nn.Module], example: Tensor, backend: str) -> dict[str, float]:
    """Milliseconds of one forward pass by ``backend``: ``torch`` as networks are, or ``onnxruntime`` on the CPU."""
    if backend == "torch":
        return compare_latency(networks, example)
    inputs = (example[:1].cpu().contiguous(),)
    with tempfile.TemporaryDirectory() as folder:
        written: dict[str, nn.Module] = {}
        for name, network in networks.items():
            path = Path(folder) / f"{name}.onnx"
            write_onnx(network.cpu(), inputs, path)
            written[name] = OnnxNetwork(path)
        return compare_latency(written, inputs[0])
