"""bcnet as a user calls it beside other pruners, on small networks that a CPU can train (docs/results/rivals-small.md).

    python benchmarks/rivals_small.py run --cifar FOLDER [--seeds 21 22 23]
    python benchmarks/rivals_small.py page

Everybody's network is fine-tuned by the same code on the same batches, at a rate that probes choose for each of them.
A stopped run goes on where it was.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from channels import Cutter, Kept
from fastnas import search as fastnas
from fine_tuning_rate import figures
from intervals import interval
from pruners import prune
from reconstruction import Images, network
from rows import RESULTS, append, command_line, put, read
from torch import Tensor, nn

import bcnet
from bcnet.data.cifar10 import read_cifar10
from bcnet.data.half import halves
from bcnet.data.source import Data, from_loaders
from bcnet.space.importance import importance
from bcnet.space.network import trace
from bcnet.training.optim import Optimisation
from bcnet.training.rate import choose_rate, probe_loss
from bcnet.training.reconstruction import inherited
from bcnet.training.retraining import Distillation, Retraining, retrain
from bcnet.utils.provenance import provenance

PAGE = RESULTS / "rivals-small.md"
TRAIN, HELD, BATCH, CUT_BATCHES = 4_000, 2_000, 64, 8
NETWORK, BUDGET, EPOCHS = "mobilenet", 0.15, 6
FINE = 4
"""FastNAS's widths are multiples of this: eights leave a layer of 24 channels three widths."""
BASE = Optimisation(epochs=12, lr=0.1, warmup=0.5, weight_decay=5e-4)
TUNED = Optimisation(epochs=EPOCHS, lr=None, warmup=0.5, weight_decay=5e-4, head=64.0)
RIVALS = ("tp-isomorphic-fpgm", "tp-local-l2", "fastnas")
EQUAL = ("tp-isomorphic-fpgm", "tp-local-l2")
"""Those who choose for nothing, and are also fine-tuned for all of bcnet's seconds."""
LONG = ("found", "uniform")
"""bcnet's networks, which are also fine-tuned for as many epochs as local L2 can be in these seconds."""
NAMES = {
    "found": "**bcnet: what a run ships**",
    "uniform": "uniform, `reconstruct`, by bcnet",
    "fastnas": "FastNAS",
    "tp-isomorphic-fpgm": "Torch-Pruning isomorphic FPGM",
    "tp-local-l2": "Torch-Pruning local L2 = uniform widths",
    "tp-isomorphic-fpgm, equal seconds": "Torch-Pruning isomorphic FPGM, for all of bcnet's seconds",
    "tp-local-l2, equal seconds": "Torch-Pruning local L2, for all of bcnet's seconds",
    "found, long": "bcnet: the widths it ships, for as many epochs",
    "uniform, long": "uniform, `reconstruct`, for as many epochs",
}


class Augmented:
    """Training batches, shifted by up to two pixels and mirrored; shuffled by torch, so that a run repeats them."""

    def __init__(self, x: Tensor, y: Tensor):
        self.x, self.y = torch.nn.functional.pad(x, (2, 2, 2, 2)), y

    def __len__(self) -> int:
        return len(self.x) // BATCH

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        side = self.x.shape[-1] - 4
        for at in torch.randperm(len(self.x))[: len(self) * BATCH].split(BATCH):
            top, left = (torch.randint(0, 5, (BATCH, 1, 1)) for _ in range(2))
            columns = torch.arange(side).expand(BATCH, 1, side)
            columns = torch.where(torch.rand(BATCH, 1, 1) < 0.5, side - 1 - columns, columns) + left
            rows = torch.arange(side)[None, :, None] + top
            picked = self.x[at].permute(0, 2, 3, 1)[torch.arange(BATCH)[:, None, None], rows, columns]
            yield picked.permute(0, 3, 1, 2), self.y[at]


