"""Does it help to make up for dropped channels (``reconstruct``)? Small networks on small images, on a CPU.

    python benchmarks/reconstruction.py run --cifar FOLDER --out docs/results/reconstruction.jsonl
    python benchmarks/reconstruction.py page

What is computed is written down in docs/results/reconstruction.md. A stopped run goes on where it was.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from rows import append, command_line, read
from scipy import stats
from torch import Tensor, nn

from bcnet.data.cifar10 import MEAN, STD, read_cifar10
from bcnet.search.constraints import Constraints
from bcnet.search.criteria import allot
from bcnet.space.importance import importance, kinds
from bcnet.space.network import NetworkSpace, trace
from bcnet.training.recalibration import recalibrate
from bcnet.training.reconstruction import inherited
from bcnet.utils.provenance import commit

IMAGES, HELD, BATCH = 20_000, 3_000, 128
SEEDS = (1, 2, 3)
BASE_EPOCHS = {"resnet": 8, "mobilenet": 6}
EPOCHS, RATE = 4, 0.05
BUDGET = "flops=20%"
DRAWN = 16


class Inverted(nn.Module):
    """MobileNetV2's block: 1x1 up, 3x3 depthwise, 1x1 down."""

    def __init__(self, inputs: int, outputs: int, stride: int):
        super().__init__()
        hidden = 4 * inputs
        self.body = nn.Sequential(
            *(nn.Conv2d(inputs, hidden, 1, bias=False), nn.BatchNorm2d(hidden), nn.ReLU6()),
            nn.Conv2d(hidden, hidden, 3, stride, 1, groups=hidden, bias=False),
            *(nn.BatchNorm2d(hidden), nn.ReLU6()),
            *(nn.Conv2d(hidden, outputs, 1, bias=False), nn.BatchNorm2d(outputs)),
        )
        self.adds = stride == 1 and inputs == outputs

    def forward(self, x: Tensor) -> Tensor:
        return x + self.body(x) if self.adds else self.body(x)


class Residual(nn.Module):
    """ResNet's basic block."""

    def __init__(self, inputs: int, outputs: int, stride: int):
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), nn.BatchNorm2d(outputs))
        self.second = nn.Sequential(nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False), nn.BatchNorm2d(outputs))
        adapts = stride > 1 or inputs != outputs
        self.across = (
            nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))
            if adapts
            else nn.Identity()
        )

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.second(F.relu(self.first(x))) + self.across(x))


def network(name: str) -> nn.Module:
    act = nn.ReLU() if name == "resnet" else nn.ReLU6()
    layers: list[nn.Module] = [nn.Conv2d(3, 24, 3, 1, 1, bias=False), nn.BatchNorm2d(24), act]
    plan = {
        "resnet": [(24, 1), (24, 1), (48, 2), (48, 1), (96, 2), (96, 1)],
        "mobilenet": [(24, 1), (24, 1), (32, 2), (32, 1), (32, 1), (64, 2), (64, 1), (64, 1)],
    }[name]
    block, channels = Residual if name == "resnet" else Inverted, 24
    for outputs, stride in plan:
        layers.append(block(channels, outputs, stride))
        channels = outputs
    if name == "mobilenet":
        layers += [nn.Conv2d(channels, 192, 1, bias=False), nn.BatchNorm2d(192), nn.ReLU6()]
        channels = 192
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 10))


class Images:
    """CIFAR-10 at 16x16: training, held-out and test images with labels."""

    def __init__(self, folder: Path):
        given = read_cifar10(folder)
        order = torch.randperm(50_000, generator=torch.Generator().manual_seed(0))
        x, y = self.small(given.train.images), torch.from_numpy(given.train.labels)
        self.x, self.y = x[order[:IMAGES]], y[order[:IMAGES]]
        self.held = x[order[IMAGES : IMAGES + HELD]], y[order[IMAGES : IMAGES + HELD]]
        self.test = self.small(given.test.images), torch.from_numpy(given.test.labels)

    @staticmethod
    def small(images: np.ndarray) -> Tensor:
        x = F.avg_pool2d(torch.from_numpy(images).float(), 2)
        return (x - torch.tensor(MEAN)[:, None, None]) / torch.tensor(STD)[:, None, None]


