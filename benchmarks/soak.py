"""The soak test: 100,000 trials by four processes on one store, and then read back; memory must stay flat.

Each process scores its quarter of the widths and stores every trial by itself, as searches that share a store would;
one more looks on as `bcnet front` does. In the end every trial is there once, with its digest.

    python benchmarks/soak.py --trials 100000 --processes 4 --out docs/results/soak.json
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from bcnet.search.store import TrialStore
from bcnet.search.trial import Trial, best_of
from bcnet.utils.provenance import provenance

READINGS = 20
FLAT = 16 * 2**20
"""Bytes by which the memory of a process may differ between its first quarter and its end."""


def memory() -> int:
    """Resident bytes of this process."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmRSS:")[2].split()[0]) * 1024


def trial(number: int) -> Trial:
    """A trial that costs nothing to score, so that the store is what is tested."""
    widths = tuple(1 + (number >> (5 * i)) % 32 for i in range(4))
    score = -sum((w - 17) ** 2 for w in widths) / 1000
    return Trial(number, widths, score, {"flops": sum(widths)}, sum(widths) < 70, 1 + number // 40, 0.0)


def write(path: Path, rank: int, processes: int, trials: int, told: Any) -> None:
    """Store every ``processes``-th trial, one at a time."""
    readings = []
    mine = range(rank, trials, processes)
    with TrialStore(path) as store:
        for done, number in enumerate(mine):
            store.add([trial(number)])
            if done % max(1, len(mine) // READINGS) == 0:
                readings.append(memory())
    readings.append(memory())
    told.put({"process": rank, "memory": readings})


def arguments(description: str | None) -> argparse.Namespace:
    """The options of a soak test."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=100_000)
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


def main() -> None:
    options = arguments(__doc__)
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="bcnet-soak-") as place:
        path, told = Path(place) / "trials.sqlite", context.Queue()
        TrialStore(path).close()
        start = time.monotonic()
        workers = [
            context.Process(target=write, args=(path, rank, options.processes, options.trials, told))
            for rank in range(options.processes)
        ]
        for worker in workers:
            worker.start()
        looks = watch(path, workers)
        rows = [told.get(timeout=60) for _ in workers]
        seconds = time.monotonic() - start
        with TrialStore(path, read_only=True) as store:
            begun = time.monotonic()
            trials = store.trials()
            read_s = time.monotonic() - begun
        size = path.stat().st_size
    whole = [t.number for t in trials] == list(range(options.trials)) and all(t == trial(t.number) for t in trials)
    grown = [max(row["memory"]) - max(row["memory"][: READINGS // 4]) for row in rows]
    report = {
        **provenance(),
        "trials": options.trials,
        "processes": options.processes,
        "seconds": round(seconds, 1),
        "trials_per_second": round(options.trials / seconds),
        "read_back_seconds": round(read_s, 2),
        "file_bytes": size,
        "looks_while_writing": looks,
        "memory_grown_bytes": grown,
        "all_there_once": whole,
        "best": best_of(trials, "flops").number if trials else None,  # type: ignore[union-attr]
    }
    print(json.dumps(report, indent=1))
    if options.out:
        options.out.write_text(json.dumps(report, indent=1) + "\n")
    sys.exit(0 if whole and max(grown) < FLAT else 1)


def watch(path: Path, workers: list[Any]) -> int:
    """Read all trials now and then until the workers end; how often that was."""
    looks = 0
    while any(worker.is_alive() for worker in workers):
        with TrialStore(path, read_only=True) as store:
            store.trials()
        looks += 1
        for worker in workers:
            worker.join(2)
    if any(worker.exitcode for worker in workers):
        sys.exit(f"a process failed: {[worker.exitcode for worker in workers]}")
    return looks


if __name__ == "__main__":
    main()