class Trained:
    """One trained network, its images, and what others make of it."""

    def __init__(self, cifar: Path, seed: int):
        self.seed = seed
        found = read_cifar10(cifar)
        order = np.random.default_rng(0).permutation(len(found.train.labels))[: TRAIN + HELD]
        x, y = Images.small(found.train.images[order]), torch.from_numpy(found.train.labels[order])
        tests = Images.small(found.test.images), torch.from_numpy(found.test.labels)
        self.loaders = Augmented(x[:TRAIN], y[:TRAIN]), _batches(x[TRAIN:], y[TRAIN:]), _batches(*tests)
        torch.manual_seed(seed)
        self.model = network(NETWORK)
        retrain(self.model, self.data.train, Retraining(optimisation=BASE, seed=seed))
        self.model.to(memory_format=torch.contiguous_format).eval()  # type: ignore[call-overload]

    @cached_property
    def data(self) -> Data:
        """As a run of bcnet sees it, but judged by the half of the held-out images that judges a race there."""
        given = from_loaders(*self.loaders, classes=10, seed=self.seed)
        return Data("images", given.train, halves(given.val, self.seed)[1], given.test, classes=10)

    @cached_property
    def cutter(self) -> Cutter:
        widest = max(tensor.shape[0] for tensor in self.model.state_dict().values() if tensor.ndim)
        return Cutter(self.model, trace(self.model, torch.randn(2, 3, 16, 16), groups=widest))

    @property
    def flops(self) -> float:
        return BUDGET * self.cutter.flops(self.cutter.space.max)

    def by_bcnet(self) -> dict[str, dict[str, Any]]:
        """What a user gets from one call."""
        train, val, test = self.loaders
        recipe = {"retrain": {"epochs": EPOCHS}, "compare": ["uniform"], "threads": 1}
        example, budget = torch.randn(1, 3, 16, 16), f"flops={100 * BUDGET:g}%"
        begun = time.process_time()
        with tempfile.TemporaryDirectory() as folder:
            asked: dict[str, Any] = {"test": test, "recipe": recipe, "seed": self.seed, "progress": False}
            result = bcnet.slim(self.model, example, train, val, budget=budget, out=Path(folder) / "run", **asked)
            whole = round(time.process_time() - begun)
            run = result.run
            about = {"ships": run.chosen, "rate": run.read("rate")["lr"], "notes": run.read("search")["notes"]}
            stages = {name: run.read(name)["seconds"] for name in ("search", "rate", "race")}
            found = {}
            for method in ("found", "uniform"):
                kept = run.read(f"retrain/{run.chosen if method == 'found' else method}")
                accuracy, loss = round(100 * kept["score"], 2), round(kept["loss"], 4)
                found[method] = {"widths": kept["widths"], "test": {"accuracy": accuracy, "loss": loss}}
        found["found"] |= {**about, "stages": stages, "seconds": {"whole": whole}}
        return found

    def by_rival(self, method: str, epochs: int = EPOCHS) -> dict[str, Any]:
        begun = time.process_time()
        kept = self._kept(method)
        chosen = round(time.process_time() - begun)
        row = self._tuned(lambda: self.cutter.cut(kept), epochs)
        return {"widths": [len(stay) for stay in kept], **row, "seconds": {"choosing": chosen, **row["seconds"]}}

    def by_widths(self, widths: list[int], epochs: int) -> dict[str, Any]:
        """As bcnet cuts a network, fine-tuned as everybody's."""
        space, some = self.cutter.space, self._some()
        keep = importance(space, self.model, "l2")
        return {
            "widths": widths,
            **self._tuned(lambda: inherited(space, self.model, np.array(widths), keep, some), epochs),
        }

    def _tuned(self, cut: Callable[[], nn.Module], epochs: int) -> dict[str, Any]:
        """What becomes of a network that ``cut`` makes, at a rate that probes choose."""
        begun = time.process_time()
        how = replace(TUNED, epochs=epochs)
        config = Retraining(how, Distillation(alpha=0.9, temperature=4.0), seed=self.seed)
        rate, probes = choose_rate(lambda lr: probe_loss(cut(), lr, self.data, config, teacher=self.model))
        slim = cut()
        config = replace(config, optimisation=replace(how, lr=rate))
        retrain(slim, self.data.train, config, teacher=self.model)
        return {
            "rate": rate,
            "epochs": epochs,
            "probes": {str(lr): loss for lr, loss in probes.items()},
            "test": figures(slim, self.data.test),
            "seconds": {"tuning": round(time.process_time() - begun)},
        }

    def _some(self) -> list[tuple[Tensor, Tensor]]:
        return [batch for batch, _ in zip(self.data.train.batches(0), range(CUT_BATCHES), strict=False)]

    def _kept(self, method: str) -> Kept:
        some = self._some()
        if method != "fastnas":
            return prune(self.cutter, method, self.flops, some)
        with tempfile.TemporaryDirectory() as folder:
            checkpoint = Path(folder) / "sensitivity.pt"
            return fastnas(self.cutter, self.flops, some, self.loaders[1], checkpoint, "fp32", divisor=FINE)


