"""Twice as fast, measured: do latency budgets hold by onnxruntime, with and without widths the hardware likes?

    python benchmarks/latency_budget.py [--models resnet18_imagenet mobilenetv2_imagenet] [--turns 5]

For each network a table of layers is measured; balanced widths within ``latency=50%`` are then predicted, built and
timed beside the full network in alternating passes, several times over. Where they are too slow, predictions are
corrected as ``bcnet run`` does, and widths are chosen again. Weights are random: this says nothing about accuracy.
docs/results/latency-budget.json and latency-budget.md are written after every row.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bcnet.latency.compare import compare_backend
from bcnet.latency.table import LatencyTable, measure_table
from bcnet.latency.timing import TimingConfig
from bcnet.models.load import load_model
from bcnet.run.stages.budgets import ROUNDS, SLACK
from bcnet.search import LogWidthModel
from bcnet.search.constraints import Constraints
from bcnet.space.network import NetworkSpace
from bcnet.space.widths import Widths
from bcnet.utils.provenance import origin, provenance

RESULTS = Path(__file__).parents[1] / "docs" / "results"
BACKEND, WANTED = "onnxruntime", 0.5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=["resnet18_imagenet", "mobilenetv2_imagenet"])
    parser.add_argument("--round-to", nargs="+", type=int, default=[16, 1])
    parser.add_argument("--turns", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    for model in args.models:
        for rounded in args.round_to:
            rows.append({"model": model, "round_to": rounded, **measure(model, rounded, args.turns)})
            found = {**provenance(packages=("torch", "numpy", "onnxruntime")), "turns": args.turns, "rows": rows}
            (RESULTS / "latency-budget.json").write_text(json.dumps(found, indent=1) + "\n", "utf-8")
            write_page(found)


def measure(model: str, rounded: int, turns: int) -> dict[str, Any]:
    """Balanced widths within half of the latency: predicted, measured, and corrected until they hold."""
    space = load_model(f"zoo:{model}").space(groups=8, round_to=rounded, least=4)
    table = measure_table(space, TimingConfig(backend=BACKEND, threads=1))
    factor, steps = 1.0, []
    for _ in range(ROUNDS + 1):
        widths = _balanced(space, table.corrected(factor), table)
        ratios = [_ratio(space, widths) for _ in range(turns)]
        predicted = float(table(widths)[0] / table(space.max)[0])
        flops = float(space.costs["flops"](widths)[0] / space.costs["flops"](space.max)[0])
        steps.append({"correction": factor, "predicted": predicted, "measured": ratios, "flops": flops})
        if np.median(ratios) <= SLACK * WANTED:
            break
        factor *= 1.01 * float(np.median(ratios)) / WANTED
    return {"widths": widths.tolist(), "table_error": table.error, "steps": steps}


def _balanced(space: NetworkSpace, corrected: LatencyTable, table: LatencyTable) -> Widths:
    limit = WANTED * float(table(space.max)[0])
    within = Constraints(space, {**space.costs, "latency": corrected}, [f"latency={limit:.0f}ns"])
    return LogWidthModel.balanced(space).best(within)


def _ratio(space: NetworkSpace, widths: Widths) -> float:
    """The latency of a network at ``widths`` over that of the full one, in alternating passes."""
    networks = {"full": space.build(space.max).eval(), "slim": space.build(widths).eval()}
    found = compare_backend(networks, space.example[0][:1], BACKEND)
    return found["slim"] / found["full"]


def write_page(found: dict[str, Any]) -> None:
    """docs/results/latency-budget.md."""
    lines = [
        "# Twice as fast, measured",
        "",
        f"Made by `{found['command']}` ({origin(found)}) from `latency-budget.json` beside this page.",
        "",
        "Balanced widths within half of the latency by onnxruntime, one thread, one input of 224 x 224: what the table "
        "of layers predicts, what is measured beside the full network, and the same after predictions were corrected "
        f"until the budget holds (within {SLACK - 1:.0%}).",
        "",
        "| network | widths in | predicted | measured (least to most) | corrected by | then measured | FLOPs left |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
        *map(_line, found["rows"]),
        "",
        f"Latencies are over that of the full network, medians of {found['turns']} comparisons of alternating passes, "
        "with their range. The machine had other work as well. What this does not show: accuracy (weights are random), "
        "other machines and batches, and searched widths, which are found by scores rather than by balance.",
        "",
    ]
    (RESULTS / "latency-budget.md").write_text("\n".join(lines), "utf-8")


def _line(row: dict[str, Any]) -> str:
    first, last = row["steps"][0], row["steps"][-1]
    held = "" if np.median(last["measured"]) <= SLACK * WANTED else ", not held"
    return (
        f"| {row['model']} | {row['round_to']}s | {first['predicted']:.3f} | {_range(first['measured'])} | "
        f"{last['correction'] - 1:+.0%} | {_range(last['measured'])}{held} | {last['flops']:.2f} |"
    )


def _range(ratios: list[float]) -> str:
    return f"{np.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})"


if __name__ == "__main__":
    main()
