"""Measures the table: loading it, a million queries, its correlations and its noise ceiling.

    python benchmarks/table.py FOLDER_OF_RELEASED_TABLES

Writes docs/results/table.json.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from bcnet.bench import ChannelBench, kendall
from bcnet.utils.provenance import provenance

REPEATS = 5
QUERIES = 1_000_000
RESULTS = Path(__file__).parents[1] / "docs" / "results" / "table.json"


def seconds(call: Callable[[], object]) -> dict[str, float]:
    """The median of REPEATS runs after one to warm up, and the worst of all."""
    taken = []
    for _ in range(REPEATS + 1):
        start = time.perf_counter()
        call()
        taken.append(time.perf_counter() - start)
    return {"median": round(float(np.median(taken[1:])), 4), "worst": round(max(taken), 4)}


def measure(name: str, folder: str) -> dict[str, object]:
    table = ChannelBench.load(name, folder)
    widths = table.space.sample(np.random.default_rng(0), QUERIES)
    budgets = {"flops": 0.5 * float(table.costs["flops"].max())}
    return {
        "load": seconds(lambda: ChannelBench.load(name, folder)),
        "million_queries": seconds(lambda: table.query(widths)),
        "million_scores": seconds(lambda: table.scorer().score_many(widths)),
        "best_under_a_budget": seconds(lambda: table.best(budgets)),
        "kendall": seconds(lambda: kendall(table.costs["flops"], table.mean)),
        "ceiling": seconds(table.ceiling),
    }


def main(folder: str) -> None:
    results = {
        **provenance(packages=("numpy", "scipy")),
        "unit": f"seconds: the median of {REPEATS} runs after one to warm up, and the worst of all",
        "mobilenet": measure("mobilenet", folder),
        "resnet": measure("resnet", folder),
    }
    RESULTS.write_text(json.dumps(results, indent=2) + "\n")
    print(RESULTS.read_text())


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python benchmarks/table.py FOLDER_OF_RELEASED_TABLES")
    main(sys.argv[1])