def _batches(x: Tensor, y: Tensor) -> list[tuple[Tensor, Tensor]]:
    return list(zip(x.split(500), y.split(500), strict=True))


def run(given: argparse.Namespace) -> None:
    done = {(row["seed"], row["method"]) for row in read(given.out)}
    for seed in given.seeds:
        wanted = [method for method in NAMES if (seed, method) not in done]
        if not wanted:
            continue
        trained = Trained(given.cifar, seed)
        shared = {"seed": seed, "given": figures(trained.model, trained.data.test), "made": provenance()}

        def keep(method: str, row: dict[str, Any], shared: dict[str, Any] = shared) -> None:
            append(given.out, {"method": method, **row, **shared})
            print(shared["seed"], method, row["test"], row.get("rate"), flush=True)

        for method in RIVALS:
            if method in wanted:
                keep(method, trained.by_rival(method))
        if "found" in wanted:
            for method, row in trained.by_bcnet().items():
                keep(method, row)
        for method in EQUAL:
            if f"{method}, equal seconds" in wanted:
                epochs = equal_epochs({row["method"]: row for row in read(given.out) if row["seed"] == seed}, method)
                keep(f"{method}, equal seconds", trained.by_rival(method, epochs))
        for method in LONG:
            if f"{method}, long" in wanted:
                rows = {row["method"]: row for row in read(given.out) if row["seed"] == seed}
                epochs = rows["tp-local-l2, equal seconds"]["epochs"]
                keep(f"{method}, long", trained.by_widths(rows[method]["widths"], epochs))


def equal_epochs(rows: dict[str, dict[str, Any]], method: str) -> int:
    """As many epochs as a rival can be fine-tuned for in the processor seconds of one call of bcnet."""
    seconds = rows[method]["seconds"]
    left = rows["found"]["seconds"]["whole"] - seconds["choosing"]
    return max(EPOCHS, int(EPOCHS * left / seconds["tuning"]))


def table(rows: list[dict[str, Any]]) -> str:
    """The table of docs/results/rivals-small.md."""
    by_method: dict[str, dict[int, dict[str, Any]]] = {}
    for row in rows:
        by_method.setdefault(row["method"], {})[row["seed"]] = row
    accuracy: Callable[[str], dict[int, float]] = lambda name: {  # noqa: E731, a formula
        seed: row["test"]["accuracy"] for seed, row in by_method[name].items()
    }
    ranked = sorted(by_method, key=lambda name: -float(np.mean(list(accuracy(name).values()))))
    ours = accuracy("found")
    lines = ["| network | test accuracy | seed by seed | bcnet over it | rate |", "| --- | ---: | --- | ---: | --- |"]
    for name in ranked:
        found = accuracy(name)
        each = ", ".join(f"{found[seed]:.2f}" for seed in sorted(found))
        over = "" if name == "found" else interval([ours[seed] - found[seed] for seed in sorted(found)], "+")
        rates = ", ".join(f"{row['rate']:g}" for _, row in sorted(by_method[name].items()) if "rate" in row)
        lines.append(f"| {NAMES[name]} | {np.mean(list(found.values())):.2f} | {each} | {over} | {rates} |")
    given = {row["seed"]: row["given"]["accuracy"] for row in rows}
    lines += ["", "The given networks have " + ", ".join(f"{given[seed]:.2f}" for seed in sorted(given)) + " %."]
    if "found, long" in by_method:
        others = ("uniform, long", *(f"{method}, equal seconds" for method in EQUAL))
        long = accuracy("found, long")
        over = []
        for name in others:
            gap = [long[seed] - value for seed, value in accuracy(name).items()]
            over.append(f"{NAMES[name].split(', for')[0]}: {interval(gap, '+')}")
        lines.append(f"For as many epochs, the widths that bcnet ships minus {'; '.join(over)}.")
    return "\n".join(lines)


def page(given: argparse.Namespace) -> None:
    put(PAGE, {"table": table(read(given.out))})


def main() -> None:
    seeds = {"type": int, "nargs": "*", "default": [21, 22, 23]}
    command_line(__doc__, "rivals-small", {"run": run, "page": page}, {"--seeds": seeds})


if __name__ == "__main__":
    main()
