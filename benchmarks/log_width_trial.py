"""The log-width model on trial, in two spaces that it was not made with (docs/results/log-width-trial.md has the plan).

    python benchmarks/log_width_trial.py images --data CIFAR10 --out IMAGES
    bcnet bench build benchmarks/trial_networks.py:chain --data cifar10:IMAGES/train --groups 8 --runs 2 --epochs 2 \
        --batch 64 --networks 25 --within flops=20% --out TRIAL/chain
    python benchmarks/log_width_trial.py judge --images IMAGES --trial TRIAL --out docs/results/log-width-trial.jsonl

``images`` cuts small sets out of CIFAR-10. ``judge`` trains supernets, lets them score the networks of ``bench build``
and search, and trains what is found, uniform and balanced widths; lines already in the file are skipped.
``log_width_trial_report.py`` makes the page of it. One core, half an hour in all.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from recipe_proxy import add, known

from bcnet.bench.build import TABLE_OPTIMISATION, BuildConfig, train_widths
from bcnet.data import LoadOptions, load_data
from bcnet.data.cifar10 import read_cifar10
from bcnet.models.load import load_model
from bcnet.run.recipe import HEAD
from bcnet.search import Constraints, LogWidthModel, SearchConfig, best_of, search
from bcnet.space.network import NetworkSpace
from bcnet.supernet.paths import METHODS
from bcnet.supernet.scoring import Evaluator
from bcnet.supernet.supernet import Supernet
from bcnet.supernet.training import SupernetTraining, train_supernet
from bcnet.training.optim import Optimisation
from bcnet.utils.provenance import provenance

SPACES = ("chain", "concatenated")
GROUPS, BUDGET, BATCH = 8, "flops=20%", 64
TRAINED, SCORED, TESTED = 3840, 1000, 2000
EVALUATIONS, SUPERNETS = 60, (0, 1, 2)
SUPERNET = Optimisation(epochs=4, lr=0.1, warmup=1, weight_decay=5e-4, head=HEAD)
ALONE = Optimisation(**{**TABLE_OPTIMISATION.__dict__, "epochs": 2})


def write_images(source: Path, out: Path) -> None:
    """``train``: what networks and supernets learn from, and the tests; ``score``: what supernets are scored on."""
    whole = read_cifar10(source)
    order = np.random.default_rng(0).permutation(len(whole.train.labels))
    first, other = order[:TRAINED], order[TRAINED : TRAINED + SCORED]
    tested = np.random.default_rng(1).permutation(len(whole.test.labels))[:TESTED]
    sets = {
        "train": ((whole.train, first), (whole.test, tested)),
        "score": ((whole.train, first), (whole.train, other)),
    }
    for name, parts in sets.items():
        (out / name).mkdir(parents=True, exist_ok=True)
        rows = [np.column_stack([p.labels[i].astype(np.uint8), p.images[i].reshape(len(i), -1)]) for p, i in parts]
        for n, piece in enumerate(np.array_split(rows[0], 5), 1):
            piece.tofile(out / name / f"data_batch_{n}.bin")
        rows[1].tofile(out / name / "test_batch.bin")


def judge(space: NetworkSpace, images: Path, trial: Path, seed: int) -> dict[str, Any]:
    """One supernet: its scores of the trial's networks, the models fitted to its searches, and what these choose."""
    options = LoadOptions(batch_size=BATCH, channels_last=True)
    data = load_data(f"cifar10:{images / 'train'}", options=options)
    other = load_data(f"cifar10:{images / 'score'}", options=LoadOptions(batch_size=SCORED, channels_last=True))
    torch.manual_seed(seed)
    net = Supernet(space, METHODS["bcv2"].principle)
    assert data.whole is not None
    assert other.test is not None
    train_supernet(net, data.whole, SupernetTraining(METHODS["bcv2"].sampling, SUPERNET, seed=seed))
    net = net.to(memory_format=torch.channels_last)
    evaluator = Evaluator(net, list(other.test.batches(0)))
    rows = np.array(json.loads((trial / "networks.json").read_bytes())["widths"])
    found = evaluator.measure(rows)
    result: dict[str, Any] = {"scores": {"accuracy": found.score.tolist(), "loss": (-found.loss).tolist()}}
    result |= {"models": {}, "choices": {}}
    for name, by in (("accuracy", "score"), ("loss", "loss")):
        evaluator.by = by
        config = SearchConfig(evaluations=EVALUATIONS, seed=seed, choose="log-width")
        outcome = search(space, evaluator, [BUDGET], config=config)
        best = best_of(outcome.trials[:-1], "flops")
        assert best is not None
        assert outcome.best is not None
        assert outcome.log_width is not None
        result["models"][name] = outcome.log_width.to_dict()
        result["choices"][name] = {"score": best.widths, "log-width": outcome.best.widths}
    return result


def alone(space: NetworkSpace, images: Path, model: str, widths: Any, seed: int) -> float:
    """Accuracy in percent after the last epoch of a network trained as those of ``bench build`` are."""
    data = load_data(f"cifar10:{images / 'train'}", options=LoadOptions(batch_size=BATCH))
    config = BuildConfig(model, data.name, groups=GROUPS, batch=BATCH, optimisation=ALONE)
    return train_widths(config, space, data, np.asarray(widths), seed)["last"]


def named(space: NetworkSpace, rows: list[dict[str, Any]]) -> dict[str, tuple[list[int], int]]:
    """What is trained beside the networks of ``bench build``: widths, and how many seeds each gets."""
    constraints = Constraints(space, space.costs, [BUDGET])
    found = {
        "uniform": (constraints.uniform().tolist(), 4),
        "balanced": (LogWidthModel.balanced(space).best(constraints).tolist(), 4),
    }
    for row in rows:
        for by, choices in row["choices"].items():
            for how, widths in choices.items():
                found[f"{how}, {by}, supernet {row['seed']}"] = (list(map(int, widths)), 1)
    return found


def run(images: Path, trial: Path, out: Path) -> None:
    torch.set_num_threads(1)
    models = {name: f"benchmarks/trial_networks.py:{name}" for name in SPACES}
    spaces = {name: load_model(model).space(groups=GROUPS) for name, model in models.items()}
    for seed in SUPERNETS:
        for name, space in spaces.items():
            if not any(r["what"] == "supernet" and (r["space"], r["seed"]) == (name, seed) for r in known(out)):
                found = judge(space, images, trial / name, seed)
                add(out, {"what": "supernet", "space": name, "seed": seed, **found, **provenance()})
    for name, space in spaces.items():
        rows = [r for r in known(out) if r["what"] == "supernet" and r["space"] == name]
        for network, (widths, seeds) in named(space, rows).items():
            for seed in range(100, 100 + seeds):
                key = {"what": "network", "space": name, "network": network, "seed": seed}
                if not any(key.items() <= r.items() for r in known(out)):
                    facts = {"widths": widths, "flops": int(space.costs["flops"](np.array(widths))[0])}
                    accuracy = alone(space, images, models[name], widths, seed)
                    add(out, {**key, **facts, "accuracy": accuracy, **provenance()})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", choices=["images", "judge"])
    parser.add_argument("--data", type=Path)
    parser.add_argument("--images", type=Path)
    parser.add_argument("--trial", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    if args.work == "images":
        write_images(args.data, args.out)
    else:
        run(args.images, args.trial, args.out)


if __name__ == "__main__":
    main()
