"""An invented run of a network with many width variables, to draw reports of."""

from __future__ import annotations

from typing import Any

import numpy as np

from bcnet.report import Curve, Figures, ReportData
from bcnet.search import Budget, Trial, best_of
from bcnet.space.widths import WidthVariable, candidates


def example(variables: int = 37, trials: int = 300, percent: bool = True, **changes) -> ReportData:
    rng = np.random.default_rng(0)
    sizes = [64 * 2 ** (4 * i // variables) for i in range(variables)]
    space = tuple(
        WidthVariable(f"layer{i}.conv<1>", candidates(size, 20, 1), (f"layer{i}.conv<1>", f"layer{i}.add & co"))
        for i, size in enumerate(sizes)
    )
    full = tuple(sizes)
    uniform = tuple(int(0.7 * size) for size in sizes)
    tried = [_trial(number, space, rng) for number in range(trials)]
    chosen = best_of(tried, "flops")
    assert chosen is not None
    costs = ("flops", "params", "memory", "latency")
    rows = {
        "full": (full, 0.7661, (4.09e9, 25.6e6, 2**23, 41e6), 40.2),
        "uniform": (uniform, 0.7524, (2e9, 13e6, 2**22, 26e6), 27.1),
        "found": (chosen.widths, 0.7638, (1.99e9, 14e6, 2**22, 24e6), 24.9),
    }
    networks = {
        name: Figures(name, widths, score, dict(zip(costs, values, strict=True)), latency)
        for name, (widths, score, values, latency) in rows.items()
    }
    settings: dict[str, Any] = {
        "model": "torchvision:resnet50",
        "data": "imagefolder:/data/birds & bees",
        "metric": "accuracy",
        "percent": percent,
        "scored_on": "test images",
        "budgets": (Budget("flops", 2.045e9, "flops=50%"),),
        "variables": space,
        "full_widths": full,
        "principle": "bcv2",
        "networks": networks,
        "trials": tuple(tried),
        "chosen": chosen,
        "reference_scores": {"full": 0.62, "uniform": 0.55},
        "supernet_curve": _curve("supernet", 60),
        "retrain_curves": tuple(_curve(name, 90) for name in networks),
        "recipe": "version: 1\nmodel: torchvision:resnet50\n",
        "command": "bcnet run torchvision:resnet50 --data '<folder>' --budget flops=50%",
        "repeat": "bcnet run --recipe runs/birds/recipe.yaml",
        "facts": {"date": "2026-01-01T00:00:00Z", "seed": "0"},
        "gains": tuple(rng.random(variables).tolist()),
        "notes": ("a note with <b>tags</b>",),
    }
    return ReportData(**{**settings, **changes})


def _trial(number: int, space: tuple[WidthVariable, ...], rng: np.random.Generator) -> Trial:
    widths = tuple(int(rng.choice(v.candidates)) for v in space)
    part = sum(w / v.max for w, v in zip(widths, space, strict=True)) / len(space)
    flops = int(4.09e9 * part**2)
    score = 0.2 + 0.5 * (1 - np.exp(-4 * part)) + 0.02 * rng.standard_normal()
    costs = {"flops": flops, "params": flops // 150}
    return Trial(number, widths, float(score), costs, flops <= 2.045e9, 1 + number // 40, 0.1)


def _curve(name: str, epochs: int) -> Curve:
    start = 6.9 - 0.1 * len(name)
    return Curve(name, tuple(float(0.9 + start * np.exp(-e / 12)) for e in range(epochs)))
