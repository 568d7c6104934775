"""Writes docs/results/speed.md and imagenet-plan.md from what speed_rows.py and device_tests.py wrote.

    python benchmarks/speed_report.py [--from FOLDER]

With ``--from``, FOLDER's speed-rows.json and device-tests.json are copied beside the pages first.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

from bcnet.run.recipe import Recipe
from bcnet.utils.provenance import origin

COMPILED = {"fused_whole_ms": "torch.compile, MobileNetV2", "fused_cut_ms": "torch.compile, cut"}
"""By a figure's name, the row that has it by torch.compile."""
RESULTS = Path(__file__).parents[1] / "docs" / "results"
FILES = ("speed-rows.json", "device-tests.json")
STAGES = ("supernet", "scoring", "retrain")
Rows = dict[str, dict[str, Any]]
SHORT = 10
"""Seconds that a row had at least where it is its own fault that it did not end."""

SPEED = """# Where users wait, on a GPU

Made by `benchmarks/speed_report.py` from [speed-rows.json](speed-rows.json), which `benchmarks/speed_rows.py` wrote
on one H200 ({origin}).
Milliseconds are medians of three rounds, the ways of a row by turns in one process, SGD included, bf16, random images;
each row once. PyTorch's step is autocast with channels last, recorded as a CUDA graph; its supernet's step is launched
kernel by kernel, as every step has other widths.

| work | bcnet | PyTorch | `torch.compile` | goal | |
| --- | ---: | ---: | ---: | ---: | --- |
{table}

{notes}

What the table does not show: other GPUs, other networks, how the figures vary from one run to the next, and the time
that data take to arrive.

{remarks}

## What a step must move

{floor}

## The kernels on this GPU

{tests}

## Out of memory

With 4 GiB allowed, batches of 4,096 images ([the row `memory`](speed-rows.json)):

{memory}

An earlier run had failed at enumeration, with a sentence that asks for smaller batches. Since then batches are halved
until all configurations can be scored within the memory there is (`within_memory`), which is what the last line shows.
"""
REMARKS = """\
Rows without a figure had no time left. Of six ImageNet recipes whose steps were asked for, one had time, and ended
before its retraining: two paths of `mobilenetv2_imagenet`'s supernet train 11,400 images per second at a batch of
256, and scoring takes 70,900 images per second. The row of MobileNetV2's supernet was stopped before PyTorch's way
was timed.

The run before this one (2026-11-17, the code of 599f02b), on another machine of the same kind, had 10.3 and 5.72 ms
for the plain steps, 8.53 and 13.5 ms for the supernets of both spaces, 17.8 s for the 480 configurations, 28.2 and
19.9 s to the first step; there the step with a teacher and MobileNetV2's supernet spent their time compiling, and
all networks of the MobileNet space were stopped after 39 s for a reason that its file did not say. So single
figures are certain to no more than the third by which the ResNet space differs.

A run before that, on the same day (code of 973791e or later), had 10.3 and 5.75 ms for the plain steps, 11 ms (1.91
times) with a teacher, 8.48 and 9.76 ms for the supernets of both spaces and 26.1 ms, 0.85 times four plain steps,
for that of MobileNetV2. The teacher answers by kernels of its own since then, and the table has what that gives. In
that run, filling the caches by twelve processes at once took 121 s and ended for one row only, and nine device
tests failed, of two causes: three traced a network with CUDA as the default device, a fault of the tests; six met a
fault of bcnet's, a loss kernel compiled ahead for a label smoothing of 0, a whole number, that then refused 0.1.
Both are cured; the tests below are of the run after it. In the run of the table they were begun again beside other
work: eleven of the nineteen passed, and eight did not end within the 130 s that they had.

The kernels' source was shortened after this run. Compiled for this GPU by Triton 3.9 on a CPU, all 162 binaries are
what they were (`benchmarks/kernel_binaries.py`); no GPU has run them from the new source."""
FLOOR = """Counted by `benchmarks/speed_floor.py` ([output](speed-floor.json)) from the program of MobileNetV2 CIFAR at
batch 256: what the kernels of the fused step, as they are now, read and write, each tensor once, and what they
multiply, with the milliseconds that takes at {rates}. This is a count, not a measurement: it shows neither what kernels
lose to reading a tensor twice, to few programs and to their start, nor that a floor can be reached.

| network | way | bytes | products | the largest passes |
| --- | --- | ---: | ---: | --- |
{table}

1x1 convolutions to more channels go back by three passes (the gradient of their norm, then a product for the input and
one for the weight), five times what they made. One kernel that reads it and its gradient once would move 0.98 of 7.1 GB
less at 44M and 1.36 of 19.4 whole. It was written and agrees with the reference in Triton's interpreter, but no GPU has
run it, so it is not part of bcnet yet (commit 9019ba4, taken back)."""
PLAN = """# What the ImageNet recipes would take

Made by `benchmarks/speed_report.py` from [speed-rows.json](speed-rows.json): steps of each recipe on random images
of 224² on one H200 ({origin}):
two paths of the supernet, scoring of one path, and retraining at the first budget, with the teacher where a recipe
has one; each with the recipe's batch, in parts where it does not fit. There are as many steps as four seconds hold, at
most 200. Memory is the most that was taken. Hours are those of the recipe's epochs of supernet training and of one
retraining over 1,281,167 images, on one GPU, and an eighth of them on eight.
**No recipe was run to its end**; loading images, scoring in the search and validation are not
counted, nor what eight GPUs lose to each other.

| recipe | batch | supernet, images/s (steps) | scoring | retraining | memory, GiB | hours, 1 GPU | hours, 8 GPUs |
| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |
{table}
"""


