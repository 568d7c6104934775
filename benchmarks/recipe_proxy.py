"""A small stand-in for the MobileNet space, to choose how supernets are trained without looking at the table.

    python benchmarks/recipe_proxy.py alone --data cifar10 --out alone.jsonl [--part 0/2]
    python benchmarks/recipe_proxy.py try --data cifar10 --alone alone.jsonl --out FILE bcv2:lr=0.2:extremes=0.5 ...
    python benchmarks/recipe_proxy.py try --data cifar10 --out FILE resnet/bcv2:lr=0.2 ...
    python benchmarks/recipe_proxy.py read --data cifar10 --alone alone.jsonl --out FILE bcv2:lr=0.4 ...

The network has an eighth of the benchmark's channels (``features`` widens what the classifier sees) and sees CIFAR-10
at 16 x 16 pixels: 14,000 training images, and 6,000 more that nothing is trained on. ``alone`` trains 120 networks of
random widths, one after the other; ``try`` trains a supernet for every setting and correlates its scores with them; of
the ResNet space, for which no networks were trained alone, it tells the mean accuracy and loss of random widths.
``read`` scores one supernet in several ways: batches of several sizes for batch norm's statistics, one side or both,
the mean of scores or of logits. Each runs on one core in a few minutes; lines already in ``--out`` are skipped.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from scipy.stats import kendalltau, pearsonr
from torch import Tensor, nn

from bcnet.bench.spaces import get_space
from bcnet.data.cifar10 import read_cifar10
from bcnet.models.channel_bench import channel_bench_mobilenet, channel_bench_resnet
from bcnet.search.predictors.log_width import LogWidthModel
from bcnet.space.network import NetworkSpace, trace
from bcnet.space.widths import Widths
from bcnet.supernet.paths import METHODS
from bcnet.supernet.scoring import Evaluator, Scores
from bcnet.supernet.supernet import Supernet
from bcnet.supernet.training import SupernetTraining, train_supernet
from bcnet.training.optim import Optimisation
from bcnet.training.retraining import Retraining, retrain
from bcnet.utils.provenance import provenance

FULL = {"mobilenet": (16, 96, 96, 96, 32, 192, 128), "resnet": (32, 32, 32, 64, 64, 64, 64)}
FEATURES = {"mobilenet": 6, "resnet": 4}
"""The variable that the classifier sums up; its features are an eighth of the benchmark's unless a setting says."""
BUILD = {"mobilenet": channel_bench_mobilenet, "resnet": channel_bench_resnet}
TRAIN, HELD_OUT, SCORED, NETWORKS, EPOCHS, BATCH = 14_000, 6_000, 4_000, 120, 8, 128


@dataclass(frozen=True)
class Images:
    """Images x (n, 3, 16, 16), normalised, and classes y (n,); a source of flipped and shifted batches."""

    x: Tensor
    y: Tensor

    def __len__(self) -> int:
        return len(self.x) // BATCH

    def batches(self, epoch: int, start: int = 0, device: Any = None) -> Iterator[tuple[Tensor, Tensor]]:
        rng = torch.Generator().manual_seed(epoch)
        order = torch.randperm(len(self.x), generator=rng)
        flipped = torch.rand(len(self.x), generator=rng) < 0.5
        for i in range(len(self)):
            chosen = order[i * BATCH : (i + 1) * BATCH]
            x = torch.where(flipped[chosen][:, None, None, None], self.x[chosen].flip(3), self.x[chosen])
            right, down = torch.randint(0, 5, (2,), generator=rng).tolist()
            if i >= start:
                yield F.pad(x, (2, 2, 2, 2))[:, :, down : down + 16, right : right + 16], self.y[chosen]


def load(folder: Path) -> tuple[Images, Images]:
    """Training and held-out images, both from the training set."""
    part = read_cifar10(folder).train
    count = TRAIN + HELD_OUT
    x = F.avg_pool2d(torch.from_numpy(part.images[:count]).float(), 2)
    x = (x - x.mean((0, 2, 3), keepdim=True)) / x.std((0, 2, 3), keepdim=True)
    y = torch.from_numpy(part.labels[:count])
    return Images(x[:TRAIN], y[:TRAIN]), Images(x[TRAIN:], y[TRAIN:])


