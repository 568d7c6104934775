"""The page of accuracy at half of the latency: which rows become which line."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def rivals() -> Any:
    pytest.importorskip("torch_pruning")
    sys.path.insert(0, str(BENCHMARKS))
    try:
        yield importlib.import_module("latency_rivals")
    finally:
        sys.path.remove(str(BENCHMARKS))


def row(method: str, seed: int, accuracy: float, loss: float) -> dict[str, Any]:
    both = {"accuracy": accuracy, "loss": loss}
    return {"network": "resnet18_cifar", "seed": seed, "method": method, "val": both, "test": both}


ROWS = [
    {"provenance": {}},
    {"given": "resnet18_cifar", "test": {"accuracy": 94.0, "loss": 0.2}},
    row("bcnet-near-1", 1, 93.0, 0.30), row("bcnet-uniform", 1, 95.0, 0.40), row("tp-global-l2", 1, 92.0, 0.1),
    row("bcnet-near-1", 2, 93.2, 0.30), row("bcnet-uniform", 2, 92.6, 0.29), row("tp-global-l2", 2, 92.0, 0.1),
]  # fmt: skip


def measured(**latencies: float) -> dict[str, Any]:
    return {"resnet18_cifar": {name.replace("_", "-"): {"latency": [value]} for name, value in latencies.items()}}


def test_bcnet_is_the_finalist_of_least_held_out_loss(rivals: Any) -> None:
    found = rivals.lines(ROWS, measured(bcnet_near_1=0.49, bcnet_uniform=0.5, tp_global_l2=0.51))
    assert found[2:] == [
        "| resnet18_cifar | as given | 1 | | 94.00 | |",
        "| resnet18_cifar | **bcnet: least held-out loss** | 0.490, 0.500 | 93.00, 92.60 | 92.80 |  |",
        "| resnet18_cifar | bcnet-near-1 | 0.490 | 93.00, 93.20 | 93.10 |  |",
        "| resnet18_cifar | bcnet-uniform | 0.500 | 95.00, 92.60 | 93.80 |  |",
        "| resnet18_cifar | tp-global-l2 | 0.510 | 92.00, 92.00 | 92.00 | +0.80 (-1.74 to +3.34) |",
    ]


def test_one_seed_has_no_interval_and_the_page_keeps_what_is_around_the_table(
    rivals: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.set_num_threads", lambda _: None)
    page, rows, latencies = (tmp_path / name for name in ("page.md", "rows.jsonl", "latencies.json"))
    page.write_text("before\n<!-- rivals: begin -->\nold\n<!-- rivals: end -->\nafter\n")
    rows.write_text("".join(json.dumps(each) + "\n" for each in ROWS[:5]))
    latencies.write_text(json.dumps(measured(bcnet_near_1=0.49, bcnet_uniform=0.5, tp_global_l2=0.51)))
    rivals.main(["page", "--rows", str(rows), "--latencies", str(latencies), "--page", str(page)])
    text = page.read_text()
    assert text.startswith("before\n")
    assert text.endswith("\nafter\n")
    assert "old" not in text
    assert "| 92.00 | +1.00, one seed |" in text
