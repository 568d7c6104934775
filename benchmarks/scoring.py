"""Measures how long 100 configurations take on a CPU: one by one, and sharing their prefixes.

    OMP_NUM_THREADS=1 python benchmarks/scoring.py digits_cnn
    OMP_NUM_THREADS=1 python benchmarks/scoring.py digits_cnn --random

They are the first 100 that a search within a budget asks for, generation by generation, or random ones within it,
twenty at a time. Both ways take turns in one process, evaluators made anew, and the processor's time counts, so that
a busy machine matters less. Adds its row to docs/results/scoring.json; scoring-first.json is an earlier version's.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import time
from collections.abc import Callable
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bcnet.accel import SharedEvaluator
from bcnet.accel.enumeration.allocations import Allocations
from bcnet.data import load_data
from bcnet.models.load import load_model
from bcnet.search import SearchConfig, search
from bcnet.search.constraints import Constraints
from bcnet.space.widths import Widths
from bcnet.supernet.scoring import Evaluator
from bcnet.supernet.supernet import Supernet
from bcnet.utils.provenance import provenance

RESULTS = Path(__file__).parents[1] / "docs" / "results" / "scoring.json"
NETWORKS: dict[str, dict[str, Any]] = {
    "digits_cnn": {"data": "digits", "val_fraction": 0.2, "groups": 8, "base": 2, "budget": "flops=50%"},
    "cluttered_cnn": {"data": "cluttered_digits", "val_fraction": 0.25, "groups": 16, "base": 1, "budget": "flops=12%"},
}
"""The data, and the space and the budget; cluttered_cnn's are those of the recipe that `bcnet run` takes."""
CONFIGURATIONS, POPULATION, IMAGES = 100, 20, 300
Way = tuple[Callable[[], Evaluator], Callable[[Evaluator], list[float]]]


def generations(net: Supernet, batches: list[Any], budget: str) -> list[Widths]:
    """What a search asks for, generation by generation."""
    config = SearchConfig(evaluations=CONFIGURATIONS, population=POPULATION)
    trials = search(net.space, SharedEvaluator(net, batches, by="loss"), [budget], config=config).trials
    return [np.array([t.widths for t in group]) for _, group in groupby(trials, key=lambda t: t.generation)]


def drawn(net: Supernet, budget: str) -> list[Widths]:
    constraints = Constraints(net.space, net.space.costs, [budget])
    rows = np.unique(constraints.sample(np.random.default_rng(0), 2 * CONFIGURATIONS)[0], axis=0)
    rows = np.random.default_rng(1).permutation(rows)[:CONFIGURATIONS]
    return [rows[first : first + POPULATION] for first in range(0, len(rows), POPULATION)]


def seconds(make: Callable[[], Evaluator], score: Callable[[Evaluator], list[float]]) -> tuple[float, list[float]]:
    """Processor time, the evaluator's own making included, and the scores."""
    gc.collect()
    start = time.process_time()
    found = score(make())
    return time.process_time() - start, found


def ways_of(net: Supernet, batches: list[Any], asked: list[Widths]) -> dict[str, Way]:
    return {
        "one by one": (
            lambda: Evaluator(net, batches, by="loss"),
            lambda evaluator: [evaluator.score(row) for rows in asked for row in rows],
        ),
        "sharing prefixes": (
            lambda: SharedEvaluator(net, batches, by="loss"),
            lambda evaluator: [score for rows in asked for score in evaluator.score_many(rows)],
        ),
    }


def measured(name: str, random: bool, rounds: int) -> dict[str, Any]:
    settings = NETWORKS[name]
    torch.manual_seed(0)
    net = Supernet(load_model(f"zoo:{name}").space(groups=settings["groups"], base=settings["base"]))
    val = load_data(settings["data"], val_fraction=settings["val_fraction"]).val
    batches = [(x[:IMAGES], y[:IMAGES]) for x, y in val.batches(0, 0, torch.device("cpu"))][:1]
    budget = settings["budget"]
    asked = drawn(net, budget) if random else generations(net, batches, budget)
    took: dict[str, list[float]] = {"one by one": [], "sharing prefixes": []}
    scores: dict[str, list[float]] = {}
    for _ in range(rounds):
        for way, (make, score) in ways_of(net, batches, asked).items():
            spent, scores[way] = seconds(make, score)
            took[way].append(round(spent, 4))
    alone, shared = np.array(took["one by one"]), np.array(took["sharing prefixes"])
    with Allocations() as allocations:
        SharedEvaluator(net, batches, by="loss").score_many(np.concatenate(asked))
    return {
        "network": name,
        "asked_by": "chance" if random else "a search",
        "configurations": sum(map(len, asked)),
        "budget": budget,
        "images": sum(len(x) for x, _ in batches),
        "seconds": took,
        "times_faster": float(np.median(alone / shared)),
        "times_faster_each_round": (alone / shared).round(3).tolist(),
        "times_faster_least_of_rounds": float(alone.min() / shared.min()),
        "largest_difference": float(
            np.abs(np.array(scores["sharing prefixes"]) / np.array(scores["one by one"]) - 1).max()
        ),
        "peak_mebibytes": allocations.peak / 2**20,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("network", choices=NETWORKS)
    parser.add_argument("--random", action="store_true", help="random configurations, not those of a search")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    torch.set_num_threads(1)
    row = {"threads": 1, "load": os.getloadavg()[0]} | measured(args.network, args.random, args.rounds)
    print(json.dumps(row, indent=1))
    rows = json.loads(args.out.read_text()) if args.out.exists() else {}
    rows[f"{args.network}, {row['asked_by']}"] = row | {"provenance": provenance()}
    args.out.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
