"""Writes docs/results/exhaustive.md from the JSON files that benchmarks/exhaustive.py wrote.

python benchmarks/exhaustive_report.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from bcnet.utils.provenance import origin

RESULTS = Path(__file__).parents[1] / "docs" / "results"
GOALS = {"exhaustive-cpu": "10 times", "exhaustive-mobilenet": "25 s", "exhaustive-resnet": "60 s"}
TEXT = """# Scoring every network of a space

Made by `benchmarks/exhaustive_report.py` from the JSON files beside this page, which `benchmarks/exhaustive.py` wrote.
All widths of a Channel-Bench space are scored at once, with the batch statistics of each; one-by-one scoring of some
of the same widths is timed in the same run and scaled up. Speed does not depend on the images, so random ones are used.
The last column is the largest difference of a sampled network's loss to that found one by one in float32, and,
in brackets, how far the losses of networks spread.

| space | device | widths × sides × images | batch | seconds | goal | one by one | faster | peak | difference |
| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |
"""
TRIED = """
On the CPU the ratio is of the process's own time, since the machine had other work.

## What was tried on the GPU

The convolutions of the ResNet space take most of its time, passes over what they made most of the rest. The GPU draws
all the power it may, so that its clock is below its highest: what saves work saves time, what fills gaps does not.

- Kept, ResNet: one kernel makes the sums of all candidates of a convolution with their statistics, a tile being 128
  channels of 256 images at one pixel, so that taps in the padding are skipped and slices of channels need no copy;
  tiles come by the tensor memory accelerator. Channels are the rows of a tile, so that threads need not exchange what
  they add up for the statistics. A program for each multiprocessor goes from tile to tile, and loads the next while it
  writes one; tiles with few taps are dealt out evenly. The last layer takes all candidates at once.
- Kept, MobileNet: depthwise convolutions of narrow maps row by row in registers, products before pooling for all
  candidates at once, column sums and Gram matrices by one kernel.
- Slower or no better: tiles of 128 × 256 and 128 × 128 of images × channels, two programs to a multiprocessor, half as
  deep tiles, plain loads, nested loops, a smaller tile for images that do not fill one, tiles dealt out by a table so
  that all programs have the same work (those that share input then no longer run side by side), fewer programs than
  multiprocessors.

How the ResNet space came down, each time on one H200; another may take a little more or less:

| batch | seconds | commit |
| ---: | ---: | --- |
{earlier}

Larger batches are faster. Before the last two of these steps, the supernets of [Channel-Bench](channel-bench.md) with
both sides were scored on 5,000 images, one batch, in {mobilenet} (MobileNet) and {resnet} (ResNet), the set-up of
kernels included.

**What this does not show**: how the figures vary, as each is one run (59.9 s of a goal of 60 s could be above it in
another); other GPUs and other spaces; whether the scores rank networks well ([Channel-Bench](channel-bench.md)). One
by one, two sampled widths were timed on the GPU and four on the CPU, and scaled up.
"""


def row(stem: str) -> list[str]:
    file = RESULTS / f"{stem}.json"
    if not file.exists():
        return []
    data: dict[str, Any] = json.loads(file.read_text())
    lines = []
    for space in ("mobilenet", "resnet"):
        if space not in data:
            continue
        r = data[space]
        on_gpu = r.get("peak_gib") is not None
        seconds, faster = (r["seconds"], r["speedup"]) if on_gpu else (r["cpu_seconds"], r["cpu_speedup"])
        alone = r["one_by_one_seconds"] if on_gpu else r["one_by_one_cpu_seconds_each"] * r["widths"]
        cells = [
            space,
            data["machine"] if on_gpu else "CPU, 1 thread",
            f"{r['widths']:,} × {r['sides']} × {r['images']:,}",
            f"{r['batch']:,}" if on_gpu else f"{min(r['batch'], r['images']):,}",
            f"{seconds:.1f}",
            GOALS[stem],
            f"{alone:,.0f} s",
            f"{faster:.0f} times",
            f"{r['peak_gib']} GiB" if on_gpu else "",
            f"{r['worst_loss_difference']:.0e} ({r['spread_of_losses']:.2f})",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def earlier() -> str:
    """The ResNet space as it was scored before, and now."""
    lines = (RESULTS / "exhaustive-earlier.jsonl").read_text().splitlines()
    runs = [*map(json.loads, lines), json.loads((RESULTS / "exhaustive-resnet.json").read_text())]
    return "\n".join(f"| {r['resnet']['batch']:,} | {r['resnet']['seconds']:.1f} | {r['commit'][:12]} |" for r in runs)


def sources() -> list[str]:
    lines = ["", "## Where the figures come from", ""]
    for stem in GOALS:
        file = RESULTS / f"{stem}.json"
        if file.exists():
            d = json.loads(file.read_text())
            lines.append(f"- {stem}.json: {origin(d)}: `{d['command']}`")
    lines.append("- exhaustive-earlier.jsonl: the runs before, each with its command and commit")
    return lines


def batches() -> dict[str, str]:
    """By space, the seconds that scoring took in Channel-Bench's experiments with both sides and one batch."""
    experiments = json.loads((RESULTS / "channel-bench.json").read_text())["experiments"]
    one = {"images": 5000, "score_batch": 5000, "on_test": False}
    found = {}
    for space in ("mobilenet", "resnet"):
        runs = [r for r in experiments if r["space"] == space and r["method"] in ("bc", "bcv2")]
        taken = [r["score_seconds"] for r in runs if all(r[key] == value for key, value in one.items())]
        found[space] = f"{min(taken):.1f} to {max(taken):.1f} s"
    return found


def main() -> None:
    rows = [line for stem in GOALS for line in row(stem)]
    page = TEXT + "\n".join(rows) + "\n" + TRIED.format(**batches(), earlier=earlier()) + "\n".join(sources()) + "\n"
    (RESULTS / "exhaustive.md").write_text(page)


if __name__ == "__main__":
    main()