def number(found: dict[str, Any], name: str, unit: str, times: float = 1.0) -> str:
    return f"{times * found[name]:.3g} {unit}" if name in found else "–"


def why(found: dict[str, Any]) -> str:
    """Why a figure is missing."""
    return found["failed"][:80] if found.get("row_s", 0) > SHORT else "no time was left"


def line(rows: Rows, row: str, work: str, names: tuple[str, str], goal: float, unit: str = "ms") -> str:
    """A line of the table, from a row of the file and the names of its figures: bcnet's and PyTorch's."""
    found, suffix = rows.get(row, {}), "_ms" if unit == "ms" else "_s"
    own, other = (f"{name}{suffix}" for name in names)
    third = number(rows.get(COMPILED.get(own, ""), {}), "compile_ms", "ms")
    missing = f"not measured: {why(found)}" if own not in found else ""
    verdict = missing or ("met" if found[own] <= goal else "missed")
    figures = f"{number(found, own, unit)} | {number(found, other, unit)} | {third}"
    return f"| {work} | {figures} | {goal:g} {unit} | {verdict} |"


def against(found: dict[str, Any], own: str, base: str, times: float, work: str, compiled: str = "–") -> str:
    """A line whose goal is a multiple of another figure of its row."""
    if own not in found or base not in found:
        return f"| {work} | – | – | {compiled} | {times:g} × | not measured: {why(found)} |"
    ratio, allowed = found[own] / found[base], times * found[base]
    verdict = f"{'met' if found[own] <= allowed else 'missed'}: {ratio:.2f} ×"
    pytorch = number(found, own.replace("fused", "pytorch"), "ms")
    return f"| {work} | {number(found, own, 'ms')} | {pytorch} | {compiled} | {allowed:.3g} ms | {verdict} |"


def speed(rows: Rows, tests: dict[str, Any]) -> str:
    plain, supernet = rows.get("plain step, MobileNetV2", {}), dict(rows.get("supernet step, MobileNetV2", {}))
    if "one_plain_step_ms" in supernet:
        supernet["four_ms"] = 4 * supernet["one_plain_step_ms"]
    best, compiled = dict(rows.get("plain step, ResNet50", {})), rows.get("torch.compile, ResNet50", {})
    if "pytorch_ms" in best:
        best["best_ms"] = min(best["pytorch_ms"], compiled.get("compile_ms", best["pytorch_ms"]))
    step, space = "plain step, MobileNetV2", "supernet step, {} space"
    lines = [
        line(rows, step, "plain step, MobileNetV2 CIFAR, batch 256", ("fused_whole", "pytorch_whole"), 9),
        line(rows, step, "the same at 44M", ("fused_cut", "pytorch_cut"), 4.5),
        against(plain, "fused_cut_taught_ms", "fused_cut_ms", 1.5, "the same with a teacher (whole)"),
        against(best, "fused_ms", "best_ms", 1, "plain step, ResNet50, 224², batch 128",
                number(compiled, "compile_ms", "ms")),
        line(rows, space.format("MobileNet"), "supernet step, four paths, MobileNet space", ("fused", "pytorch"), 7),
        line(rows, space.format("ResNet"), "the same, ResNet space", ("fused", "pytorch"), 8),
        against(supernet, "fused_ms", "four_ms", 1.2, "the same, MobileNetV2 CIFAR, against four plain steps"),
        line(rows, "scoring", "480 configurations × 2 sides × 2,500 images", ("fused", "one by one"), 6, "s"),
        exhaustive(rows, "MobileNet", 15),
        exhaustive(rows, "ResNet", 50),
        line(rows, "start", "start of Python to the first step, kernels compiled before", ("warm", ""), 5, "s"),
        line(rows, "start", "the same, nothing compiled", ("cold", ""), 15, "s"),
    ]  # fmt: skip
    memory = rows.get("memory", {})
    stages = [
        f"- {name}: {memory[name]['result']}; notices: {'; '.join(memory[name]['notices']) or 'none'}."
        for name in ("training", "scoring", "enumeration")
        if name in memory
    ]
    return SPEED.format(
        origin=origin(rows["provenance"]),
        table="\n".join(lines),
        notes=notes(rows),
        remarks=REMARKS,
        floor=floor(json.loads((RESULTS / "speed-floor.json").read_text())),
        tests=tested(tests),
        memory="\n".join(stages) or "It was not measured.",
    )


