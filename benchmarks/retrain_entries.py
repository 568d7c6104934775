"""Do entries of the released Channel-Bench tables come out again when they are trained here?

    python benchmarks/retrain_entries.py draw --tables DIR
    python benchmarks/retrain_entries.py train --data cifar10:DIR --out FILE.jsonl --device cuda --seconds 300
    python benchmarks/retrain_entries.py judge --tables DIR --out docs/results/retrained-entries.jsonl

``draw`` prints the keys of 15 entries of each table, which are in this file: training needs no table. ``train`` trains
them by the tables' recipe, those of both spaces by turns, in an order in which the first few are spread over all; rows
that are in FILE are not made again (:mod:`trainings`). ``judge`` writes the page beside FILE, whose first part is the
plan.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import numpy as np
from intervals import half
from trainings import Job, Row, Setting, known, train_all

from bcnet.bench.correlation import kendall, pearson
from bcnet.bench.spaces import RELEASED, get_space
from bcnet.bench.table import ChannelBench
from bcnet.utils.provenance import origin

DRAWN = 15
ORDER = (1, 13, 7, 4, 10, 0, 14, 2, 12, 5, 9, 3, 11, 6, 8)
"""In which fifteenths of a table are trained: the first few are spread over all of it."""
_KEYS = {
    "mobilenet": "1111442 3334441 3242422 2143222 4222331 1112121 3434332 2221214 4442432 3224114 1324142 1232111 "
    "4313444 2443414 3431132",
    "resnet": "2422111 3133414 2223331 1132442 3322211 1133112 4122342 3121231 4434113 4144142 3133442 1123322 "
    "3333121 1343441 4341133",
}
ENTRIES = {name: keys.split() for name, keys in _KEYS.items()}
"""By :func:`drawn`, in that order."""
RECIPE = {"epochs": 60, "lr": 0.1, "momentum": 0.9, "nesterov": False, "weight_decay": 5e-4, "warmup": 0, "head": 0}
FUSED = ("mobilenet",)
"""Spaces whose networks are trained by the fused step; those of dense convolutions are as fast by autograd."""
RESULTS = Path(__file__).parents[1] / "docs" / "results"


def drawn(table: ChannelBench) -> list[str]:
    """Keys of the middle of every fifteenth of a table in the order of its *first* run, by :data:`ORDER`. So the mean
    of the other two runs, which entries are compared with, is none that they were drawn by."""
    ranked = np.argsort(table.acc[:, 0], kind="stable")
    middle = [int((part + 0.5) * len(ranked) / DRAWN) for part in ORDER]
    return [str(table.space.keys(int(ranked[place]))) for place in middle]


def jobs(epochs: int, spaces: tuple[str, ...] = tuple(ENTRIES)) -> list[Job]:
    """All entries, a space after the other."""
    found = []
    for number in range(DRAWN):
        for name in spaces:
            key, space = ENTRIES[name][number], get_space(name)
            widths = tuple(int(c) for c in space.widths(space.parse(key)))
            place = {"space": name, "key": key, "number": number}
            recipe = {**RECIPE, "epochs": epochs}
            found.append(Job(place, f"zoo:{RELEASED[name].network}", widths, number, recipe, name in FUSED))
    return found


# Judging.


def judged(rows: list[Row], table: ChannelBench) -> dict[str, Any]:
    """How the accuracies of ``rows`` lie to those of the table's other two runs, by the best epoch and the last."""
    entries = [table.query(row["key"]) for row in rows]
    theirs = np.array([entry.acc[1:].mean() for entry in entries])
    noise = float(np.sqrt(np.mean(table.std**2)))
    found: dict[str, Any] = {"entries": len(rows), "noise": noise * 1.5**0.5}
    for by in ("best", "last"):
        ours = np.array([row[by] for row in rows])
        gap = ours - theirs
        found[by] = {"ours": float(ours.mean()), "theirs": float(theirs.mean()), "gap": float(gap.mean())}
        if len(rows) > 2:
            spread = float(gap.std(ddof=1))
            figures = {"half": half(gap), "spread": spread, "pearson": pearson(ours, theirs)}
            found[by] |= {**figures, "kendall": kendall(ours, theirs)}
    return found


