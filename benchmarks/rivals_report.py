"""The page that compares slim networks by method, from what rivals.py wrote.

    python benchmarks/rivals_report.py RESULTS.jsonl [--ours bcnet] [--base base.json]

Differences are paired: networks of the same seed saw the same batches. Intervals are 95 %, by Student's t over seeds.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from inherited_table import read_rows
from scipy.stats import t as student_t

from bcnet.training.race import RaceConfig

Results = dict[str, dict[int, dict[str, Any]]]
"""Rows by method and seed."""


def interval(values: Sequence[float]) -> str:
    """Mean and half of the 95 % interval."""
    mean = float(np.mean(values))
    if len(values) < 2:
        return f"{mean:+.2f}"
    half = float(student_t.ppf(0.975, len(values) - 1) * np.std(values, ddof=1) / len(values) ** 0.5)
    return f"{mean:+.2f} ± {half:.2f}"


def differences(results: Results, method: str, other: str) -> list[float]:
    """Points of test accuracy that ``method`` has over ``other``, seed by seed."""
    mine, theirs = (_accuracies(results[name]) for name in (method, other))
    return [mine[seed] - theirs[seed] for seed in sorted(mine) if seed in theirs]


def _accuracies(rows: dict[int, dict[str, Any]]) -> dict[int, float]:
    return {seed: row["test"]["accuracy"] for seed, row in rows.items()}


def merged(rows: Sequence[dict[str, Any]]) -> Results:
    """Rows by method and seed; random networks, one for each seed, are one method."""
    found: Results = defaultdict(dict)
    for row in rows:
        found["random" if row["method"].startswith("random-") else row["method"]][row["seed"]] = row
    return found


def raced(results: Results, ours: str) -> dict[int, dict[str, Any]]:
    """For each seed the row of the network that wins the race among all whose names begin with ``ours``: by held-out
    loss after each round (settled, where that was measured) the better half goes on, after the last round one alone."""
    finalists = [method for method in results if method.startswith(f"{ours}-")]
    found = {}
    for seed in sorted({seed for method in finalists for seed in results[method]}):
        alive = [results[method][seed] for method in finalists if seed in results[method]]
        rounds = len(alive[0]["rounds"])
        for number in range(rounds):
            left = RaceConfig().survivors(len(alive), last=number == rounds - 1)
            alive = sorted(alive, key=lambda row: _told(row["rounds"][number]))[:left]
        found[seed] = alive[0]
    return found


def section(results: Results, ours: str) -> list[str]:
    """A table of one network at one budget, the best method first; differences are to the best of others'."""
    if any(method.startswith(f"{ours}-") for method in results):
        results = {**results, ours: raced(results, ours)}
    means = {method: np.mean(list(_accuracies(rows).values())) for method, rows in results.items()}
    order = sorted(results, key=lambda method: -means[method])
    rivals = [method for method in order if not method.startswith(ours)]
    lines = [
        f"| method | test accuracy | seeds | {f'over {rivals[0]}' if rivals else 'difference'} | over uniform | MFLOPs "
        "| s to choose | s to fine-tune |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for method in order:
        rows = list(results[method].values())
        pairs = [
            interval(found) if other in results and (found := differences(results, method, other)) else "–"
            for other in (rivals[0] if rivals else "", "uniform")
        ]
        price = np.mean([row["plan_seconds"] or 0.0 for row in rows])
        parts = ("making_seconds", "lesson_seconds", "tuning_seconds")
        tuning = np.mean([sum(row.get(part, 0.0) for part in parts) for row in rows])
        lines.append(
            f"| {method} | {means[method]:.2f} | {len(rows)} | {' | '.join(pairs)} | {rows[0]['flops'] / 1e6:.1f} "
            f"| {price:.1f} | {tuning:.1f} |"
        )
    return lines


def noise(results: Results) -> str:
    """How held-out losses differ over seeds, and between methods that have as many seeds, after each round and at the
    end: a race can only tell methods apart where the second is the larger."""
    most = max(map(len, results.values()))
    some = [list(rows.values()) for rows in results.values() if len(rows) == most > 1]
    if len(some) < 2:
        return "Too few seeds to tell noise."
    if not all(row["rounds"] for rows in some for row in rows):
        return f"Held-out losses deviate over seeds and between methods by {_final(some)} after all epochs."
    ways = {"loss": "as they are", "settled": "settled"} if "settled" in some[0][0]["rounds"][0] else {"loss": ""}
    parts = []
    for number, one in enumerate(some[0][0]["rounds"]):
        for key, said in ways.items():
            found = _deviations([[row["rounds"][number][key] for row in rows] for rows in some])
            parts.append(f"{found} after {one['epochs']} {said}".rstrip())
    parts.append(f"{_final(some)} after all epochs")
    return f"Held-out losses deviate over seeds and between methods by {', '.join(parts)}."


def _final(some: list[list[dict[str, Any]]]) -> str:
    return _deviations([[row["val"]["loss"] for row in rows] for rows in some])


def _deviations(losses: list[list[float]]) -> str:
    """Over seeds and between methods, of losses (methods, seeds)."""
    values = np.array(losses)
    return f"{np.sqrt(values.var(1, ddof=1).mean()):.3f} and {values.mean(1).std():.3f}"


def _told(measured: dict[str, Any]) -> float:
    """The loss that a race goes by."""
    return float(measured.get("settled", measured["loss"]))


def page(rows: Sequence[dict[str, Any]], ours: str, base: dict[str, Any] | None) -> list[str]:
    groups: dict[tuple[str, str, str, bool], list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        equal = "equal_to" in row
        recipe = {**row["recipe"], "epochs": row["equal_to"]} if equal else row["recipe"]
        groups[row["network"], row["budget"], json.dumps(recipe), equal].append(row)
    lines: list[str] = []
    for (network, budget, recipe, equal), some in sorted(groups.items()):
        settings = ", ".join(f"{key} {value}" for key, value in json.loads(recipe).items())
        lines += [f"## {network} at {budget}", "", f"Fine-tuned with {settings}."]
        if equal:  # the rivals' own epochs are in their rows
            longer = sorted({row["recipe"]["epochs"] for row in some})
            lines += [f"At equal seconds: others have {', '.join(map(str, longer))} epochs."]
            some = some + [r for r in groups[network, budget, recipe, False] if r["method"] == ours]
        if base is not None and network in base["networks"]:
            lines += [f"The full network has {base['networks'][network]['test']['accuracy']:.2f} %."]
        lines += ["", *section(merged(some), ours), "", noise(merged(some)), ""]
    return lines


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("results", type=Path, nargs="+")
    parser.add_argument("--ours", default="bcnet")
    parser.add_argument("--base", type=Path)
    args = parser.parse_args(given)
    rows = [row for file in args.results for row in read_rows(file) if "method" in row]
    if not rows:
        raise SystemExit(f"error: {args.results[0]} has no results")
    print("\n".join(page(rows, args.ours, json.loads(args.base.read_text()) if args.base else None)))


if __name__ == "__main__":
    main()
