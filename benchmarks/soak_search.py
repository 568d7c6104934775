"""The soak test of a whole search: 100,000 trials, scored by four processes, on one store; memory must stay flat.

One `bcnet.search.search` asks, four processes of Ray score, and every trial goes to the store as it comes. Scores cost
nothing, so that the search is what is tested. In the end the store holds every trial once, and they are those of a
search that scores by itself.

    python benchmarks/soak_search.py --trials 100000 --processes 4 --out docs/results/soak-search.json
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from soak import READINGS, arguments, memory

from bcnet.search import SearchConfig, SearchProgress, SearchResult, TrialStore, search
from bcnet.space.cost import QuadraticCost
from bcnet.space.widths import Widths, WidthSpace, WidthVariable, candidates
from bcnet.utils.provenance import provenance

LAYERS, FULL, GROUPS = 12, 64, 32
SPACE = WidthSpace([WidthVariable(f"layer{i}", candidates(FULL, GROUPS)) for i in range(LAYERS)])
COSTS = {"flops": QuadraticCost(0, np.ones(LAYERS), np.eye(LAYERS, k=1))}
BUDGET = "flops=50%"
FLAT_SCORER = 16 * 2**20
"""Bytes by which a process that scores may grow from its first quarter on."""
FLAT_TRIAL = 1500
"""Bytes by which the search may grow with every trial, all of which it keeps."""


class Cheap:
    """A score of logarithms with a little noise; each process tells its memory in a file of its own."""

    def __init__(self, folder: Path):
        self.folder = folder

    def score_many(self, widths: Widths) -> NDArray[np.float64]:
        with (self.folder / str(os.getpid())).open("a") as file:
            file.write(f"{memory()}\n")
        scores: NDArray[np.float64] = np.log2(widths).sum(axis=1) + np.sin(widths @ np.arange(LAYERS)) / 10
        return scores


def searched(path: Path, folder: Path, trials: int, processes: int) -> tuple[SearchResult, list[int]]:
    """A search, and the memory of its process after every twentieth of its trials."""
    executor = "ray" if processes > 1 else "here"
    config = SearchConfig(evaluations=trials, population=1000, executor=executor, workers=processes)
    readings: list[int] = []

    def told(now: SearchProgress) -> None:
        if now.evaluations % max(1, trials // READINGS) == 0:
            readings.append(memory())

    folder.mkdir()
    with TrialStore(path) as store:
        return search(SPACE, Cheap(folder), [BUDGET], COSTS, config, store=store, progress=told), readings


def plain(result: SearchResult) -> list[Any]:
    """What must not depend on who scored."""
    return [(t.number, t.widths, t.score, t.costs, t.feasible, t.generation) for t in result.trials]


def main() -> None:
    options = arguments(__doc__)
    with tempfile.TemporaryDirectory(prefix="bcnet-soak-") as place:
        folder = Path(place)
        start = time.monotonic()
        found, own = searched(folder / "trials.sqlite", folder / "memory", options.trials, options.processes)
        seconds = time.monotonic() - start
        with TrialStore(folder / "trials.sqlite", read_only=True) as store:
            stored = store.trials() == list(found.trials)
        size = (folder / "trials.sqlite").stat().st_size
        scorers = [[int(line) for line in file.read_text().split()] for file in (folder / "memory").iterdir()]
        alone, _ = searched(folder / "alone.sqlite", folder / "alone", options.trials, 1)
    grown = [max(each) - max(each[: max(1, len(each) // 4)]) for each in scorers]
    later = own[len(own) // 4 :]
    report = {
        **provenance(),
        "trials": len(found.trials),
        "processes": len(scorers),
        "seconds": round(seconds, 1),
        "file_bytes": size,
        "asked_again": found.hits,
        "memory_of_scorers_grown_bytes": grown,
        "memory_of_search_bytes": own,
        "memory_of_search_bytes_per_trial": round((later[-1] - later[0]) / (options.trials * (1 - 1 / 4))),
        "all_there_once": stored and len(found.trials) == options.trials,
        "as_by_one_process": plain(found) == plain(alone),
    }
    print(json.dumps(report, indent=1))
    if options.out:
        options.out.write_text(json.dumps(report, indent=1) + "\n")
    flat = max(grown) < FLAT_SCORER and report["memory_of_search_bytes_per_trial"] < FLAT_TRIAL
    sys.exit(0 if flat and report["all_there_once"] and report["as_by_one_process"] else 1)


if __name__ == "__main__":
    main()
