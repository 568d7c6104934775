"""The fifth and sixth comparisons (docs/results/rivals.md): bcnet as it ships and others' networks, by one code.

    python benchmarks/rivals_fifth.py --data DIR --out DIR --seconds S --jobs JOB...

Jobs run in the order they are given in, and none begins that would not end within ``--seconds``; rows go to
DIR/rows.jsonl as they come, and what is there already is not done again, so that a second call goes on. A job that
fails is told, and the others go on without it. A job is

- ``base:N:M``: train the given network for N epochs, and M more in which it is taught by itself (DIR/base);
- ``plan:BUDGETS:METHODS``: others' channels (rivals.py plan), in processes of their own (DIR/plan-METHOD.json);
- ``wait:METHOD``: until the plan of a method is there, which another process makes;
- ``search:BUDGET``: a run of bcnet up to its search, and its finalists (DIR/run-BUDGET, DIR/bcnet-BUDGET.json);
- ``bcnet:BUDGET:EPOCHS:RATE``: the race of its finalists, seed by seed; the winner trained to the end is a row;
- ``rivals:BUDGET:EPOCHS:RATE:METHODS``: others' networks, seed by seed; those whose plan is there. bcnet-NAME is one
  of bcnet's finalists without a race;
- ``equal:BUDGET:EPOCHS:RATE:METHODS``: the same for as many epochs as fit into the seconds of ``bcnet`` at these, for
  who pays nothing for choosing; ``best`` is the rate at which ``uniform`` has the lower held-out loss.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import rivals_base
import torch
from inherited_table import append, read_rows
from parts import BcnetError, Images, provenance
from rivals_one_code import Comparison, key

BASE = {"lr": "0.2", "warmup": "3", "cutout": "8"}
AGAIN = {"lr": "0.1", "warmup": "1", "cutout": "8", "taught": "0.5"}
SLOWER, FIRST = 1.1, 40.0
"""By how much a job may take longer than one like it did, and the seconds that the first of a kind may take."""


class Calls:
    """The jobs of a call, within its seconds."""

    def __init__(self, args: argparse.Namespace, images: Images, start: float):
        self.args, self.images, self.start = args, images, start
        self.rows = [row for row in read_rows(args.out / "rows.jsonl") if "method" in row]
        self.longest: dict[str, float] = {}
        self.choosing: list[subprocess.Popen[bytes]] = []
        self._comparison: Comparison | None = None

    @property
    def comparison(self) -> Comparison:
        if self._comparison is None:
            self._comparison = Comparison(self.args, self.images)
        return self._comparison

    def job(self, text: str) -> None:
        kind, *rest = text.split(":")
        if kind == "base":
            self._base(*map(int, rest))
        elif kind == "plan":
            self._plans(rest[0].split(","), rest[1].split(","))
        elif kind == "wait":
            file = self.args.out / f"plan-{rest[0]}.json"
            while not file.exists() and time.perf_counter() - self.start < self.args.seconds:
                time.sleep(0.5)
        elif kind == "search":
            self._within("search", lambda: self.comparison.search(rest[0]))
        elif kind in ("bcnet", "rivals", "equal"):
            budget, epochs, lr, *methods = rest
            rate = self._best_rate(budget, int(epochs)) if lr == "best" else float(lr)
            self._train(kind, budget, int(epochs), rate, methods[0].split(",") if methods else [])
        else:
            raise BcnetError(f"unknown job {text!r}: see the head of this file")

    def _base(self, epochs: int, again: int) -> None:
        out, begun = self.args.out / "base", time.perf_counter()
        if (out / "base.json").exists():
            return
        flags = ["--fused", "--networks", self.args.network, "--batch", str(self.args.batch)]
        flags += ["--quick"] if self.args.quick else []
        for number, (settings, count) in enumerate(((BASE, epochs), (AGAIN, again))):
            folder = out if number == (again > 0) else self.args.out / "first"
            more = [] if number == 0 else ["--again", str(self.args.out / "first")]
            more += [word for name, value in settings.items() for word in (f"--{name}", value)]
            if count:
                rivals_base.main([*flags, *more, "--out", str(folder), "--most-epochs", str(count)], self.images)
        print(f"base: {time.perf_counter() - begun:.1f} s", flush=True)

    def _plans(self, budgets: list[str], methods: list[str]) -> None:
        """Begin others' choosing, each in a process of its own; a plan that is there is not made again."""
        script = Path(__file__).with_name("rivals.py")
        for method in methods:
            names, file = [method], self.args.out / f"plan-{method}.json"
            if method == "random":
                names = [f"random-{n}" for n in range(3)]
            known = json.loads(file.read_text()).get(self.args.network, {}) if file.exists() else {}
            if all(name in known.get(budget, {}) for budget in budgets for name in names):
                continue
            words = [sys.executable, script, "plan", "--base", self.args.out / "base", "--networks", self.args.network]
            words += ["--out", file, "--budgets", *budgets, "--methods", *names]
            words += ["--quick"] if self.args.quick else ["--data", self.args.data]
            words += [] if method == "fastnas" else ["--device", "cpu"]
            self.choosing.append(subprocess.Popen(list(map(str, words)), env={**os.environ, "OMP_NUM_THREADS": "2"}))
            if self.args.quick:
                self.choosing[-1].wait()

    def _train(self, kind: str, budget: str, epochs: int, lr: float, methods: list[str]) -> None:
        mark: dict[str, int] = {}
        if kind == "equal":
            mark, epochs = {"equal_to": epochs}, self._epochs(budget, epochs, lr)
        side = self.args.side
        groups = [methods[n : n + side] for n in range(0, len(methods), side)] if kind != "bcnet" else [["bcnet"]]
        for seed, group in itertools.product(self.args.seeds, groups):
            todo = [method for method in group if not self._known(budget, epochs, lr, seed, method)]
            if todo:
                self._within(f"{kind} {budget} {epochs}", partial(self._group, budget, epochs, lr, seed, todo, mark))

    def _group(self, budget: str, epochs: int, lr: float, seed: int, methods: list[str], mark: dict[str, int]) -> None:
        if methods == ["bcnet"]:
            rows = [self.comparison.bcnet(budget, epochs, lr, seed)]
        else:
            rows = [{**row, **mark} for row in self.comparison.rivals(budget, epochs, lr, seed, methods)]
        append(self.args.out / "rows.jsonl", rows)
        self.rows += rows
        for row in rows:
            said = f"{row['method']} {row.get('winner', '')}".strip()
            print(
                f"{budget} {epochs} x {lr} seed {seed} {said}: {row['test']['accuracy']:.2f} %, "
                f"{row['making_seconds']:.1f} + {row['lesson_seconds']:.1f} + {row['tuning_seconds']:.1f} s",
                flush=True,
            )

    def _epochs(self, budget: str, epochs: int, lr: float) -> int:
        """As many epochs as a network that costs nothing to choose has time for in the seconds of bcnet."""
        alike = [r for r in self.rows if (r["budget"], r["recipe"]["lr"]) == (budget, lr)]
        alike = [r for r in alike if r["recipe"]["epochs"] == epochs]
        names = ("plan_seconds", "making_seconds", "tuning_seconds", "lesson_seconds")
        ours = [sum(r[name] for name in names) for r in alike if r["method"] == "bcnet"]
        each = [(r["tuning_seconds"] + r["lesson_seconds"]) / epochs for r in alike if r["method"] != "bcnet"]
        if not ours or not each:
            raise BcnetError(f"equal seconds at {budget} need rows of bcnet and of a rival for {epochs} epochs at {lr}")
        return int(np.mean(ours) / min(each))  # the pace of a row that had the machine to itself

    def _best_rate(self, budget: str, epochs: int) -> float:
        alike = [row for row in self.rows if (row["budget"], row["recipe"]["epochs"]) == (budget, epochs)]
        raced = {row["recipe"]["lr"] for row in alike if row["method"] == "bcnet"}
        losses: dict[float, list[float]] = {}
        for row in alike:
            if row["method"] == "uniform" and row["recipe"]["lr"] in raced:
                losses.setdefault(row["recipe"]["lr"], []).append(row["val"]["loss"])
        if not losses:
            raise BcnetError(f"the best rate at {budget} needs rows of bcnet and uniform for {epochs} epochs")
        return min(losses, key=lambda lr: float(np.mean(losses[lr])))

    def _known(self, budget: str, epochs: int, lr: float, seed: int, method: str) -> bool:
        wanted = key(self.args, budget, epochs, lr, seed, method)
        return any(all(row[name] == value for name, value in wanted.items()) for row in self.rows)

    def _within(self, kind: str, work: Callable[[], object]) -> None:
        begun = time.perf_counter()
        expected = SLOWER * self.longest[kind] if kind in self.longest else FIRST
        if begun - self.start + expected > self.args.seconds:
            print(f"left for another call: {kind}", flush=True)
            return
        work()
        self.longest[kind] = max(self.longest.get(kind, 0.0), time.perf_counter() - begun)


