"""MobileNetV2 and ResNet18 at half of their latency by onnxruntime: bcnet beside Torch-Pruning, all of it on one CPU.

    python benchmarks/latency_cpu.py train --cifar FOLDER --networks NAME
    python benchmarks/latency_cpu.py run --cifar FOLDER --networks NAME
    python benchmarks/latency_cpu.py page

What is computed is written down in docs/results/latency-budget.md, and ``page`` puts its table there. Trained networks
and run folders lie in build/latency-cpu; a stopped run goes on where it was.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from channels import Cutter, Kept
from intervals import interval
from latency_budget import BACKEND, WANTED, Batches, _range, ratios
from pruners import SCORERS, widest
from rows import RESULTS, append, command_line, put, read
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import bcnet
from bcnet.data.cifar10 import MEAN, STD, read_cifar10
from bcnet.data.source import from_loaders
from bcnet.models import build
from bcnet.training.optim import Optimisation
from bcnet.training.retraining import Distillation, Retraining, evaluate, retrain
from bcnet.utils.provenance import provenance

NETWORKS = {"resnet18_imagenet": 10, "mobilenetv2_imagenet": 12}
"""With the epochs that they are trained for."""
TRAIN, HELD, TUNED = 40_000, 5_000, 20_000
"""Images that networks are trained on, those held out, and those of the former that slim ones are fine-tuned on."""
SEEDS = (1, 2, 3)
RIVALS = ("tp-global-l2", "tp-local-l2", "tp-isomorphic-l2", "tp-global-fpgm")
VECTOR, HALVINGS = 16, 8
TAUGHT = Distillation(alpha=0.9, temperature=4.0)
HOW = Optimisation(epochs=3, lr=0.05, warmup=0.5, weight_decay=5e-4)
RECIPE: dict[str, Any] = {
    "latency": {"backend": BACKEND, "threads": 1},
    "healing": {"steps": 20},
    "search": {"evaluations": 16, "population": 8},
    "race": {"finalists": 4, "rounds": 1, "epochs": 1},
    "retrain": {"epochs": HOW.epochs, "lr": HOW.lr},
    "compare": ["full"],
    "threads": 1,
}
PAGE = RESULTS / "latency-budget.md"


class Images:
    """CIFAR-10: training, held-out and test images."""

    def __init__(self, folder: Path):
        found = read_cifar10(folder)
        order = np.random.default_rng(0).permutation(len(found.train.labels))[: TRAIN + HELD]
        x, y = _scaled(found.train.images[order]), torch.from_numpy(found.train.labels[order])
        self.train = Batches(x[:TRAIN], y[:TRAIN], augment=True)
        self.tuned = Batches(x[:TUNED], y[:TUNED], augment=True)
        self.val = Batches(x[TRAIN:], y[TRAIN:], augment=False)
        self.test = Batches(_scaled(found.test.images), torch.from_numpy(found.test.labels), augment=False)


def _scaled(images: np.ndarray) -> Tensor:
    return (torch.from_numpy(images).float() - torch.tensor(MEAN)[:, None, None]) / torch.tensor(STD)[:, None, None]


class Comparison:
    """One trained network, and what bcnet and Torch-Pruning make of it."""

    def __init__(self, name: str, images: Images, cache: Path):
        self.name, self.images, self.cache = name, images, cache
        self.model = build(name, classes=10)
        self.example = images.test.x[:1]

    def train(self) -> None:
        """The network that is to be slimmed, trained unless its file is there."""
        weights = self.cache / f"{self.name}.safetensors"
        if not weights.exists():
            torch.manual_seed(0)
            self.model = build(self.name, classes=10)
            how = Optimisation(epochs=NETWORKS[self.name], lr=0.1, warmup=1.0, weight_decay=5e-4)
            data = from_loaders(self.images.train, self.images.val, self.images.test, classes=10, seed=0)
            retrain(self.model, data.train, Retraining(how, seed=0))
            save_file({key: tensor.contiguous() for key, tensor in self.model.state_dict().items()}, weights)
        self.model.load_state_dict(load_file(weights))
        self.model.to(memory_format=torch.contiguous_format).eval()  # type: ignore[call-overload]

    def by_bcnet(self, seed: int) -> dict[str, Any]:
        """One call of ``bcnet.slim``."""
        result = bcnet.slim(
            *(self.model, self.example, self.images.tuned, self.images.val),
            test=self.images.test, budget=f"latency={WANTED:.0%}", recipe=RECIPE, seed=seed, progress=False,
            out=self.cache / f"{self.name}-{seed}",
        )  # fmt: skip
        about = {"ships": result.run.chosen, "held_by_search": result.run.read("search")["latency"]}
        return {**self.figures(result.model), **about, "widths": list(result.widths.values())}

    def by_rival(self, method: str, seed: int, kept: Kept) -> dict[str, Any]:
        """The channels that Torch-Pruning keeps, fine-tuned as bcnet's are."""
        slim = self._cutter().cut(kept)
        data = from_loaders(self.images.tuned, self.images.val, self.images.test, classes=10, seed=seed)
        retrain(slim, data.train, Retraining(HOW, TAUGHT, seed=seed), teacher=self.model)
        slim.to(memory_format=torch.contiguous_format)  # type: ignore[call-overload]
        return {**self.figures(slim.eval()), "widths": [len(stay) for stay in kept]}

    def kept(self, method: str, limit: float) -> Kept | None:
        """The widest network of ``method`` that is measured within ``limit`` of the latency; its widths are widened to
        multiples of what the CPU takes at once."""
        cutter = self._cutter()
        scores = cutter.importance(SCORERS[method.split("-")[2]]())

        def widened(kept: Kept) -> Kept:
            widths = np.array([-(-len(stay) // VECTOR) * VECTOR for stay in kept])
            return cutter.widened(kept, np.minimum(widths, cutter.space.max), scores)

        def holds(kept: Kept) -> bool:
            return float(np.median(ratios(self.model, cutter.cut(widened(kept)).eval(), self.example))) <= limit

        best = widest(cutter, method, holds, HALVINGS)
        return best and widened(best)

    def figures(self, slim: nn.Module) -> dict[str, Any]:
        measured = evaluate(slim, from_loaders(self.images.val, self.images.val, self.images.test, classes=10).test)
        params = [sum(p.numel() for p in net.parameters()) for net in (slim, self.model)]
        return {
            "accuracy": round(100 * measured["score"], 2),
            "loss": round(measured["loss"], 4),
            "latency": ratios(self.model, slim, self.example),
            "params": params[0] / params[1],
        }

    def _cutter(self) -> Cutter:
        return Cutter(self.model, bcnet.trace(self.model, self.images.test.x[:2], groups=10_000))


def run(given: argparse.Namespace) -> None:
    """All rows, each written as it is there: bcnet with every seed, then Torch-Pruning, method by method, which is
    allowed the latency of bcnet's slowest network where that is more than the budget."""
    images = Images(given.cifar)
    for name in given.networks:
        comparison = Comparison(name, images, given.cache)
        comparison.train()
        if given.what == "train":
            continue
        done = {(row["method"], row["seed"]): row for row in read(given.out) if row["network"] == name}
        full = comparison.figures(comparison.model)["accuracy"]

        def keep(method: str, seed: int, row: dict[str, Any], begun: float) -> None:
            row = {"network": name, "seed": seed, "method": method, "given": full, **row}  # noqa: B023
            row |= {"seconds": round(time.process_time() - begun), **provenance(packages=("torch", "onnxruntime"))}
            done[method, seed] = row  # noqa: B023
            append(given.out, row)
            print(json.dumps({k: row[k] for k in ("network", "method", "seed", "accuracy", "latency")}), flush=True)

        for seed in SEEDS:
            if ("bcnet", seed) not in done:
                begun = time.process_time()
                keep("bcnet", seed, comparison.by_bcnet(seed), begun)
        limit = max(WANTED, *(float(np.median(done["bcnet", seed]["latency"])) for seed in SEEDS))
        for method in given.rivals:
            missing = [seed for seed in SEEDS if (method, seed) not in done]
            kept = comparison.kept(method, limit) if missing else None
            if missing and kept is None:
                print(f"{name}: no network of {method} holds the latency", flush=True)
                continue
            for seed in missing:
                begun = time.process_time()
                keep(method, seed, comparison.by_rival(method, seed, kept), begun)  # type: ignore[arg-type]


def tables(rows: Sequence[dict[str, Any]]) -> str:
    """A table for every network: accuracies by seed, and bcnet's paired differences with their 95 % intervals."""
    lines = []
    for name in NETWORKS:
        own = {(row["method"], row["seed"]): row for row in rows if row["network"] == name}
        if not own:
            continue
        full = next(iter(own.values()))["given"]
        lines += ["", f"**{name}**, {full:.2f} % as given:", ""]
        lines += ["| method | accuracy | by seed | bcnet over it | latency, measured | parameters left |"]
        lines += ["| --- | ---: | --- | ---: | --- | ---: |"]
        for method in dict.fromkeys(method for method, _ in own):
            lines.append(_line(method, own))
    return "\n".join(lines)


def _line(method: str, own: dict[tuple[str, int], dict[str, Any]]) -> str:
    mine = [own[method, seed] for seed in SEEDS if (method, seed) in own]
    accuracy = [row["accuracy"] for row in mine]
    pairs = [own["bcnet", row["seed"]]["accuracy"] - row["accuracy"] for row in mine]
    over = "" if method == "bcnet" else interval(pairs, "+")
    latency = ", ".join(_range(row["latency"]) for row in mine)
    left = float(np.mean([row["params"] for row in mine]))
    each = ", ".join(f"{a:.2f}" for a in accuracy)
    return f"| {method} | {np.mean(accuracy):.2f} | {each} | {over} | {latency} | {left:.2f} |"


def page(given: argparse.Namespace) -> None:
    put(PAGE, {"cpu": tables(read(given.out)).strip()})


def main() -> None:
    ways = {"train": run, "run": run, "page": page}
    options = {
        "--networks": {"nargs": "+", "choices": list(NETWORKS), "default": list(NETWORKS)},
        "--rivals": {"nargs": "+", "choices": RIVALS, "default": list(RIVALS[:2])},
    }
    command_line(__doc__, "latency-cpu", ways, options)


if __name__ == "__main__":
    main()
