"""Measures how well the latency table predicts whole networks, and what FLOPs alone would have predicted.

    python benchmarks/latency.py [--device cuda] [--backend onnxruntime] [--threads 1] [--batch 1] MODEL ...

Adds rows to docs/results/latency.json (or --out) and writes latency.md beside it from all rows.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.stats import kendalltau

from bcnet.latency.compare import measure_side_by_side
from bcnet.latency.table import measure_table
from bcnet.latency.timing import TimingConfig
from bcnet.models import MODELS, build
from bcnet.space.network import trace
from bcnet.utils.provenance import provenance

RESULTS = Path(__file__).parents[1] / "docs" / "results" / "latency.json"
NETWORKS = 20
IDENTITY = ("model", "device", "backend", "threads", "batch")


def measure(model: str, device: str, config: TimingConfig) -> dict[str, Any]:
    """A table for one network, held against fresh networks at random widths."""
    example = torch.randn(2, *MODELS[model].input_shape, device=device)
    space = trace(build(model).to(device).eval(), example, groups=20, round_to=8)
    start = time.perf_counter()
    table = measure_table(space, config)
    seconds = time.perf_counter() - start
    count = NETWORKS // 4 if config.backend == "onnxruntime" else NETWORKS
    widths = space.sample(np.random.default_rng(1), count)
    # From narrow to wide, so that latencies differ: shares of each random widths.
    shares = np.linspace(0.2, 1.0, count)[:, None]
    widths = np.maximum(space.min, (widths * shares).astype(np.int64) // 8 * 8)
    found = measure_side_by_side(space, table, list(widths), config)
    measured, predicted = (np.array([getattr(m, k) for m in found]) for k in ("measured", "predicted"))
    flops = space.costs["flops"](widths)
    return {
        "model": model,
        **table.facts,
        "layers": len(table.layers),
        "table_seconds": seconds,
        "full_ms": float(table(space.max)[0]) / 1e6,
        "error_mean": float(np.mean(np.abs(predicted / measured - 1))),
        "error_most": float(np.max(np.abs(predicted / measured - 1))),
        "kendall": float(kendalltau(predicted, measured).statistic),
        "kendall_flops": float(kendalltau(flops, measured).statistic),
        "networks": [[m.predicted, m.measured] for m in found],
        "provenance": provenance(device),
    }


def page(rows: list[dict[str, Any]]) -> str:
    lines = [
        "# Latency, predicted and measured",
        "",
        "Made by `benchmarks/latency.py` from `latency.json` beside this page, which also names commit and machine of",
        "every row. A table of layers is measured once; then networks at random widths, narrow to wide, which it has",
        "not seen, are predicted and timed. The errors are relative to the measured latency; Kendall's correlation",
        "says how well predictions, and FLOPs for comparison, rank the networks: 20, or 5 by onnxruntime.",
        "",
        "With one thread, latency is the time in which that thread had a core, so that other programs on the machine",
        "hardly count. The rows this page had before 17 November 2026 were timed by the clock on the wall; all of them",
        "were measured again. Of each network the least time of its turns counted; since 20 November the script takes",
        "the median of alternating passes, as runs do, and no row is of that yet. A table of layers gets most of the",
        "ranking right, as FLOPs do; what FLOPs cannot say is how many milliseconds a network takes.",
        "",
        "| network | device | by | threads | batch | table, s | full, ms | mean error | most | Kendall | FLOPs' |",
        "| --- | --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for r in rows:
        cells = [r["model"], r["device"], r["backend"], r["threads"], r["batch"], f"{r['table_seconds']:.0f}"]
        cells += [f"{r['full_ms']:.3g}", f"{r['error_mean']:.1%}", f"{r['error_most']:.1%}"]
        cells += [f"{r['kendall']:.3f}", f"{r['kendall_flops']:.3f}"]
        lines.append("| " + " | ".join(str(cell) for cell in cells) + " |")
    lines += [
        "",
        "**What this does not show**: a GPU, several threads, batches, other machines, and an idle one: other work ran",
        "beside these, and caches are shared. Widths are random; those that a search prefers can be off by more, so",
        "a run measures its finalists and corrects the table until the budget holds.",
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", help=f"of the zoo: {', '.join(MODELS)}")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--backend", default="torch")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    config = TimingConfig(options.batch, options.threads, options.backend)
    rows = json.loads(options.out.read_text()) if options.out.exists() else []
    for model in options.models:
        row = measure(model, options.device, config)
        rows = [r for r in rows if any(r[k] != row[k] for k in IDENTITY)] + [row]
        options.out.write_text(json.dumps(rows, indent=1) + "\n")
        print({k: v for k, v in row.items() if k not in ("networks", "provenance")}, flush=True)
    options.out.with_suffix(".md").write_text(page(rows))


if __name__ == "__main__":
    main()
