"""How long a forward pass takes, measured: the median of alternating passes, so that all see the same machine."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack

import numpy as np
import torch
from torch import Tensor, nn

from bcnet.latency.onnx import as_onnx
from bcnet.latency.table import LatencyTable, Measured
from bcnet.latency.timing import TimingConfig, clock, threads
from bcnet.space.network import NetworkSpace
from bcnet.space.state import duplicate
from bcnet.space.widths import Widths

ROUNDS = 50
LONGEST = 5.0  # seconds of measuring


@torch.inference_mode()
def compare_latency(networks: Mapping[str, nn.Module], example: Tensor) -> dict[str, float]:
    """Milliseconds of one forward pass on ``example``, by name."""
    times: dict[str, list[float]] = {name: [] for name in networks}
    now, end = clock(not example.is_cuda), time.monotonic() + LONGEST
    for turn in range(ROUNDS + 3):
        for name, network in networks.items():
            start = now()
            network(example)
            if example.is_cuda:
                torch.cuda.synchronize()
            if turn >= 3:  # the first passes warm caches up
                times[name].append((now() - start) / 1e6)
        if turn > 5 and time.monotonic() > end:
            break
    return {name: float(np.median(values)) for name, values in times.items()}


def compare_backend(networks: Mapping[str, nn.Module], example: Tensor, config: TimingConfig) -> dict[str, float]:
    """Milliseconds of one forward pass on ``config.batch`` inputs like the first of ``example``, by ``config.backend``:
    ``torch`` as networks are, or ``onnxruntime`` on the CPU."""
    inputs = example[:1].expand(config.batch, *example.shape[1:]).contiguous()
    with threads(config.threads), ExitStack() as stack:
        if config.backend == "torch":
            return compare_latency(networks, inputs)
        given = (inputs.cpu(),)
        copies = {name: duplicate(net).cpu() for name, net in networks.items()}  # the networks stay where they are
        written = {name: stack.enter_context(as_onnx(net, given)) for name, net in copies.items()}
        return compare_latency(written, *given)


def measure_side_by_side(
    space: NetworkSpace, table: LatencyTable, rows: Sequence[Widths], config: TimingConfig
) -> list[Measured]:
    """Networks at widths ``rows`` as ``table`` predicts them and as they are measured, in alternating passes: how they
    compare with each other is then certain, whatever else the machine does."""
    networks = {str(i): space.build(row, weights_of=space.model).eval() for i, row in enumerate(rows)}
    found = compare_backend(networks, space.example[0], config)
    predictions = table(np.stack(rows)).tolist()
    return [
        Measured(tuple(row.tolist()), float(predicted), 1e6 * found[str(i)], fitted=False)
        for i, (row, predicted) in enumerate(zip(rows, predictions, strict=True))
    ]
