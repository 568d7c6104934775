"""Writes docs/results/supernet-speed.md from docs/results/supernet-speed.json.

    python benchmarks/supernet_speed_report.py [--cuda new.json] [--cpu new.json]

``--cuda`` and ``--cpu`` put new results of ``benchmarks/supernet_speed.py`` in the place of the old ones.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

HOME = Path(__file__).parents[1] / "docs" / "results"
GOALS = {"mobilenet 256": 9.0, "resnet 256": 14.0}
INTRO = """# Speed and memory of supernet training

Made from [supernet-speed.json](supernet-speed.json) by `python benchmarks/supernet_speed_report.py`; measured by
`benchmarks/supernet_speed.py`. Variants take turns in one process after a warm-up in which all shapes occur; figures
are medians.
"""
TRIED = """
## What was tried on the GPU

| MobileNet space, batch 256, fused engine | step | GPU |
| --- | ---: | ---: |
{versions}

- Batch norm, addition and activation as one kernel each way, both sides of a width in one launch; weights of all paths
  sliced and cast by one launch, their gradients added by one. A matrix product for 1x1 convolutions, cuDNN for others.
- The norm before a depthwise convolution is applied as it reads, so that its output is never written; the
  statistics of the norm after it are summed as it writes, and those of the way back with its gradient.
- 3x3 depthwise convolutions go down the rows of images, so that a pixel is read three times, not nine, and the
  nine sums of the weight's gradient stay in registers. They move 1.4 TB/s forwards and 1.2 TB/s
  backwards, far below what a copy reaches; by the count of instructions it is these that bound them (no counters read).
- Programs that stay for several blocks of columns: some 6 % faster backwards (11 sums are reduced less often), over
  40 % slower forwards, where every block is a program of its own.
- Partial sums of weight gradients as blocks of two dimensions: 0.70 ms a step against 0.21 ms with four loads at a
  time; undone.
- Triton's own launcher took as long as the smaller kernels run; a binary is now called by its constants. The host's
  time for a MobileNet step was 6.7, 9.7 and 8.3 ms in three runs of nearly the same code: hosts differ.
"""


def cuda_table(results: dict[str, Any]) -> list[str]:
    lines = [
        "| network, batch | engine | step ms (range) | GPU ms | launch ms | kernels | images × paths / s | peak MiB |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for key, engines in results.items():
        if not key.endswith((" 256", " 1024")):
            continue
        for engine, r in engines.items():
            low, high = r["spread_ms"]
            step = f"{r['step_ms']:.2f} ({low:.1f}–{high:.1f})"
            times = (f"{r['gpu_ms']:.1f}", f"{r['launch_ms']:.1f}", str(r["kernels"]))
            row = (key.replace(" ", ", "), engine, step, *times)
            lines.append(f"| {' | '.join(row)} | {r['images_paths_per_second']:,} | {r['peak_mib']:,} |")
    return lines


def machine(results: dict[str, Any]) -> str:
    return f"{results['device']}; {results['machine']}; commit {results['commit']}, {results['date']};"


def cuda(results: dict[str, Any]) -> list[str]:
    lines = [
        "## GPU: four paths a step",
        "",
        machine(results),
        f"`{results['command']}`. A width and its complement, both sides, bf16, SGD and augmentation included.",
        "",
        *cuda_table(results),
        "",
    ]
    for key, goal in GOALS.items():
        found = results[key]["fused"]["step_ms"]
        lines.append(f"- {key.split()[0]}, goal {goal:.0f} ms: {found:.2f} ms, {verdict(found, goal)}.")
    if "note" in results:
        lines += ["", results["note"]]
    return lines


def cpu(results: dict[str, Any]) -> list[str]:
    lines = [
        "## CPU: one path, forwards and backwards",
        "",
        machine(results),
        f"`{results['command']}`; load of the machine at the start: {results['load']:.1f}.",
        "",
        "| network | memory format | allocator | path ms | plain network ms | ratio (goal 1.05) |",
        "| --- | --- | --- | ---: | ---: | ---: |",
    ]
    for key, r in results.items():
        if not isinstance(r, dict) or "path" not in r:
            continue
        name, _, tuned = key.partition(" ")
        for order in ("", "channels-last "):
            path, plain = r[f"{order}path"], r[f"{order}plain"]
            row = (name, order.strip() or "contiguous", tuned or "as it is", f"{path:.0f}", f"{plain:.0f}")
            lines.append(f"| {' | '.join(row)} | {path / plain:.2f} |")
    lines += ["", *gains(results)]
    lines += ["", "What autograd keeps for one step, where sides alternate and where both are trained at once:", ""]
    for key, r in results.items():
        if key.startswith("memory"):
            lines.append(
                f"- {key.split()[1]}: {r['alternating_mib']:.0f} MiB and {r['joint_mib']:.0f} MiB, {r['ratio']:.2f} "
                f"(goal 0.6), {verdict(r['ratio'], 0.6)}."
            )
    if "note" in results:
        lines += ["", results["note"]]
    lines += ["", "Batch 64, by the processor's time: [Speed on a CPU](cpu.md)."]
    lines += ["", "**What this does not show**: other GPUs, networks and batches; what data take to arrive; the code"]
    lines += ["of today, for which [a later page](speed.md) has one run on a GPU; and how well the supernets learn."]
    return lines


def gains(results: dict[str, Any]) -> list[str]:
    """What channels-last and the tuned allocator save, for a path."""
    lines = []
    for key, r in results.items():
        before = results.get(key.removesuffix(" tuned"))
        if not key.endswith(" tuned") or not isinstance(r, dict) or not isinstance(before, dict):
            continue
        saved = 1 - r["channels-last path"] / r["path"]
        factor = before["channels-last path"] / r["channels-last path"]
        words = f"channels-last saves {saved:.0%}, and the tuned allocator makes it {factor:.2f} × as fast"
        lines.append(f"- {key.split()[0]}: {words}.")
    return lines


def verdict(found: float, goal: float) -> str:
    return "reached" if found <= goal else "missed"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cuda", type=Path)
    parser.add_argument("--cpu", type=Path)
    args = parser.parse_args()
    home = HOME / "supernet-speed.json"
    data: dict[str, Any] = json.loads(home.read_text()) if home.exists() else {"versions": []}
    for part in ("cuda", "cpu"):
        if given := getattr(args, part):
            data[part] = json.loads(given.read_text())
    home.write_text(json.dumps(data, indent=1) + "\n")
    versions = "\n".join(f"| {what} | {step:.1f} | {gpu:.1f} |" for what, step, gpu in data["versions"])
    parts = [INTRO, *cuda(data["cuda"]), TRIED.format(versions=versions), *cpu(data["cpu"])]
    (HOME / "supernet-speed.md").write_text("\n".join(parts) + "\n")


if __name__ == "__main__":
    main()