def arguments(given: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--jobs", nargs="+", required=True)
    parser.add_argument("--network", default="mobilenetv2_cifar")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--seconds", type=float, default=1e9)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--side", type=int, default=3, help="rivals that train side by side")
    parser.add_argument("--at-once", type=int, default=4, help="finalists that do, at least race.finalists")
    parser.add_argument("--recipe", type=json.loads, default={}, help="keys of bcnet's recipe, as JSON")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--quick", action="store_true", help="tiny networks and synthetic images on the CPU")
    return parser.parse_args(given)


def main(given: Sequence[str] | None = None) -> None:
    start = time.perf_counter()
    args = arguments(given)
    args.device = "cpu" if args.quick else args.device
    args.out.mkdir(parents=True, exist_ok=True)
    images = Images.synthetic(args.device) if args.quick else Images.cifar10(args.data, args.device)
    append(args.out / "rows.jsonl", [{"provenance": provenance(args.device), "jobs": args.jobs}])
    calls = Calls(args, images, start)
    failed = []
    for text in args.jobs:
        try:
            calls.job(text)
        except Exception:
            traceback.print_exc()
            failed.append(text)
    for process in calls.choosing:
        process.kill()
    print(f"in all {time.perf_counter() - start:.1f} s", flush=True)
    if failed:
        raise BcnetError(f"these jobs failed: {' '.join(failed)}")


if __name__ == "__main__":
    torch.manual_seed(0)
    try:
        main()
    except BcnetError as error:
        raise SystemExit(f"error: {error}") from None
