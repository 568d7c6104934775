"""Which opinion of a slim network, taken before it is trained, tells how good it becomes.

    python benchmarks/inherited_report.py TABLE.jsonl

Reads what inherited_table.py wrote and prints, for each opinion, Kendall's tau with the test loss and accuracy of the
trained networks (95 % intervals by bootstrap over networks), the network it likes best, and its price in GPU seconds.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
from inherited_table import read_rows
from numpy.typing import NDArray
from scipy.stats import kendalltau

DRAWS = 1000
HIGHER = ("flops", "params", "logs", "balanced")
"""Opinions of which more is better; the others are losses."""

Floats = NDArray[np.float64]


def opinion(rows: list[dict[str, Any]], name: str) -> Floats:
    """The opinion of each network, larger for a better one."""
    values = np.array([row["opinions"][name] for row in rows])
    return values if name in HIGHER else -values


def kendall(a: Floats, b: Floats, rng: np.random.Generator) -> tuple[float, float, float]:
    """Kendall's tau with its 95 % interval; no correlation where all opinions are the same."""
    if np.ptp(a) == 0 or np.ptp(b) == 0:
        return 0.0, 0.0, 0.0
    drawn = rng.integers(0, len(a), (DRAWS, len(a)))
    taus = np.array([kendalltau(a[index], b[index]).statistic for index in drawn])
    low, high = np.nanpercentile(taus, [2.5, 97.5])
    return float(kendalltau(a, b).statistic), float(low), float(high)


def table(rows: list[dict[str, Any]]) -> list[str]:
    """The report as lines of Markdown."""
    accuracy = np.array([row["test"]["accuracy"] for row in rows])
    loss = -np.array([row["test"]["loss"] for row in rows])
    lines = [
        f"{len(rows)} networks; test accuracy {accuracy.mean():.2f} on average, {accuracy.max():.2f} at best.",
        "",
        "| opinion | Kendall, test loss | Kendall, test accuracy | its favourite: accuracy, loss | s a network |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    for name in sorted(rows[0]["opinions"]):
        values = opinion(rows, name)
        cells = []
        for target in (loss, accuracy):
            tau, low, high = kendall(values, target, np.random.default_rng(0))
            cells.append(f"{tau:.2f} ({low:.2f} to {high:.2f})")
        best = int(values.argmax())
        price = np.mean([row["seconds"].get(name.split("_")[0], 0.0) for row in rows])
        lines.append(f"| {name} | {' | '.join(cells)} | {accuracy[best]:.2f}, {-loss[best]:.4f} | {price:.2f} |")
    for name in ("loss", "accuracy"):
        values = np.array([row["val"][name] for row in rows]) * (-1 if name == "loss" else 1)
        cells = [f"{kendall(values, t, np.random.default_rng(0))[0]:.2f}" for t in (loss, accuracy)]
        best = int(values.argmax())
        price = np.mean([row["seconds"]["training"] for row in rows])
        lines.append(
            f"| final validation {name} | {' | '.join(cells)} | {accuracy[best]:.2f}, {-loss[best]:.4f} | {price:.2f} |"
        )
    return [*lines, "", *_networks(rows)]


def _networks(rows: list[dict[str, Any]]) -> list[str]:
    """The networks, best first."""
    lines = [
        "| network | test accuracy | test loss | validation accuracy | FLOPs |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    for row in sorted(rows, key=lambda row: row["test"]["loss"]):
        cells = f"{row['test']['accuracy']:.2f} | {row['test']['loss']:.4f} | {row['val']['accuracy']:.2f}"
        lines.append(f"| {row['name']} | {cells} | {row['opinions']['flops'] / 1e6:.1f}M |")
    return lines


def main() -> None:
    if len(sys.argv) != 2:
        raise SystemExit("usage: python benchmarks/inherited_report.py TABLE.jsonl")
    rows = [row for row in read_rows(Path(sys.argv[1])) if "name" in row]
    if len(rows) < 3:
        raise SystemExit(f"error: {sys.argv[1]} has {len(rows)} networks, and a correlation needs at least 3")
    print("\n".join(table(rows)))


if __name__ == "__main__":
    main()
