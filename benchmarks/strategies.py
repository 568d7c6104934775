"""Two strategies of the search among inherited networks, on the example: neighbours of the best so far and evolution.

    python benchmarks/strategies.py [--first 30] [--seeds 5] [--runs build/strategies]

Each row is a whole run of the recipe cluttered_digits (`bcnet run --seed S --set search.strategy=...`) without networks
to compare with. Runs that are there are not repeated, stopped ones go on; docs/results/strategies.json is written after
every run.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import t as student_t

from bcnet.run.session import Run
from bcnet.utils.provenance import provenance

RESULTS = Path(__file__).parents[1] / "docs" / "results" / "strategies.json"
STRATEGIES = ("evolution", "neighbours")


def row(folder: Path, seed: int, strategy: str) -> dict[str, Any]:
    """What came out of a run, which is made unless it is there."""
    if not (folder / "report.json").is_file():
        new = ["--seed", str(seed), "--compare", "none", "--out", str(folder), "--set", f"search.strategy={strategy}"]
        how = ["--resume", str(folder)] if (folder / "run.json").is_file() else new
        subprocess.run([sys.executable, "-m", "bcnet", "run", *how], check=True, stdout=subprocess.DEVNULL)
    run = Run(folder, "cpu")
    found, search, race = run.read("retrain/found"), run.read("search"), run.read("race")
    return {
        "seed": seed,
        "strategy": strategy,
        "accuracy": 100 * found["score"],
        "loss": found["loss"],
        "score of the choice": search["best"]["score"],
        "evaluations": search["evaluations"],
        "won by": race["winner"],
        "widths": found["widths"],
    }


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Means, and the paired difference of the two with its 95 % interval over seeds."""
    by = {s: {r["seed"]: r["accuracy"] for r in rows if r["strategy"] == s} for s in STRATEGIES}
    both = sorted(set(by["evolution"]) & set(by["neighbours"]))
    apart = [by["neighbours"][seed] - by["evolution"][seed] for seed in both]
    found: dict[str, Any] = {"seeds": both, **{s: float(np.mean([by[s][k] for k in both])) for s in STRATEGIES if both}}
    if len(apart) > 1:
        half = student_t.ppf(0.975, len(apart) - 1) * np.std(apart, ddof=1) / len(apart) ** 0.5
        found["neighbours over evolution"] = [float(np.mean(apart)), float(half)]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--first", type=int, default=30, help="the first seed")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--runs", type=Path, default=Path("build/strategies"))
    args = parser.parse_args()
    args.runs.mkdir(parents=True, exist_ok=True)
    rows = []
    for seed in range(args.first, args.first + args.seeds):
        for strategy in STRATEGIES:
            rows.append(row(args.runs / f"{strategy}-{seed}", seed, strategy))
            print(json.dumps(rows[-1]), flush=True)
            written = {"provenance": provenance("cpu"), "summary": summary(rows), "rows": rows}
            RESULTS.write_text(json.dumps(written, indent=1) + "\n")
    print(json.dumps(summary(rows)))


if __name__ == "__main__":
    main()