def page(rows: list[Row], tables: dict[str, ChannelBench]) -> str:
    done = [row for row in rows if "key" in row]
    if not done:
        return TEXT.format(found="It has not been run yet.\n")
    lines = ["| space | entries | read at | here | table | difference | spread | expected | Pearson | Kendall |"]
    lines += ["| --- | ---: | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |"]
    each = ["| space | key | best epoch | last epoch | runs 2 and 3 | run 1, drawn by | ms a step | engine |"]
    each += ["| --- | --- | ---: | ---: | ---: | ---: | ---: | --- |"]
    for name, table in tables.items():
        mine = sorted((row for row in done if row["space"] == name), key=lambda row: row["number"])
        if not mine:
            continue
        found = judged(mine, table)
        lines += [_line(name, by, found) for by in ("best", "last")]
        for row in mine:
            entry = table.query(row["key"])
            figures = f"{row['best']:.2f} | {row['last']:.2f} | {entry.acc[1:].mean():.2f} | {entry.acc[0]:.2f}"
            each.append(f"| {name} | {row['key']} | {figures} | {row['ms_a_step']:.2f} | {row['engine']} |")
    timed = [row for row in rows if "throughput" in row]
    speeds = ", ".join(f"{row['steps_a_second']:.0f} with {row['processes']}" for row in timed)
    made = f"{origin(done[-1])}: `{done[-1]['command']}`."
    told = [f"Steps a second of all processes together, on the first network: {speeds}.", ""] if timed else []
    return TEXT.format(found="\n".join([made, "", *lines, "", *told, *each, ""]))


def _line(name: str, by: str, found: dict[str, Any]) -> str:
    at = found[by]
    told = f"| {name} | {found['entries']} | {by} epoch | {at['ours']:.2f} | {at['theirs']:.2f} | {at['gap']:+.2f}"
    if "half" not in at:
        return f"{told} | | {found['noise']:.2f} | | |"
    figures = f"{at['spread']:.2f} | {found['noise']:.2f} | {at['pearson']:.2f} | {at['kendall']:.2f}"
    return f"{told} ± {at['half']:.2f} | {figures} |"


TEXT = """# Entries of the released tables, trained again

Do our recipe and our images (CIFAR-10 re-encoded as JPEG, quality 95) give the accuracies of Channel-Bench-Macro?
`benchmarks/retrain_entries.py`.

## The plan, written before the run

- 15 entries of each table: the middle of every fifteenth in the order of its *first* run, so that the mean of the
  other two runs, which they are compared with, is none that they were drawn by. Their keys are in the script, in an
  order in which the first few are spread over all of the table; they are trained in that order, a network of each
  space by turns, as far as the time goes.
- The tables' recipe: 60 epochs of all 50,000 training images, batches of 256, SGD at 0.1 with a cosine, momentum 0.9,
  weight decay 5e-4, crops after 4 pixels of padding, flips; in bf16, MobileNets by the fused step. Each entry once.
- What counts: the test accuracy of the *best* epoch, as in the tables, less the mean of the entry's runs 2 and 3, its
  mean over entries with a 95 % interval (Student's t), and Pearson's correlation of both. The last epoch stands beside
  it. `expected` is the spread of that difference if only the noise between runs were at work. Nothing is run again
  with other settings.

## What came of it

{found}
**What this does not show**: that the tables' trainings and ours are the same where a mean difference is within its
interval; details of a recipe that the paper does not print may cancel out. An interval is over the entries drawn, each
trained once, and Kendall over so few networks is uncertain by 0.2 and more.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", choices=["draw", "train", "judge"])
    parser.add_argument("--data")
    parser.add_argument("--tables", type=Path)
    parser.add_argument("--out", type=Path, default=RESULTS / "retrained-entries.jsonl")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--processes", type=int, default=3, help="the most that are tried at once")
    parser.add_argument("--mps", action="store_true", help="share the GPU by NVIDIA's service, where it can be had")
    parser.add_argument("--spaces", nargs="+", choices=list(ENTRIES), default=list(ENTRIES))
    parser.add_argument("--epochs", type=int, default=RECIPE["epochs"])
    args = parser.parse_args()
    if args.work == "train":
        setting = Setting(args.data, args.out, args.device, args.seconds, args.processes, mps=args.mps)
        sys.exit(0 if train_all(jobs(args.epochs, tuple(args.spaces)), setting) else 1)
    tables = {name: ChannelBench.load(name, args.tables) for name in ENTRIES}
    if args.work == "draw":
        print({name: drawn(table) for name, table in tables.items()})
    else:
        args.out.with_suffix(".md").write_text(page(known(args.out), tables))


if __name__ == "__main__":
    main()