def exhaustive(rows: Rows, space: str, goal: float) -> str:
    found = rows.get(f"all networks, {space} space", {})
    given = {"all": {**found, **({"all_s": found["seconds"]} if "seconds" in found else {})}}
    if "one_by_one_seconds" in found:
        given["all"]["one_s"] = found["one_by_one_seconds"]
    return line(given, "all", f"all 16,384 networks, {space} space", ("all", "one"), goal, "s")


def notes(rows: Rows) -> str:
    start, scoring = rows.get("start", {}), rows.get("scoring", {})
    words = {"nothing compiled": start.get("cold_s in words"), "compiled before": start.get("warm_s in words")}
    said = [f"- Seconds to the first step, {name}: {text}." for name, text in words.items() if text]
    if "shared_s" in scoring:
        said.append(
            "- The 480 configurations: all of them were scored by the fused kernels, 24 by PyTorch one by one; PyTorch "
            f"sharing prefixes would take {scoring['shared_s']:.3g} s, from 120 of them."
        )
    return "\n".join(said)


def floor(found: dict[str, Any]) -> str:
    """The bytes and products of a step, in words."""
    lines = [
        f"| {name} | {way} | {part['gigabytes']:.3g} GB, {part['bytes_ms']:.2g} ms | {part['gigaflops']:,.0f} GFLOPs, "
        f"{part['flops_ms']:.2g} ms | {', '.join(largest(part))} |"
        for name in ("whole", "44M")
        for way, part in found[name].items()
    ]
    rates = f"{found['bytes_per_second'] / 1e12:g} TB/s and {found['flops_per_second'] / 1e12:g} TFLOPs/s"
    return FLOOR.format(rates=rates, table="\n".join(lines))


def largest(part: dict[str, Any]) -> list[str]:
    return [f"{kind} {count:.2g} GB" for kind, count in list(part["gigabytes_by_pass"].items())[:3]]


def tested(tests: dict[str, Any]) -> str:
    counts = Counter(row["outcome"] for row in tests.get("tests", []))
    if not counts:
        return "They were not tested in this run."
    words = ", ".join(f"{count} {outcome}" for outcome, count in counts.most_common())
    versions = " and ".join(f"{name} {version}" for name, version in tests["versions"].items())
    others = [f"\n- {row['outcome']}: {row['test']}" for row in tests["tests"] if row["outcome"] != "passed"]
    return (
        f"`benchmarks/device_tests.py` ([output](device-tests.json)) runs every Triton kernel against its reference,\n"
        f"on {tests['device']} with {versions}: {words}.{''.join(others)}"
    )


def rate(found: dict[str, Any], stage: str) -> str:
    """Images per second of a stage, in how many parts, and how many steps were taken."""
    if f"{stage}_images_per_second" not in found:
        return "–"
    parts = "" if found[f"{stage}_parts"] == 1 else f", {found[f'{stage}_parts']} parts"
    return f"{found[f'{stage}_images_per_second']:,.0f} ({found[f'{stage}_steps']}{parts})"


def plan(rows: Rows) -> str:
    lines = []
    for row, found in rows.items():
        name = row.removeprefix("imagenet ")
        if name == row:
            continue
        figures = [rate(found, stage) for stage in STAGES]
        found["gib"] = max([found.get(f"{stage}_gib", 0.0) for stage in STAGES])
        figures += [number(found, key, "").strip() for key in ("gib", "hours_1", "hours_8")]
        epochs = f"{Recipe.read(name).supernet.epochs:g} + {Recipe.read(name).retrain.epochs:g} epochs"
        failed = f" (not finished: {found['failed'][:60]})" if "failed" in found else ""
        lines.append(f"| {name}, {epochs}{failed} | {found.get('batch', '–')} | {' | '.join(figures)} |")
    return PLAN.format(origin=origin(rows["provenance"]), table="\n".join(lines))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--from", dest="folder", type=Path, help="where the files are")
    args = parser.parse_args()
    for name in FILES if args.folder else ():
        shutil.copyfile(args.folder / name, RESULTS / name)
    rows, tests = (json.loads((RESULTS / name).read_text()) for name in FILES)
    (RESULTS / "speed.md").write_text(speed(rows, tests))
    if any(name.startswith("imagenet ") and "failed" not in row for name, row in rows.items()):
        (RESULTS / "imagenet-plan.md").write_text(plan(rows))


if __name__ == "__main__":
    main()