def space(name: str = "mobilenet", by_fan_out: bool = False, features: int = 0) -> NetworkSpace:
    full = list(FULL[name])
    full[FEATURES[name]] = features or full[FEATURES[name]]
    return trace(BUILD[name](full), torch.randn(2, 3, 16, 16), groups=4, init=draw_by_fan_out if by_fan_out else None)


def draw_by_fan_out(network: nn.Module) -> None:
    """Kaiming normal by fan-out for convolutions, a small normal for the classifier."""
    for layer in network.modules():
        if isinstance(layer, nn.Conv2d):
            fan_out = layer.kernel_size[0] * layer.kernel_size[1] * layer.out_channels // layer.groups
            nn.init.normal_(layer.weight, std=math.sqrt(2 / fan_out))
        elif isinstance(layer, nn.Linear):
            nn.init.normal_(layer.weight, std=0.01)
            nn.init.zeros_(layer.bias)


def known(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def alone(args: argparse.Namespace) -> None:
    """Train networks of random widths; a line for each with its accuracy on the held-out images."""
    train, held_out = load(args.data)
    whole = space()
    widths = whole.sample(np.random.default_rng(99), NETWORKS)
    part, parts = (int(number) for number in args.part.split("/"))
    done = {row["number"] for row in known(args.out)}
    recipe = Optimisation(epochs=EPOCHS, lr=0.1, weight_decay=5e-4, nesterov=False)
    for number in range(part, NETWORKS, parts):
        if number in done:
            continue
        accuracy = accuracy_alone(whole, widths[number], (train, held_out), recipe, number)
        add(args.out, {"number": number, "widths": widths[number].tolist(), "accuracy": accuracy, **provenance()})


def accuracy_alone(
    space: NetworkSpace, widths: Widths, data: tuple[Images, Images], recipe: Optimisation, seed: int
) -> float:
    """The accuracy of a network trained from scratch on the first of ``data``, tested on the second."""
    train, test = data
    torch.manual_seed(seed)
    network = space.build(widths)
    retrain(network, train, Retraining(recipe, seed=seed))
    network.eval()
    with torch.no_grad():
        outputs = torch.cat([network(x) for x in test.x.split(1000)])
    return float((outputs.argmax(1) == test.y).float().mean())


def add(file: Path, row: dict[str, Any]) -> None:
    with open(file, "a") as lines:
        lines.write(json.dumps(row) + "\n")


def attempt(args: argparse.Namespace) -> None:
    """A supernet for every setting; a line for each with how it ranks the networks that were trained alone."""
    train, held_out = load(args.data)
    rows = sorted(known(args.alone), key=lambda row: row["number"]) if args.alone else []
    truth = np.array([r["accuracy"] for r in rows])
    done = {row["setting"] for row in known(args.out)}
    for setting in args.settings:
        if setting in done:
            continue
        started = time.process_time()
        net = supernet(setting, train)
        drawn = net.space.sample(np.random.default_rng(99), NETWORKS)
        widths = np.array([r["widths"] for r in rows]) * net.space.max // FULL["mobilenet"] if rows else drawn
        seconds = time.process_time() - started
        if args.what == "read":
            for reading, figures in readings(net, held_out, widths, truth):
                add(args.out, {"setting": setting, "reading": reading, **figures, **provenance()})
                print(reading, figures, flush=True)
            continue
        found = Evaluator(net, scored(held_out, 2000)).measure(widths)
        row = {
            "setting": setting,
            "networks": len(rows),
            "mean_accuracy": float(found.score.mean()),
            "mean_loss": float(found.loss.mean()),
            **(compared(found, truth, widths) if rows else {}),
            "cpu_seconds": round(seconds, 1),
            **provenance(),
        }
        add(args.out, row)
        print({key: row[key] for key in list(row)[:7]}, flush=True)


def compared(found: Scores, truth: NDArray[np.float64], widths: NDArray[np.int64]) -> dict[str, float]:
    """Correlations with networks trained alone; ``additive`` scores are fitted without interactions of variables,
    ``law`` is the log-width model of the scores."""
    levels = np.concatenate([column[:, None] == np.unique(column) for column in widths.T], 1).astype(float)
    additive = levels @ np.linalg.lstsq(levels, found.score, rcond=None)[0]

    def by_log_width(scores: NDArray[np.float64]) -> float:
        return float(
            kendalltau(
                LogWidthModel.fit(widths, scores, get_space("mobilenet").layer_counts).predict(widths), truth
            ).statistic
        )

    return {
        "kendall_additive": float(kendalltau(additive, truth).statistic),
        "kendall_law": by_log_width(found.score),
        "kendall_law_by_loss": by_log_width(-found.loss),
        **correlated(found.score, found.loss, truth),
        "pearson_by_loss": float(pearsonr(-found.loss, truth).statistic),
    }


def scored(held_out: Images, batch: int) -> list[tuple[Tensor, Tensor]]:
    """The images that supernets are scored on, in batches."""
    return list(zip(held_out.x[:SCORED].split(batch), held_out.y[:SCORED].split(batch), strict=True))


def readings(
    net: Supernet, held_out: Images, widths: NDArray[np.int64], truth: NDArray[np.float64]
) -> Iterator[tuple[str, dict[str, float]]]:
    """Ways to score ``widths`` (n, L), and the correlations of each with ``truth`` (n,)."""
    for batch in (SCORED // 32, SCORED // 8, SCORED // 2, SCORED):
        found = Evaluator(net, scored(held_out, batch)).measure(widths)
        yield f"both sides, batches of {batch}", correlated(found.score, found.loss, truth)
    for side, name in enumerate(net.sides):
        score, loss = (found.by_side[measure][:, side] for measure in ("score", "loss"))
        yield f"{name} side, batches of {SCORED}", correlated(score, loss, truth)
    x, y = scored(held_out, SCORED)[0]
    with torch.no_grad():
        logits = torch.stack([(net(x, row, "left") + net(x, row, "right")) / 2 for row in widths])
    accuracy = (logits.argmax(2) == y).double().mean(1).numpy()
    losses = np.array([float(F.cross_entropy(one, y)) for one in logits])
    yield f"mean of both sides' logits, batches of {SCORED}", correlated(accuracy, losses, truth)


def correlated(score: NDArray[np.float64], loss: NDArray[np.float64], truth: NDArray[np.float64]) -> dict[str, float]:
    return {
        "kendall": float(kendalltau(score, truth).statistic),
        "kendall_by_loss": float(kendalltau(-loss, truth).statistic),
    }


def supernet(setting: str, train: Images) -> Supernet:
    """The trained supernet of ``[resnet/]METHOD:NAME=VALUE:...``, names being those of its strategy and recipe."""
    head, *more = setting.split(":")
    of, _, name = head.rpartition("/")
    given = {key: float(value) for key, value in (text.split("=") for text in more)}
    method, seed = METHODS[name], int(given.get("seed", 0))
    sandwich = bool(given.get("sandwich", method.sampling.sandwich))
    strategy = replace(method.sampling, extremes=given.get("extremes", 0.0), sandwich=sandwich)
    kept: dict[str, Any] = {key: given[key] for key in ("lr", "warmup", "head", "weight_decay", "ema") if key in given}
    recipe = Optimisation(epochs=int(given.get("epochs", 6)), **kept)
    torch.manual_seed(seed)
    network = space(of or "mobilenet", bool(given.get("fan_out")), int(given.get("features", 0)))
    net = Supernet(network, method.principle)
    train_supernet(net, train, SupernetTraining(strategy, recipe, seed=seed))
    return net


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["alone", "try", "read"])
    parser.add_argument("settings", nargs="*")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--alone", type=Path)
    parser.add_argument("--part", default="0/1", help="as in 0/2: every second network, from the first")
    args = parser.parse_intermixed_args()
    torch.set_num_threads(1)
    if args.what == "alone":
        alone(args)
    else:
        attempt(args)


if __name__ == "__main__":
    main()
