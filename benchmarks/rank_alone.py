"""Ranking a whole space by a few of its networks, trained alone for a few epochs: no supernet, a model of the widths.

    python benchmarks/rank_alone.py choose --data CIFAR10 --out FILE.jsonl --design factorial --epochs 2
    python benchmarks/rank_alone.py compare --out FILE.jsonl
    python benchmarks/rank_alone.py train --data cifar10:DIR --out FILE.jsonl [--device cuda] [--limit 200]
    python benchmarks/rank_alone.py judge --data FILE.jsonl --tables DIR --out docs/results/rank-alone.json

``choose`` works on the stand-in of recipe_proxy.py and looks at no table; ``compare`` prints what came of it. ``train``
trains networks of both Channel-Bench spaces, also without looking: a line for each, those that are there are not made
again. ``judge`` fits the log-width model to their held-out losses and accuracies, and compares what it says of all
16,384 networks with the released tables, and the networks themselves with their entries. The plan is in
docs/results/rank-alone.md.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import recipe_proxy as stand_in
import torch
from numpy.typing import NDArray
from scipy.stats import kendalltau

from bcnet.bench.spaces import RELEASED, get_space
from bcnet.bench.table import ChannelBench
from bcnet.data import LoadOptions, load_data
from bcnet.models.load import load_model
from bcnet.search.predictors.log_width import LogWidthModel
from bcnet.space.network import NetworkSpace
from bcnet.space.widths import Widths, WidthSpace
from bcnet.training.optim import Optimisation
from bcnet.training.retraining import Retraining, evaluate, retrain
from bcnet.utils.provenance import provenance

ALONE = Path(__file__).parents[1] / "docs" / "results" / "channel-bench-alone.jsonl"
RECIPE = {"lr": 0.2, "warmup": 1, "weight_decay": 5e-4, "head": 64}
GENERATORS = ((0, 1, 2), (1, 2, 3), (0, 2, 3))
"""Of which of the first four signs the last three are products: no effect is mixed up with an interaction of two."""
MEASURES = ("loss", "accuracy")
RESAMPLED = 500
Floats = NDArray[np.float64]


def designed(space: WidthSpace, design: str, count: int) -> Widths:
    """The first ``count`` networks of a design, (n, 7): ``factorial`` has every width at its narrowest or widest, 16
    networks and again with other seeds; ``random`` draws all widths."""
    if design == "random":
        return space.sample(np.random.default_rng(2024), count)
    signs = np.array(np.meshgrid(*[[0, 1]] * 4, indexing="ij")).reshape(4, -1).T * 2 - 1
    signs = np.hstack([signs, np.stack([signs[:, list(g)].prod(1) for g in GENERATORS], 1)])
    order = np.random.default_rng(0).permutation(len(signs))
    both = np.where(signs[order] > 0, space.max, space.min)
    return both[np.arange(count) % len(both)]


def known(file: Path) -> list[dict[str, Any]]:
    return stand_in.known(file)


# Choosing, on the stand-in.


def choose(args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    train, held_out = stand_in.load(Path(args.data))
    space = stand_in.space()
    images = stand_in.Images(held_out.x[: stand_in.SCORED], held_out.y[: stand_in.SCORED])
    recipe = Optimisation(epochs=args.epochs, **(RECIPE | {"warmup": args.epochs / 8}))
    for number, widths in enumerate(designed(space, args.design, args.count)):
        place = {"design": args.design, "epochs": args.epochs, "number": number}
        if not any(place.items() <= row.items() for row in known(args.out)):
            torch.manual_seed(500 + number)
            network = space.build(widths)
            retrain(network, train, Retraining(recipe, seed=500 + number))
            found = evaluate(network, _Held(images))
            stand_in.add(args.out, {**place, **_row(widths, found), **provenance()})
            print(place, found, flush=True)


class _Held:
    """The stand-in's held-out images as they are, in batches of 1,000."""

    def __init__(self, images: stand_in.Images):
        self.images = images

    def __len__(self) -> int:
        return -(-len(self.images.x) // 1000)

    def batches(self, epoch: int, start: int = 0, device: Any = None) -> Any:
        return zip(self.images.x.split(1000), self.images.y.split(1000), strict=True)


def _row(widths: Widths, found: dict[str, float]) -> dict[str, Any]:
    return {"widths": [int(c) for c in widths], "loss": found["loss"], "accuracy": found["score"]}


# Training networks of both spaces.


def train(args: argparse.Namespace) -> None:
    """Round after round a network of each space, until ``--limit`` seconds have passed."""
    started = time.perf_counter()
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    data = load_data(args.data, device=args.device, options=LoadOptions(batch_size=256, channels_last=True))
    spaces = {name: load_model(args.model or f"zoo:{RELEASED[name].network}").space(groups=4) for name in args.spaces}
    for number in range(args.count):
        for name, space in spaces.items():
            place = {"space": name, "design": args.design, "epochs": args.epochs, "number": number}
            there = any(place.items() <= row.items() for row in known(args.out))
            if not there and time.perf_counter() - started < args.limit:
                row = train_one(space, designed(space, args.design, args.count)[number], number, data, args)
                stand_in.add(args.out, {**place, **row, **provenance(args.device)})
                print(place, {key: row[key] for key in ("accuracy", "test", "seconds")}, flush=True)


def train_one(space: NetworkSpace, widths: Widths, number: int, data: Any, args: argparse.Namespace) -> dict[str, Any]:
    started = time.perf_counter()
    torch.manual_seed(number)
    network = space.build(widths).to(args.device)
    bf16 = args.device == "cuda"
    recipe = Optimisation(epochs=args.epochs, bf16=bf16, **RECIPE)
    retrain(network, data.train, Retraining(recipe, seed=number))
    found, tested = (evaluate(network, part, bf16=bf16) for part in (data.val, data.test))
    return {**_row(widths, found), "test": tested["score"], "seconds": round(time.perf_counter() - started, 2)}


# Judging, once.


def judge(args: argparse.Namespace) -> None:
    result: dict[str, Any] = {"judged": provenance(), "spaces": {}}
    for name in args.spaces:
        rows = [row for row in known(Path(args.data)) if row["space"] == name]
        table = ChannelBench.load(name, args.tables)
        found = ranked(rows, table.widths, table.mean, table.space.layer_counts)
        entries = table.query(np.array([row["widths"] for row in rows]))
        found |= {"rows": rows, "table": [float(a) for a in np.asarray(entries.mean)]}
        found["entries"] = float(kendalltau([row["test"] for row in rows], found["table"]).statistic)
        result["spaces"][name] = found
        print(name, {key: value for key, value in found.items() if key not in ("rows", "table")})
    args.out.write_text(json.dumps(result, indent=1) + "\n")


def ranked(rows: Sequence[dict[str, Any]], widths: Widths, truth: Floats, layers: Any) -> dict[str, Any]:
    """Kendall with ``truth`` (n,) of the log-width model of the networks trained, by loss and by accuracy, each with a
    95 % interval over resampled trainings."""
    drawn = np.random.default_rng(0).integers(len(rows), size=(RESAMPLED, len(rows)))
    some = np.random.default_rng(1).permutation(len(widths))[:1000]
    kendalls: dict[str, Any] = {"networks": len(rows)}
    for measure in MEASURES:
        scores = np.array([row[measure] for row in rows]) * (-1 if measure == "loss" else 1)
        given = np.array([row["widths"] for row in rows])
        kendalls[measure] = float(kendalltau(LogWidthModel.fit(given, scores, layers).predict(widths), truth).statistic)
        again = [
            kendalltau(LogWidthModel.fit(given[d], scores[d], layers).predict(widths[some]), truth[some]).statistic
            for d in drawn
            if len(np.unique(d)) > 1
        ]
        kendalls[f"{measure}, 95 %"] = [float(q) for q in np.quantile(again, [0.025, 0.975])]
    return kendalls


def compare(args: argparse.Namespace) -> None:
    """What every design of ``choose`` says of the stand-in's 120 networks, by how many of its networks there are."""
    truths = sorted(known(ALONE), key=lambda row: row["number"])
    widths, truth = (np.array([row[key] for row in truths]) for key in ("widths", "accuracy"))
    layers = get_space("mobilenet").layer_counts
    rows = known(args.out)
    for design, epochs in sorted({(row["design"], row["epochs"]) for row in rows}):
        mine = [row for row in rows if (row["design"], row["epochs"]) == (design, epochs)]
        for count in sorted({c for c in (8, 16, 32, 48) if c < len(mine)} | {len(mine)}):
            found = ranked(mine[:count], widths, truth, layers)
            cells = [f"{found[m]:.3f} | {found[f'{m}, 95 %'][0]:.2f} to {found[f'{m}, 95 %'][1]:.2f}" for m in MEASURES]
            print(f"| {design} | {epochs} | {count} | {epochs * count} | {' | '.join(cells)} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", choices=["choose", "compare", "train", "judge"])
    parser.add_argument("--data")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--design", choices=["factorial", "random"], default="factorial")
    parser.add_argument("--count", type=int, default=16)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--spaces", nargs="+", default=list(RELEASED))
    parser.add_argument("--tables", type=Path)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--limit", type=float, default=1e9, help="seconds after which no further network is begun")
    parser.add_argument("--model", help="another network, to try the script without a GPU")
    args = parser.parse_args()
    {"choose": choose, "compare": compare, "train": train, "judge": judge}[args.work](args)


if __name__ == "__main__":
    main()
