"""Whether a batch fits into memory: what is reckoned is what its own inputs need."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from bcnet.errors import BcnetError
from bcnet.run import memory


def test_a_batch_counts_each_input_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Inputs are 0.75 MiB and outputs 1 MiB. Two inputs that are a view of all were once taken for all of them, which
    made 100 MiB of this."""
    meminfo = tmp_path / "meminfo"
    monkeypatch.setattr(memory, "MEMINFO", meminfo)
    model, batch = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU()), torch.zeros(64, 3, 32, 32)
    meminfo.write_text("MemAvailable: 10240 kB\nSwapFree: 0 kB\n")
    memory.check_batch(model, batch, training=True)
    meminfo.write_text("MemAvailable: 1024 kB\nSwapFree: 0 kB\n")
    with pytest.raises(BcnetError, match=r"^a training step at 64 inputs of shape \(3, 32, 32\) takes about \d"):
        memory.check_batch(model, batch, training=True)
