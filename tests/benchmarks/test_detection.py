"""Slim backbones in torchvision's detectors, and the benchmark of them at its smallest."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from bcnet.errors import BcnetError
from bcnet.models.detection import detection_backbone

pytest.importorskip("torchvision")
FOLDER = str(Path(__file__).parents[2] / "benchmarks")
sys.path.insert(0, FOLDER)
import detection  # noqa: E402
import detection_shapes as shapes  # noqa: E402

sys.path.remove(FOLDER)
pytestmark = pytest.mark.usefixtures("one_thread")


def answers(scenes: list[Any], wrong: bool = False) -> list[dict[str, Any]]:
    """Every shape found as it is, or under another name."""
    return [
        {
            "boxes": s.boxes.numpy(),
            "labels": s.labels.numpy() % shapes.CLASSES + 1 if wrong else s.labels.numpy(),
            "scores": np.linspace(1, 0.5, len(s.labels)),
        }
        for s in scenes
    ]


def test_scenes_are_the_same_every_time_and_boxes_fit_their_shapes() -> None:
    first, again = shapes.scenes(20, 64, 3), shapes.scenes(20, 64, 3)
    for a, b in zip(first, again, strict=True):
        assert torch.equal(a.image, b.image)
        assert torch.equal(a.boxes, b.boxes)
        assert len(a.boxes) == len(a.labels) >= 1
        assert bool((a.boxes[:, 2:] > a.boxes[:, :2]).all())
        assert 0 <= float(a.boxes.min()) <= float(a.boxes.max()) <= 64
    assert not torch.equal(shapes.scenes(1, 64, 4)[0].image, first[0].image)


def test_map_of_what_is_known() -> None:
    scenes = shapes.scenes(30, 64, 0)
    assert shapes.map_of(answers(scenes), scenes) == {"map": 100.0, "map50": 100.0}
    assert shapes.map_of(answers(scenes, wrong=True), scenes)["map"] < 20
    half = [{key: value[:1] for key, value in answer.items()} for answer in answers(scenes)]
    found = sum(1 for _ in scenes) / sum(len(s.labels) for s in scenes)
    assert abs(shapes.map_of(half, scenes)["map"] / 100 - found) < 0.15
    moved = [{**answer, "boxes": answer["boxes"] + 3} for answer in answers(scenes)]
    judged = shapes.map_of(moved, scenes)
    assert judged["map"] < judged["map50"] <= 100


def test_the_smallest_benchmark_ends_with_a_row_of_every_detector(tmp_path: Path) -> None:
    out = tmp_path / "detection.json"
    with torch.compiler.set_stance("force_eager"):  # torchvision's RoIAlign compiles where it has no operator
        rows = detection.measure(detection.TINY, [0], "cpu", out)
    names = [(row["detector"], row["network"]) for row in rows]
    assert names == [(kind, name) for kind in detection.DETECTORS for name in ("uniform", "found")]
    for row in rows:
        assert row["flops_share"] <= 0.25
        assert 0 <= row["map"] <= row["map50"] <= 100
    before = out.read_bytes()
    assert detection.measure(detection.TINY, [0], "cpu", out) == rows  # nothing is made again
    assert out.read_bytes() == before
    assert detection.measure(detection.TINY, [1], "cpu", out, deadline=0.0) == rows  # nor is anything begun too late
    text = detection.page({**json.loads(before), "workers": 1})
    assert f"| RetinaNet | found | 1 | {rows[1]['map']:.2f} | {rows[1]['map50']:.1f} |" in text


def test_the_page_pairs_networks_by_seed() -> None:
    known = {"map50": 50.0, "flops_share": 0.25, "gflops": 1.0, "accuracy": 0.9}
    given = [("uniform", 0, 30.0), ("found", 0, 32.0), ("uniform", 1, 40.0), ("found", 1, 41.0), ("uniform", 2, 90.0)]
    rows = [{"detector": "RetinaNet", "network": n, "seed": s, "map": m, **known} for n, s, m in given]
    facts = {"date": "2026-11-17", "machine": "a GPU", "versions": {"torch": "2.11"}, "commit": "abc", "command": "x"}
    text = detection.page({**facts, "workers": 3, "rows": rows})
    assert "- RetinaNet: found over uniform by +1.50 ± 6.35 points of mAP (+2.00, +1.00).\n" in text
    assert "| Faster R-CNN | found | 0 | | | | | |\n" in text


def test_a_backbone_says_what_it_lacks() -> None:
    network = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU())
    with pytest.raises(BcnetError) as error:
        detection_backbone(network, torch.zeros(1, 3, 8, 8))
    assert str(error.value) == "the network has no stage 'layer2': name some of its children (0, 1)"
    pyramid = detection_backbone(network.train(), torch.zeros(1, 3, 8, 8), ["0", "1"], channels=6)
    assert pyramid.training
    assert [tuple(x.shape[:2]) for x in pyramid(torch.zeros(2, 3, 8, 8)).values()] == [(2, 6)] * 3
