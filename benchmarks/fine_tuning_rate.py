"""At which learning rate should a cut network be fine-tuned, and what do short probes know of it? On a CPU.

    python benchmarks/fine_tuning_rate.py run --cifar FOLDER --part choose|judge
    python benchmarks/fine_tuning_rate.py page

What is computed is written down in docs/results/fine-tuning-rate.md. A stopped run goes on where it was.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from reconstruction import Inverted, network
from rows import append, command_line, read
from scipy import stats
from torch import Tensor, nn

from bcnet.data import DeviceData, LoadOptions
from bcnet.data.cifar10 import MEAN, STD, read_cifar10
from bcnet.data.cluttered_digits import read_cluttered_digits
from bcnet.data.source import Data, Source
from bcnet.models import MODELS, build
from bcnet.search.constraints import Constraints
from bcnet.space.importance import importance
from bcnet.space.network import NetworkSpace, trace
from bcnet.training.optim import Optimisation
from bcnet.training.rate import choose_rate
from bcnet.training.recalibration import recalibrate
from bcnet.training.reconstruction import inherited
from bcnet.training.retraining import Distillation, Retraining, evaluate, retrain
from bcnet.utils.provenance import provenance

RATES = (0.3, 0.1, 0.05, 0.03, 0.01, 0.003, 0.001)
LENGTH, PROBE = 10, 1
"""Epochs of the whole fine-tuning, and of a probe."""
TRAIN, HELD = 4_000, 2_000
BATCH = 64
BASE = Optimisation(epochs=12, lr=0.1, warmup=0.5, weight_decay=5e-4)
LONGER = {("cluttered_cnn", 4): 60}
"""Networks and seeds that are trained for more epochs, so that there is more to lose."""
TAUGHT = Distillation(alpha=0.9, temperature=4.0)


class SqueezeExcite(nn.Module):
    """Channels scaled by what a bottleneck of half of them says."""

    def __init__(self, channels: int):
        super().__init__()
        self.scale = nn.Sequential(
            nn.AdaptiveAvgPool2d(1),
            *(nn.Conv2d(channels, channels // 2, 1), nn.Hardswish()),
            *(nn.Conv2d(channels // 2, channels, 1), nn.Hardsigmoid()),
        )

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale(x)


def chain() -> nn.Module:
    """A chain of eight convolutions without shortcuts, as VGG is."""
    layers: list[nn.Module] = []
    channels = 3
    for outputs, pooled in ((24, 0), (24, 1), (48, 0), (48, 1), (64, 0), (64, 0), (96, 1), (96, 0)):
        layers += [nn.Conv2d(channels, outputs, 3, 1, 1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()]
        layers += [nn.MaxPool2d(2)] if pooled else []
        channels = outputs
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 10))


def excited() -> nn.Module:
    """Inverted blocks with squeeze-and-excitation, as EfficientNet has them."""
    layers: list[nn.Module] = [nn.Conv2d(3, 24, 3, 1, 1, bias=False), nn.BatchNorm2d(24), nn.Hardswish()]
    channels = 24
    for outputs, stride in ((24, 1), (32, 2), (32, 1), (48, 2), (48, 1)):
        layers += [Inverted(channels, outputs, stride), SqueezeExcite(outputs)]
        channels = outputs
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 10))


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "mobilenet": partial(network, "mobilenet"),
    "resnet": partial(network, "resnet"),
    "chain": chain,
    "excited": excited,
    "cluttered_cnn": lambda: build("cluttered_cnn", list(MODELS["cluttered_cnn"].widths)),
}
CASES: dict[str, list[tuple[str, int, str, int]]] = {
    "choose": [(name, 1, budget, BATCH) for name in ("mobilenet", "resnet") for budget in ("flops=15%", "flops=50%")],
    "judge": [
        *[(name, 3, budget, BATCH) for name in ("chain", "excited") for budget in ("flops=15%", "flops=50%")],
        *[("cluttered_cnn", seed, "flops=12%", BATCH) for seed in (3, 4)],
        ("mobilenet", 3, "flops=15%", 4 * BATCH),
    ],
}
"""Network, seed, budget and batch of every case."""


def images_of(name: str, cifar: Path, batch: int) -> Data:
    """CIFAR-10 at 16 x 16, or digits in clutter: training, held-out and test images."""
    if name == "cluttered_cnn":
        found = read_cluttered_digits()
        x, tests = (torch.from_numpy(part.images).float() for part in (found.train, found.test))
        mean, std, pad = list(found.mean), list(found.std), 0
    else:
        found = read_cifar10(cifar)
        parts = (torch.from_numpy(part.images).float() for part in (found.train, found.test))
        x, tests = (torch.nn.functional.avg_pool2d(part, 2) for part in parts)
        mean, std, pad = list(MEAN), list(STD), 2
    y, answers = (torch.from_numpy(part.labels) for part in (found.train, found.test))
    some = np.random.default_rng(0).permutation(len(y))[: TRAIN + HELD]
    settings: dict[str, Any] = {"mean": mean, "std": std, "classes": found.classes}
    train = DeviceData(x, y, pad=pad, **settings)
    options = LoadOptions(batch_size=batch, crop=pad, flip=pad > 0, channels_last=True)
    plain = LoadOptions(eval_batch_size=500, channels_last=True)
    return Data(
        name=name,
        train=train.train(options, 0, some[:TRAIN]),
        val=train.plain(plain, 0, some[TRAIN:]),
        test=DeviceData(tests, answers, **settings).plain(plain),
        shape=train.shape,
        classes=found.classes,
    )


class Case:
    """A trained network, cut to a budget by uniform widths whose layers make up for what they lose."""

    def __init__(self, name: str, seed: int, budget: str, batch: int, cifar: Path, cache: Path):
        self.key = {"network": name, "seed": seed, "budget": budget, "batch": batch}
        self.seed, self.data = seed, images_of(name, cifar, batch)
        torch.manual_seed(seed)
        self.given = NETWORKS[name]()
        weights = cache / f"{name}{seed}.pt"
        if weights.exists():
            self.given.load_state_dict(torch.load(weights, weights_only=True))
        else:
            source = images_of(name, cifar, BATCH).train
            base = replace(BASE, epochs=LONGER.get((name, seed), BASE.epochs))
            retrain(self.given, source, Retraining(optimisation=base, seed=seed))
            cache.mkdir(parents=True, exist_ok=True)
            torch.save(self.given.state_dict(), weights)
        self.given.to(memory_format=torch.contiguous_format).eval()  # type: ignore[call-overload]
        self.space: NetworkSpace = trace(self.given, torch.randn(2, *self.data.shape), groups=1000, least=4)
        self.widths = Constraints(self.space, self.space.costs, [budget]).uniform()

    def cut(self) -> nn.Module:
        some = [batch for batch, _ in zip(self.data.train.batches(0), range(8 * BATCH // 64), strict=False)]
        net = inherited(self.space, self.given, self.widths, importance(self.space, self.given, "l2"), some)
        recalibrate(net, some)
        return net

    def row(self, rate: float, epochs: int) -> dict[str, Any]:
        start, net = time.process_time(), self.cut()
        schedule = Optimisation(epochs=epochs, lr=rate, warmup=0.025 * epochs, weight_decay=5e-4, head=64.0)
        config = Retraining(optimisation=schedule, distillation=TAUGHT, seed=self.seed + 100)
        try:
            retrain(net, self.data.train, config, teacher=self.given)
            measured: dict[str, Any] = {"held": figures(net, self.data.val), "test": figures(net, self.data.test)}
        except RuntimeError as error:  # a rate at which training diverges
            measured = {"failed": str(error)[:100]}
        return {
            **self.key,
            "rate": rate,
            "epochs": epochs,
            **measured,
            "seconds": round(time.process_time() - start, 1),
        }


def figures(net: nn.Module, source: Source | None) -> dict[str, float]:
    assert source is not None
    found = evaluate(net, source)
    return {"accuracy": round(100 * found["score"], 2), "loss": round(found["loss"], 4)}


def run(given: argparse.Namespace) -> None:
    rows = read(given.out)
    keys = ("network", "seed", "budget", "batch")
    done = {(*[row[key] for key in keys], row["rate"], row["epochs"]) for row in rows}
    for about in CASES[given.part]:
        wanted = [(epochs, rate) for epochs in (PROBE, LENGTH) for rate in RATES]
        wanted = [(epochs, rate) for epochs, rate in wanted if (*about, rate, epochs) not in done]
        if not wanted:
            continue
        case = Case(*about, given.cifar, given.cache)
        shared = {"part": given.part, "given": figures(case.given, case.data.test)}
        shared["cut"] = figures(case.cut().eval(), case.data.test)
        for epochs, rate in wanted:
            row = case.row(rate, epochs) | shared | {"made": provenance()}
            append(given.out, row)
            print(*about, rate, epochs, row.get("held"), row.get("test"), row["seconds"], flush=True)


Probes = dict[float, float]
"""The held-out loss at each rate; infinite where training diverged."""


def least(probes: Probes) -> float:
    return min(probes, key=lambda rate: probes[rate])


def highest_near(probes: Probes, share: float = 0.01) -> float:
    """The highest rate whose loss is within a share of the least."""
    return max(rate for rate in probes if probes[rate] <= (1 + share) * min(probes.values()))


def climbed(probes: Probes, start: float = 0.03) -> tuple[float, int]:
    """From ``start`` to lower rates while they are better, else to higher ones; also how many were tried."""
    rates = sorted(probes, reverse=True)
    at, tried = rates.index(start), {start}
    for step in (1, -1):
        moved = False
        while 0 <= at + step < len(rates):
            tried.add(rates[at + step])
            if probes[rates[at + step]] >= probes[rates[at]]:
                break
            at, moved = at + step, True
        if moved:
            break
    return rates[at], len(tried)


RULES: dict[str, Callable[[Probes], float]] = {
    "the least loss": least,
    "the highest within 1 % of it": highest_near,
    "the highest within 3 % of it": partial(highest_near, share=0.03),
    "by steps from 0.03": lambda probes: climbed(probes)[0],
    "the highest within 1 %, by steps from 0.05 (bcnet)": lambda probes: choose_rate(lambda rate: probes[rate])[0],
}


def tables(rows: Sequence[dict[str, Any]], part: str) -> str:
    """The tables of docs/results/fine-tuning-rate.md for one part."""
    cases: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in rows:
        if row["part"] == part:
            cases.setdefault(tuple(row[key] for key in ("network", "seed", "budget", "batch")), []).append(row)
    whole = {key: found for key, found in cases.items() if len(found) == 2 * len(RATES)}
    head = " | ".join(f"{rate:g}" for rate in RATES)
    lines = [f"| case | given | cut | {head} |", "| --- | ---: | ---: |" + " ---: |" * len(RATES)]
    for (name, seed, budget, batch), found in whole.items():
        long = {row["rate"]: row for row in found if row["epochs"] == LENGTH}
        cells = [f"{long[rate]['test']['accuracy']:.2f}" if "test" in long[rate] else "–" for rate in RATES]
        about = f"{name}, {seed}, {budget.removeprefix('flops=')}" + (f", batches of {batch}" if batch != BATCH else "")
        given, cut = (found[0][which]["accuracy"] for which in ("given", "cut"))
        lines.append(f"| {about} | {given:.2f} | {cut:.2f} | {' | '.join(cells)} |")
    lines += ["", "| rule | probe | accuracy lost | loss too high | worst |", "| --- | --- | ---: | ---: | ---: |"]
    for words, epochs, choose in choosers():
        lost = np.array([regret(found, epochs, choose) for found in whole.values()])
        if not len(lost):
            continue
        half = stats.t.ppf(0.975, len(lost) - 1) * stats.sem(lost) if len(lost) > 1 else np.full(2, np.nan)
        probe = f"{epochs} of {LENGTH} epochs" if epochs else "none"
        means = " | ".join(f"{mean:.{n}f} ± {h:.{n}f}" for mean, h, n in zip(lost.mean(0), half, (2, 4), strict=True))
        lines.append(f"| {words} | {probe} | {means} | {lost[:, 0].max():.2f} |")
    seconds = sum(row["seconds"] for found in whole.values() for row in found)
    return "\n".join([*lines, "", f"{len(whole)} cases, {seconds / 60:.0f} minutes of processor time."])


def choosers() -> list[tuple[str, int, Callable[[Probes], float]]]:
    fixed = [(f"always {rate:g}", 0, lambda _, rate=rate: rate) for rate in RATES]
    return [*fixed, *[(words, epochs, rule) for epochs in (PROBE, LENGTH) for words, rule in RULES.items()]]


def regret(found: list[dict[str, Any]], epochs: int, choose: Callable[[Probes], float]) -> tuple[float, float]:
    """Test accuracy lost to the rate that was the best in the end, and test loss above the least."""
    long = {row["rate"]: row["test"] for row in found if row["epochs"] == LENGTH and "test" in row}
    probes = {
        row["rate"]: row.get("held", {}).get("loss", np.inf) for row in found if row["epochs"] == (epochs or LENGTH)
    }
    taken = long.get(choose(probes), {"accuracy": 10.0, "loss": 2.3})  # a network that diverged says nothing
    most = max(one["accuracy"] for one in long.values())
    return most - taken["accuracy"], taken["loss"] - min(one["loss"] for one in long.values())


def main() -> None:
    ways = {"run": run, "page": lambda given: print(tables(read(given.out), given.part))}
    command_line(__doc__, "fine-tuning-rate", ways, {"--part": {"choices": list(CASES), "default": "choose"}})


if __name__ == "__main__":
    main()
