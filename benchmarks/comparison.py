"""Which families of torchvision other tools can slim: bcnet, Torch-Pruning and FastNAS on one network of each.

    python benchmarks/comparison.py [--out docs/results/comparison.json]

The networks are the smallest of every family of convolutional classifiers, with random weights. Checks and limits are
those of benchmarks/coverage.py. Rows that are in the file are not measured again; the table is printed at the end.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from coverage import LIMITS, MEASURES, RESULTS, measure

from bcnet.utils.provenance import provenance

NETWORKS = (
    "squeezenet1_1", "shufflenet_v2_x0_5", "mnasnet0_5", "mobilenet_v3_small", "mobilenet_v2", "resnet18",
    "efficientnet_b0", "regnet_y_400mf", "googlenet", "densenet121", "alexnet", "vgg11_bn", "convnext_tiny",
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=RESULTS / "comparison.json")
    out = parser.parse_args().out
    rows: list[dict[str, Any]] = json.loads(out.read_text())["rows"] if out.exists() else []
    for name in NETWORKS:
        for tool in MEASURES:
            if not any((row["model"], row["tool"]) == (f"torchvision:{name}", tool) for row in rows):
                rows.append(measure(tool, f"torchvision:{name}"))
                packages = ("torch", "torchvision", "torch-pruning", "nvidia-modelopt")
                found = {**provenance(packages=packages), "limits_in_seconds": LIMITS, "rows": rows}
                out.write_text(json.dumps(found, indent=1) + "\n", "utf-8")
                print(tool, name, rows[-1]["failures"] or "works", flush=True)
    print(table(rows))


def table(rows: list[dict[str, Any]]) -> str:
    """One line per network: what each tool came to."""
    lines = ["| network | " + " | ".join(MEASURES) + " |", "| --- | " + " | ".join("---" for _ in MEASURES) + " |"]
    for model in dict.fromkeys(row["model"] for row in rows):
        by = {row["tool"]: row["failures"] for row in rows if row["model"] == model}
        cells = ["–" if tool not in by else _outcome(by[tool]) for tool in MEASURES]
        lines.append(f"| {model.partition(':')[2]} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _outcome(failures: list[dict[str, str]]) -> str:
    return f"{failures[0]['at']}: {failures[0]['kind']}" if failures else "works"


if __name__ == "__main__":
    main()
