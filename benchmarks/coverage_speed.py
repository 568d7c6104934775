"""How long ``trace`` takes beside an earlier bcnet, and whether both find the same space.

    python benchmarks/coverage_speed.py CHECKOUT [--count 40] [--limit SECONDS] [--out FILE]

CHECKOUT is a folder with the earlier commit; the present bcnet is the one that Python imports. Networks are drawn at
random from the lists of coverage.py; each is made once and traced by the two in turn, in child processes of one thread,
after a small network to warm up. Writes docs/results/coverage-speed.json, or FILE there.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import multiprocessing
import platform
import random
import statistics
import subprocess
import sys
import time
import warnings
from datetime import UTC, datetime
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
from coverage_checks import Inputs, settle
from coverage_zoos import create, installed
from torch import nn

HERE = Path(__file__).parent
SEED = 20


def traced(checkout: Path, model: nn.Module, inputs: Inputs, pipe: Connection) -> None:
    """Trace by the bcnet of ``checkout`` and send what was found and how long it took."""
    sys.path.insert(0, str(checkout))
    network = importlib.import_module("bcnet.space.network")
    assert Path(network.__file__ or "").is_relative_to(checkout)
    warnings.simplefilter("ignore")
    network.trace(nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Conv2d(8, 4, 1)), torch.randn(2, 3, 8, 8))
    start = time.process_time()
    try:
        space = network.trace(model, inputs[0] if len(inputs) == 1 else inputs)
    except Exception as error:  # a refusal is a result
        pipe.send(({"refused": str(error)[:60]}, time.process_time() - start))
        return
    seconds = time.process_time() - start
    costs = {name: [part.tolist() for part in parts(cost)] for name, cost in space.costs.items()}
    variables = [(v.name, [int(c) for c in v.candidates], list(v.layers), v.unit) for v in space.variables]
    nodes = [n for n in space.graph.graph.nodes if "_assert_tensor_metadata" not in str(n.target)]  # computes nothing
    graph = [(n.name, str(n.target), str(n.args)) for n in nodes]
    found = {"variables": variables, "costs": costs, "fixed": space.fixed, "graph": graph}
    pipe.send((json.loads(json.dumps(found | {"dynamic": space.graph.dynamic})), seconds))


def parts(cost: Any) -> list[Any]:
    return [np.asarray(value) for value in vars(cost).values() if not callable(value)]


def in_child(checkout: Path, model: nn.Module, inputs: Inputs) -> tuple[dict[str, Any], float]:
    context = multiprocessing.get_context("fork")
    mine, theirs = context.Pipe(duplex=False)
    process = context.Process(target=traced, args=(checkout, model, inputs, theirs))
    process.start()
    theirs.close()
    try:
        result: tuple[dict[str, Any], float] = mine.recv()
    finally:
        process.join()
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description="Trace networks by this bcnet and by an earlier one.")
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--count", type=int, default=40)
    parser.add_argument("--limit", type=float, default=1800, help="seconds after which no further network is begun")
    parser.add_argument("--out", default="coverage-speed.json", metavar="FILE")
    options = parser.parse_args()
    torch.set_num_threads(1)
    before, now = options.checkout.resolve(), present()
    listed = [n for part in ("unseen", "models") for n in (HERE / f"coverage_{part}.txt").read_text().split()]
    names = random.Random(SEED).sample([n for n in listed if installed(n)], options.count)
    rows, start = [], time.monotonic()
    for i, name in enumerate(names):
        if time.monotonic() - start > options.limit:
            break
        model, inputs = create(name)
        settle(model, inputs)
        order = (before, now) if i % 2 else (now, before)
        found = {checkout: in_child(checkout, model, inputs) for checkout in order}
        same = {key: found[now][0].get(key) == value for key, value in found[before][0].items()}
        row = {"model": name, "before": round(found[before][1], 3), "now": round(found[now][1], 3), "same": same}
        rows.append(row)
        print(row, flush=True)
    ratios = [row["now"] / row["before"] for row in rows]
    results = {
        "command": f"python benchmarks/coverage_speed.py CHECKOUT --count {options.count}",
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "commits": {key: commit(where) for key, where in (("before", before), ("now", now))},
        "machine": f"{platform.machine()}, 2-core CPU, 1 thread, Python {platform.python_version()}",
        "torch": torch.__version__,
        "median_ratio": round(statistics.median(ratios), 3),
        "ratio_of_sums": round(sum(row["now"] for row in rows) / sum(row["before"] for row in rows), 3),
        "median_seconds": {key: statistics.median(row[key] for row in rows) for key in ("before", "now")},
        "all_same": all(all(row["same"].values()) for row in rows),
        "rows": rows,
    }
    (HERE.parent / "docs" / "results" / options.out).write_text(json.dumps(results, indent=1) + "\n")
    print({key: value for key, value in results.items() if key != "rows"})


def present() -> Path:
    """The folder of the bcnet that is imported, or the one that this file belongs to."""
    found = importlib.util.find_spec("bcnet")
    return Path(found.origin).resolve().parents[1] if found and found.origin else HERE.parent.resolve()


def commit(where: Path) -> str:
    git = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=True, cwd=where)
    return git.stdout.strip()


if __name__ == "__main__":
    main()