def train(
    net: nn.Module,
    images: Images,
    epochs: int,
    rate: float,
    seed: int,
    taught: list[Tensor] | None = None,
    after: Callable[[], Any] | None = None,
) -> list[Any]:
    """SGD with a cosine; ``taught`` are the teacher's answers to all images and to their mirror images. Without a
    teacher images are also shifted. Returns what ``after`` each epoch says."""
    generator, steps = torch.Generator().manual_seed(seed), epochs * (IMAGES // BATCH)
    optimizer = torch.optim.SGD(net.parameters(), lr=rate, momentum=0.9, nesterov=True, weight_decay=5e-4)
    net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    found, step = [], 0
    for _ in range(epochs):
        net.train()
        for at in torch.randperm(IMAGES, generator=generator)[: IMAGES // BATCH * BATCH].split(BATCH):
            flip = torch.rand(BATCH, generator=generator) < 0.5
            x = torch.where(flip[:, None, None, None], images.x[at].flip(3), images.x[at])
            if taught is None:
                x = torch.roll(x, tuple(torch.randint(-2, 3, (2,), generator=generator).tolist()), (2, 3))
            warm = min(1.0, (step + 1) / (IMAGES // BATCH / 2))
            optimizer.param_groups[0]["lr"] = rate * warm * 0.5 * (1 + np.cos(np.pi * step / steps))
            output = net(x.contiguous(memory_format=torch.channels_last))
            loss = F.cross_entropy(output, images.y[at])
            if taught is not None:
                goal = F.softmax(torch.where(flip[:, None], taught[1][at], taught[0][at]) / 4, 1)
                loss = 0.1 * loss + 0.9 * 16 * F.kl_div(F.log_softmax(output / 4, 1), goal, reduction="batchmean")
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
        found.append(after() if after else None)
    return found


@torch.no_grad()
def measure(net: nn.Module, pair: tuple[Tensor, Tensor]) -> dict[str, float]:
    net.eval()
    output = torch.cat([net(x) for x in pair[0].split(500)])
    right = (output.argmax(1) == pair[1]).float().mean()
    return {"accuracy": round(100 * float(right), 2), "loss": round(float(F.cross_entropy(output, pair[1])), 4)}


class Case:
    """One trained network, and what can be cut out of it."""

    def __init__(self, name: str, seed: int, images: Images, cache: Path):
        self.name, self.seed, self.images = name, seed, images
        torch.manual_seed(seed)
        self.net = network(name)
        weights = cache / f"{name}{seed}.pt"
        if weights.exists():
            self.net.load_state_dict(torch.load(weights, weights_only=True))
        else:
            train(self.net, images, BASE_EPOCHS[name], 0.1, seed)
            cache.mkdir(parents=True, exist_ok=True)
            torch.save(self.net.state_dict(), weights)
        self.net.to(memory_format=torch.contiguous_format).eval()  # type: ignore[call-overload]
        self.space: NetworkSpace = trace(self.net, images.x[:2], groups=1000, least=4)
        self.constraints = Constraints(self.space, self.space.costs, [BUDGET])
        with torch.no_grad():
            self.taught = [torch.cat([self.net(x) for x in way.split(500)]) for way in (images.x, images.x.flip(3))]
        self.some = [(x, None) for x in images.x[:2000].split(250)]
        self.scores = importance(self.space, self.net, "l2")

    def configurations(self) -> dict[str, list[int]]:
        """Uniform widths, widths by importance within kinds of layers, and widths between these and random ones."""
        near = {
            "uniform": self.constraints.uniform(),
            "l2-isomorphic": allot(self.constraints, self.scores, "isomorphic", kinds(self.space)),
        }
        rng = np.random.default_rng(self.seed)
        drawn = self.constraints.fill(self.constraints.sample(rng, DRAWN)[0], rng)
        for i, far in enumerate(drawn):
            share = (i % 4 + 1) / 4  # from near uniform to random
            between = (1 - share) * near["uniform"] + share * far
            smaller = np.maximum(between * np.linspace(1, 0.5, 50)[:, None], self.space.min).astype(np.int64)
            first = smaller[self.constraints.feasible(smaller)][:1]
            near[f"drawn{i}"] = self.constraints.fill(first, rng)[0]
        return {name: [int(w) for w in widths] for name, widths in near.items()}

    def cut(self, widths: list[int], reconstruct: bool) -> nn.Module:
        net = inherited(self.space, self.net, widths, self.scores, self.some if reconstruct else [])
        recalibrate(net, self.some)
        return net

    def row(self, name: str, widths: list[int], reconstruct: bool) -> dict[str, Any]:
        """One network, cut and fine-tuned; both ways of cutting are measured before."""
        start = time.monotonic()
        cuts = {way: measure(self.cut(widths, way == "made_up"), self.images.held) for way in ("plain", "made_up")}
        net = self.cut(widths, reconstruct)
        epochs = train(
            *(net, self.images, EPOCHS, RATE, self.seed + 100, self.taught), lambda: measure(net, self.images.held)
        )
        flops = self.space.costs["flops"]
        return {
            **{"network": self.name, "seed": self.seed, "configuration": name, "widths": widths},
            "flops": int(flops(np.array(widths))[0]) / int(flops(self.space.max)[0]),
            **{"reconstruct": reconstruct, "cut": cuts, "held": epochs, "test": measure(net, self.images.test)},
            "seconds": round(time.monotonic() - start, 1),
        }


def cases() -> Iterator[tuple[str, int, bool]]:
    """Networks and seeds in the order in which they are run; last of all, one with the drawn configurations too."""
    yield from ((name, seed, False) for name in BASE_EPOCHS for seed in SEEDS)
    yield "resnet", 1, True


def run(given: argparse.Namespace) -> None:
    done = {(r["network"], r["seed"], r["configuration"], r["reconstruct"]) for r in read(given.out)}
    images = Images(given.cifar)
    for name, seed, drawn in cases():
        case = Case(name, seed, images, given.cache)
        base = measure(case.net, images.test)
        for chosen, widths in case.configurations().items():
            if chosen.startswith("drawn") and not drawn:
                continue
            for reconstruct in (True,) if chosen.startswith("drawn") else (False, True):
                if (name, seed, chosen, reconstruct) in done:
                    continue
                row = case.row(chosen, widths, reconstruct) | {"given": base, "commit": commit()}
                append(given.out, row)
                print(name, seed, chosen, reconstruct, row["cut"], row["test"], flush=True)


def tables(path: Path) -> str:
    """The tables of docs/results/reconstruction.md."""
    rows = read(path)
    lines = ["| network | seed | given | widths | cut, plain | cut, made up for | tuned, plain | tuned, made up for |"]
    lines.append("| --- | ---: | ---: | --- | ---: | ---: | ---: | ---: |")
    gains: list[float] = []
    for plain in rows:
        if plain["reconstruct"]:
            continue
        key = ("network", "seed", "configuration")
        made = next((r for r in rows if r["reconstruct"] and all(r[k] == plain[k] for k in key)), None)
        if made is None:
            continue
        gains.append(made["test"]["accuracy"] - plain["test"]["accuracy"])
        cuts = [f"{plain['cut'][way]['accuracy']:.1f}" for way in ("plain", "made_up")]
        tuned = [f"{r['test']['accuracy']:.2f}" for r in (plain, made)]
        cells = [plain["network"], str(plain["seed"]), f"{plain['given']['accuracy']:.2f}", plain["configuration"]]
        lines.append(f"| {' | '.join([*cells, *cuts, *tuned])} |")
    if len(gains) > 2:
        low, high = stats.t.interval(0.95, len(gains) - 1, np.mean(gains), stats.sem(gains))
        lines += ["", f"Gain after fine-tuning: {np.mean(gains):+.2f} points, 95 % interval {low:+.2f} to {high:+.2f}."]
    table = [r for r in rows if r["reconstruct"] and r["network"] == "resnet" and r["seed"] == 1]
    if len(table) > 4:
        final = [-r["test"]["loss"] for r in table]
        lines += ["", "| opinion before fine-tuning | Kendall with the final test loss |", "| --- | ---: |"]
        for words, opinion in (
            ("loss of the plain cut", [-r["cut"]["plain"]["loss"] for r in table]),
            ("loss of the cut that is made up for", [-r["cut"]["made_up"]["loss"] for r in table]),
            ("FLOPs", [r["flops"] for r in table]),
            ("held-out loss after fine-tuning", [-r["held"][-1]["loss"] for r in table]),
        ):
            lines.append(f"| {words} | {stats.kendalltau(opinion, final).statistic:.2f} |")
        lines += ["", f"{len(table)} networks."]
    return "\n".join(lines)


def main() -> None:
    command_line(__doc__, "reconstruction", {"run": run, "page": lambda given: print(tables(given.out))})


if __name__ == "__main__":
    main()
