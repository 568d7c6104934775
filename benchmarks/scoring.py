"""Measures how long the first 100 configurations that a search asks for take, on the digits network.

Generation by generation as the search asks: one call for each configuration, or sharing their prefixes.

    OMP_NUM_THREADS=1 python benchmarks/scoring.py

Writes docs/results/scoring.json. Times are the processor's, so that a busy machine does not count.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from itertools import chain, groupby
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bcnet.accel import SharedEvaluator
from bcnet.accel.enumeration.allocations import Allocations
from bcnet.data import load_data
from bcnet.models.load import load_model
from bcnet.search import SearchConfig, search
from bcnet.space.widths import Widths
from bcnet.supernet.scoring import Evaluator
from bcnet.supernet.supernet import Supernet
from bcnet.utils.provenance import provenance

RESULTS = Path(__file__).parents[1] / "docs" / "results" / "scoring.json"
CONFIGURATIONS, ROUNDS, BUDGET = 100, 5, "flops=50%"


def generations(net: Supernet, batches: list[Any]) -> list[Widths]:
    """What a search asks for, generation by generation."""
    config = SearchConfig(evaluations=CONFIGURATIONS, population=20)
    trials = search(net.space, SharedEvaluator(net, batches, by="loss"), [BUDGET], config=config).trials
    return [np.array([t.widths for t in group]) for _, group in groupby(trials, key=lambda t: t.generation)]


def seconds(make: Callable[[], Evaluator], score: Callable[[Evaluator], Any]) -> float:
    """The least processor time of some rounds, the evaluator's own making included."""
    found = []
    for _ in range(ROUNDS):
        start = time.process_time()
        score(make())
        found.append(time.process_time() - start)
    return min(found)


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    space = load_model("zoo:digits_cnn").space(groups=8, base=2)
    net = Supernet(space)
    batches = list(load_data("digits", val_fraction=0.2).val.batches(0, 0, torch.device("cpu")))
    asked = generations(net, batches)
    took = {
        "one by one": seconds(
            lambda: Evaluator(net, batches, by="loss"), lambda e: [e.score(w) for w in chain(*asked)]
        ),
        "sharing prefixes": seconds(
            lambda: SharedEvaluator(net, batches, by="loss"), lambda e: [e.score_many(widths) for widths in asked]
        ),
    }
    alone, shared = Evaluator(net, batches, by="loss"), SharedEvaluator(net, batches, by="loss")
    widths = np.concatenate(asked)
    with Allocations() as allocations:
        together = shared.score_many(widths)
    result = {
        "model": "digits_cnn",
        "configurations": len(widths),
        "budget": BUDGET,
        "images": sum(len(x) for x, _ in batches),
        "threads": 1,
        "seconds": took,
        "times_faster": took["one by one"] / took["sharing prefixes"],
        "largest_difference": float(np.abs(together / alone.score_many(widths) - 1).max()),
        "peak_mebibytes": allocations.peak / 2**20,
        "provenance": provenance(),
    }
    RESULTS.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
