"""Measures costing: all 16,384 widths of a Channel-Bench-Macro space at once, by the traced network's costs.

    python benchmarks/cost.py

Uses one core. Writes docs/results/cost.json.
"""

from __future__ import annotations

import json
import os

os.environ |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}

import time
from pathlib import Path

import numpy as np

from bcnet.bench.spaces import get_space
from bcnet.models.load import load_model
from bcnet.utils.provenance import provenance

REPEATS = 50
RESULTS = Path(__file__).parents[1] / "docs" / "results" / "cost.json"


def milliseconds(kind: str) -> dict[str, dict[str, float]]:
    """For each cost the median of REPEATS runs after one to warm up, and the worst of those."""
    widths = get_space(kind).all_widths()
    found = {}
    for name, cost in load_model(f"channel_bench_{kind}").space().costs.items():
        taken = []
        for _ in range(REPEATS + 1):
            start = time.perf_counter()
            cost(widths)
            taken.append(1000 * (time.perf_counter() - start))
        found[name] = {"median": round(float(np.median(taken[1:])), 3), "worst": round(max(taken[1:]), 3)}
    return found


def main() -> None:
    results = {
        **provenance(packages=("numpy", "scipy")),
        "unit": f"milliseconds for 16,384 widths: the median of {REPEATS} runs after one to warm up, and the worst",
        **{kind: milliseconds(kind) for kind in ("mobilenet", "resnet")},
    }
    RESULTS.write_text(json.dumps(results, indent=2) + "\n")
    print(RESULTS.read_text())


if __name__ == "__main__":
    main()
