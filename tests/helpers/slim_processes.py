"""Slims a tiny network into the folder that is named, as one of several processes or alone."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import tinyrun
import torch
from torch import Tensor, nn

import bcnet

BATCH = 64


def network() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Conv2d(1, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU()]
    layers += [nn.Conv2d(8, 8, 3, stride=2, bias=False), nn.BatchNorm2d(8), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(1), nn.Linear(8, 2))


def main(out: Path) -> None:
    x = torch.randn(4 * BATCH, 1, 8, 8, generator=torch.Generator().manual_seed(1))
    y = (x.mean((1, 2, 3)) > 0).long()
    train = list(zip(x[: 2 * BATCH].split(BATCH), y[: 2 * BATCH].split(BATCH), strict=True))
    val = [(x[2 * BATCH :], y[2 * BATCH :])]
    learnt_from: set[int] = set()

    def loss(output: Tensor, target: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            learnt_from.add(len(target))
        return nn.functional.cross_entropy(output, target)

    task = bcnet.Task(loss=loss, score=lambda output, target: (output.argmax(1) == target).double())
    recipe = {key: tinyrun.TRAINED[key] for key in ("healing", "search", "race", "retrain", "given", "threads")}
    recipe |= {"fallback": False, "least": 2, "distillation": None, "compare": ["full", "uniform"]}
    bcnet.slim(network(), x[:2], train, val, task=task, recipe=recipe, out=out, device="cpu", progress=False)
    rank = os.environ.get("RANK", "0")
    out.with_name(f"{out.name}-{rank}.json").write_text(json.dumps(sorted(learnt_from)))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
