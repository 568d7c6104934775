"""The part of benchmarks/latency_rivals.py that wants a GPU, as one command that ends in time.

    python benchmarks/latency_rivals_run.py --data DIR --out DIR --seconds 390 [--weights mobilenetv2_cifar=FILE]

Trains ResNet18 and MobileNetV2 (those with ``--weights`` are read from a safetensors file), prunes both in processes of
their own on the CPU meanwhile, searches, and fine-tunes with seeds 1, 2 and 3. Under ``--out``: rows.jsonl, a row for
each fine-tuned network as its group ends, the most important groups first; a plan for each method; base/NETWORK. What
is there already is not done again, and no group is begun that would not end within ``--seconds``.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import latency_rivals
import rivals_base
import torch
from inherited_table import append, read_rows
from latency_rivals import BUDGET, RIVALS
from parts import BcnetError, Images, provenance
from rivals import Tuner
from side_by_side import Training, evaluate

NETWORKS = ("resnet18_cifar", "mobilenetv2_cifar")
SHARES = {"resnet18_cifar": 0.2, "mobilenetv2_cifar": 0.24}
"""Of all seconds, for the training of a network."""
SEARCHED = 20.0
"""Seconds of each search, after which no more configurations are scored."""
LR = {"resnet18_cifar": 0.1, "mobilenetv2_cifar": 0.2}
FIRST = ("bcnet-near-1", "bcnet-near-2", "bcnet-uniform", "tp-global-l2")
THEN = ("tp-global-fpgm", "tp-isomorphic-l2", "tp-local-l2")
RECIPE = {"lr": 0.05, "batch": 256, "taught": 0.9, "temperature": 4.0, "weight_decay": 5e-4}


class Comparison:
    """All steps, each of which leaves its files."""

    def __init__(self, args: argparse.Namespace, start: float):
        self.args, self.start = args, start
        self.images = Images.synthetic("cpu") if args.quick else Images.cifar10(args.data, args.device)
        self.rows = args.out / "rows.jsonl"
        self.pruning: list[subprocess.Popen[bytes]] = []
        self.tuners: dict[str, Tuner] = {}
        self.longest: dict[tuple[str, int], float] = {}
        self.recipe = {"epochs": args.tuning, **RECIPE}
        self.say(f"{len(self.images.index):,} training images")

    @property
    def spent(self) -> float:
        return time.perf_counter() - self.start

    def say(self, text: str) -> None:
        print(f"{self.spent:6.1f} s  {text}", flush=True)

    def base(self, name: str) -> Path:
        return self.args.out / "base" / name

    def plan(self, name: str, method: str) -> Path:
        return self.args.out / f"{name}-{method}.json"

    def train(self, name: str) -> None:
        """The network that is to be slimmed, and how good it is."""
        folder, given = self.base(name), self.args.weights.get(name)
        folder.mkdir(parents=True, exist_ok=True)
        if not (folder / "base.json").exists():
            if given is None:
                self._trained(name, folder)
            else:
                shutil.copy(given, folder / f"{name}-0.safetensors")
        model = rivals_base.load_base(folder, name, self.args.quick).to(self.images.test[0][0].device)
        dtype = "fp32" if self.args.quick else "bf16"
        found = {part: evaluate(model, getattr(self.images, part), dtype) for part in ("val", "test")}
        append(self.rows, [{"given": name, **found, "weights": str(given) if given else "trained here"}])
        self.say(f"{name} as given: {found['test']['accuracy']:.2f} %")

    def _trained(self, name: str, folder: Path) -> None:
        training = Training(
            self.args.epochs, LR[name], warmup=3.0, taught=0.0, cutout=8, dtype="fp32" if self.args.quick else "bf16",
            decay_all=True,
        )  # fmt: skip
        how = argparse.Namespace(
            networks=[name], seconds=SHARES[name] * self.args.seconds + rivals_base.END, again=None, out=folder,
            quick=self.args.quick, most_epochs=self.args.epochs, dtype=training.dtype,
        )  # fmt: skip
        rivals_base.fused(how, self.images, training, time.perf_counter())

    def prune(self, name: str) -> None:
        """Begin Torch-Pruning's methods, a process each."""
        for method in RIVALS:
            if self.plan(name, method).exists():
                continue
            command = [sys.executable, latency_rivals.__file__, "prune", "--network", name, "--methods", method]
            command += ["--base", str(self.base(name)), "--out", str(self.plan(name, method))]
            command += ["--tables", str(self.args.tables)] + (["--quick"] if self.args.quick else [])
            self.pruning.append(subprocess.Popen(command))

    def search(self, name: str) -> None:
        """bcnet's finalists, in ``NAME-bcnet.json``."""
        if self.plan(name, "bcnet").exists():
            return
        how = argparse.Namespace(
            base=self.base(name), network=name, tables=self.args.tables, quick=self.args.quick, seed=0,
            device=self.args.device, out=self.plan(name, "bcnet"), by="neighbours", at_once=3, lr=0.005,
            steps=self.args.steps, population=self.args.population, evaluations=self.args.evaluations,
            seconds=SEARCHED,
        )  # fmt: skip
        latency_rivals.search(how, self.images)
        self.say(f"{name}: searched")

    def groups(self) -> Iterator[tuple[str, int, Sequence[str]]]:
        """What is fine-tuned together, the most important first."""
        for methods in (FIRST, THEN):
            for seed in self.args.seeds:
                yield from ((name, seed, methods) for name in NETWORKS)

    def entries(self, name: str) -> dict[str, Any]:
        """What is planned so far, by method; pruning that takes longer than all else is waited for."""
        files = [self.plan(name, method) for method in ("bcnet", *RIVALS)]
        plans = [json.loads(file.read_text()) for file in files if file.exists()]
        return {method: entry for plan in plans for method, entry in plan[name][BUDGET].items()}

    def tune(self) -> None:
        """Rows of all groups, as far as time goes."""
        begun = {(row["network"], row["seed"], row["method"]) for row in read_rows(self.rows) if "method" in row}
        for name, seed, methods in self.groups():
            self._wait(name, methods)
            known = self.entries(name)
            todo = [m for m in methods if m in known and (name, seed, m) not in begun]
            expected = 1.05 * self.longest.get((name, len(todo)), self.args.expected)
            if not todo:
                continue
            if self.spent + expected > self.args.seconds:
                self.say(f"no time for {name}, seed {seed}: {', '.join(todo)}")
                continue
            now = time.perf_counter()
            self._tuned(name, seed, {m: known[m] for m in todo})
            self.longest[name, len(todo)] = max(self.longest.get((name, len(todo)), 0.0), time.perf_counter() - now)

    def _tuned(self, name: str, seed: int, entries: dict[str, Any]) -> None:
        if name not in self.tuners:
            how = argparse.Namespace(base=self.base(name), quick=self.args.quick, at_once=len(FIRST), **self.recipe)
            self.tuners[name] = Tuner(how, name, self.images)
        tuner = self.tuners[name]
        found = tuner.tune({method: tuner.kept(entry) for method, entry in entries.items()}, seed)
        labels = {"network": name, "budget": BUDGET, "seed": seed, "recipe": self.recipe}
        known = {method: {key: entries[method][key] for key in ("predicted", "seconds")} for method in found}
        append(self.rows, [{**labels, "method": m, **known[m], **row} for m, row in found.items()])
        for method, row in found.items():
            self.say(f"{name}, seed {seed}, {method}: {row['test']['accuracy']:.2f} %")

    def _wait(self, name: str, methods: Sequence[str]) -> None:
        """Until the plans of these methods are there, their processes have ended, or time is over."""
        wanted = [self.plan(name, method) for method in methods if method in RIVALS]
        while any(not file.exists() for file in wanted) and self.spent < self.args.seconds:
            if all(process.poll() is not None for process in self.pruning):
                return
            time.sleep(0.2)

    def run(self) -> None:
        about = {"provenance": provenance(self.args.device), "recipe": self.recipe}
        append(self.rows, [about])
        try:
            for name in NETWORKS:
                self.train(name)
                self.prune(name)
            for name in NETWORKS:
                try:
                    self.search(name)
                except (BcnetError, RuntimeError, ValueError) as error:  # the other network is worth having
                    self.say(f"{name}: no search, as {error}")
            self.tune()
        finally:
            for process in self.pruning:
                process.kill()
        self.say("done")


def main(given: Sequence[str] | None = None) -> None:
    start = time.perf_counter()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="a folder with CIFAR-10")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=390.0, help="in all")
    parser.add_argument("--weights", nargs="+", default=[], metavar="NETWORK=FILE", help="networks trained before")
    parser.add_argument("--tables", type=Path, default=latency_rivals.TABLES)
    parser.add_argument("--epochs", type=int, default=30, help="the most for training a network to be slimmed")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--tuning", type=int, default=4, help="epochs of fine-tuning")
    parser.add_argument("--steps", type=int, default=30, help="of healing before a network is scored")
    parser.add_argument("--population", type=int, default=24)
    parser.add_argument("--evaluations", type=int, default=60)
    parser.add_argument("--expected", type=float, default=25.0, help="seconds of the first group")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--quick", action="store_true", help="tiny networks and synthetic images on the CPU")
    args = parser.parse_args(given)
    args.weights = {name: Path(file) for name, file in (each.split("=", 1) for each in args.weights)}
    args.device = "cpu" if args.quick else args.device
    args.out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    Comparison(args, start).run()


if __name__ == "__main__":
    try:
        main()
    except BcnetError as error:
        raise SystemExit(f"error: {error}") from None
