"""Networks as ONNX files."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from torch import nn

pytest.importorskip("onnxscript")
from bcnet.latency.compare import compare_backend
from bcnet.latency.onnx import OnnxNetwork, write_onnx
from bcnet.latency.timing import TimingConfig


def test_a_network_in_channels_last_is_written_for_any_batch_without_a_word(tmp_path: Path) -> None:
    """It was written for one batch size, after torch had logged pages of its exporter's errors."""
    heard: list[str] = []

    class Ear(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.levelno >= logging.WARNING:
                heard.append(record.getMessage())

    layers = (nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3))
    network = nn.Sequential(*layers).eval().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    logger, ear = logging.getLogger("torch"), Ear()
    logger.addHandler(ear)
    try:
        assert write_onnx(network, (torch.zeros(1, 1, 8, 8),), tmp_path / "network.onnx")
    finally:
        logger.removeHandler(ear)
    assert heard == []
    x = torch.randn(3, 1, 8, 8)
    torch.testing.assert_close(OnnxNetwork(tmp_path / "network.onnx")(x)[0], network(x))
    assert network[0].weight.is_contiguous(memory_format=torch.channels_last)


def test_networks_that_are_compared_stay_where_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU they were moved to the CPU for onnxruntime, and what a run measured next ran there."""
    networks = {name: nn.Sequential(nn.Conv2d(3, width, 3), nn.ReLU()).eval() for name, width in (("a", 4), ("b", 8))}
    moved: list[nn.Module] = []
    move = nn.Module.cpu

    def watched(self: nn.Module) -> nn.Module:
        moved.append(self)
        return move(self)

    monkeypatch.setattr(nn.Module, "cpu", watched)
    found = compare_backend(networks, torch.randn(2, 3, 8, 8), TimingConfig(backend="onnxruntime", threads=1))
    assert all(found[name] > 0 for name in networks)
    assert moved
    assert not {id(net) for net in networks.values()} & {id(net) for net in moved}
