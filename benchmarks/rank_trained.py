"""Ranking networks by one trained network: cut by importance, or as start and teacher of a supernet.

    python benchmarks/rank_trained.py choose --data CIFAR10 --out FILE cut:0 bcv2:0 ua:0:start=1:taught=1:lr=0.1 ...
    python benchmarks/rank_trained.py score --data cifar10:DIR --out FOLDER [--seeds 11 12 13] [--device cuda]
    python benchmarks/rank_trained.py judge --scores FOLDER --tables DIR

``choose`` works on the stand-in of recipe_proxy.py: METHOD:SEED with settings, compared with its 120 networks trained
alone. ``score`` trains the full networks of both Channel-Bench spaces and writes SPACE-SEED.npz with accuracies and
losses of all 16,384 configurations, without looking at any table. ``judge`` compares these with the released tables and
writes docs/results/rank-trained.json. The plan is in docs/results/rank-trained.md.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import recipe_proxy as stand_in
import torch
from numpy.typing import NDArray
from scipy.stats import kendalltau
from torch import Tensor, nn
from torch.nn import functional

from bcnet.accel import choose_engine
from bcnet.accel.enumeration.score_all import score_all
from bcnet.accel.enumeration.shared import SharedEvaluator
from bcnet.accel.enumeration.walker import Options
from bcnet.accel.fused_step.plain import plain_step
from bcnet.bench.spaces import RELEASED, get_space
from bcnet.bench.table import ChannelBench
from bcnet.data import LoadOptions, load_data
from bcnet.data.source import Source
from bcnet.models.load import load_model
from bcnet.search.predictors.log_width import LogWidthModel
from bcnet.space.network import NetworkSpace
from bcnet.supernet.cut import cut_supernet
from bcnet.supernet.paths import METHODS
from bcnet.supernet.supernet import Supernet
from bcnet.supernet.training import SupernetTraining, train_supernet
from bcnet.training.optim import Optimisation
from bcnet.training.retraining import Distillation, Loss, Retraining, retrain
from bcnet.training.task import Task
from bcnet.utils.provenance import provenance

RESULT = Path(__file__).parents[1] / "docs" / "results" / "rank-trained.json"
TEACHER = Distillation(alpha=0.9, temperature=4.0)
FULL = Optimisation(epochs=12, lr=0.1, weight_decay=5e-4, nesterov=False, bf16=True)
SUPERNET = Optimisation(epochs=8, lr=0.1, warmup=1, weight_decay=5e-4, head=64, bf16=True)
SEEDS = (11, 12, 13)
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Taught:
    """Batches of ``source`` whose targets (n, 1 + classes) are the label and what ``teacher`` says."""

    source: Source
    teacher: nn.Module

    def __len__(self) -> int:
        return len(self.source)

    def batches(self, epoch: int, start: int = 0, device: Any = None) -> Iterator[tuple[Tensor, Tensor]]:
        for x, y in self.source.batches(epoch, start, device):
            with torch.no_grad(), torch.autocast(x.device.type, torch.bfloat16, enabled=x.is_cuda):
                answers = self.teacher(x).float()
            yield x, torch.cat([y[:, None].float(), answers], 1)


def taught_loss(output: Tensor, target: Tensor) -> Tensor:
    """(1 - alpha) cross entropy + alpha T^2 KL, of logits and the targets of :class:`Taught`."""
    labels, answers, t = target[:, 0].long(), target[:, 1:], TEACHER.temperature
    soft = functional.log_softmax(answers / t, 1)
    learnt = functional.log_softmax(output.float() / t, 1)
    divergence = functional.kl_div(learnt, soft, reduction="batchmean", log_target=True)
    return (1 - TEACHER.alpha) * functional.cross_entropy(output.float(), labels) + TEACHER.alpha * t * t * divergence


TAUGHT = Task(loss=taught_loss, score=lambda output, target: (output.argmax(1) == target[:, 0].long()).float())


def train_taught(net: Supernet, source: Source, teacher: nn.Module | None, config: SupernetTraining) -> None:
    """Train a supernet, by a fixed teacher where there is one, with the fused step where that can run it."""
    bf16 = config.optimisation.bf16
    engine, words = choose_engine(net, bf16=bf16) if bf16 else (None, "plain")
    print(f"engine: {words}", flush=True)
    if teacher is None:
        train_supernet(net, source, config, engine=engine)
    else:
        train_supernet(net, Taught(source, teacher.eval()), config, TAUGHT, engine=engine)


# Choosing, on the stand-in.


def full_stand_in(space: NetworkSpace, train: stand_in.Images, seed: int, folder: Path) -> nn.Module:
    """The stand-in's full network, trained as its networks were; kept in ``folder``."""
    torch.manual_seed(1000 + seed)
    full, file = space.build(space.max), folder / f"full-{seed}.pt"
    if file.exists():
        full.load_state_dict(torch.load(file, weights_only=True))
        return full
    alone = Optimisation(epochs=stand_in.EPOCHS, lr=0.1, weight_decay=5e-4, nesterov=False)
    retrain(full, train, Retraining(alone, seed=1000 + seed))
    torch.save(full.state_dict(), file)
    return full


def try_setting(setting: str, train: stand_in.Images, folder: Path) -> Supernet:
    """The supernet of METHOD:SEED[:NAME=VALUE...]; ``cut`` is the full network itself."""
    method, number, *more = setting.split(":")
    given, seed = dict(text.split("=") for text in more), int(number)
    space = stand_in.space()
    full = full_stand_in(space, train, seed, folder)
    if method == "cut":
        return cut_supernet(space, full, given.get("keep", "l2"))
    torch.manual_seed(seed)
    net = cut_supernet(space, full) if "start" in given else Supernet(space, METHODS[method].principle)
    sampling = replace(METHODS[method].sampling, extremes=float(given.get("extremes", 0)))
    recipe = Optimisation(epochs=6, lr=float(given.get("lr", 0.4)), warmup=1, weight_decay=5e-4, head=64)
    train_taught(net, train, full if "taught" in given else None, SupernetTraining(sampling, recipe, seed=seed))
    return net


def choose(args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    train, held_out = stand_in.load(args.data)
    rows = sorted(stand_in.known(args.alone), key=lambda row: row["number"])
    widths, truth = (np.array([r[key] for r in rows]) for key in ("widths", "accuracy"))
    layers = get_space("mobilenet").layer_counts
    for setting in args.settings:
        if any(row["setting"] == setting for row in stand_in.known(args.out)):
            continue
        net = try_setting(setting, train, args.out.parent).eval()
        found = SharedEvaluator(net, stand_in.scored(held_out, 2000)).measure(widths)
        scores = readings(found.score, found.loss, widths, layers)
        kendalls = {name: round(float(kendalltau(score, truth).statistic), 4) for name, score in scores.items()}
        means = {"mean_accuracy": float(found.score.mean()), "mean_loss": float(found.loss.mean())}
        stand_in.add(args.out, {"setting": setting, **kendalls, **means, **provenance()})
        print(setting, kendalls, flush=True)


def readings(accuracy: Floats, loss: Floats, widths: NDArray[np.int64], layers: Any) -> dict[str, Floats]:
    """Ways to rank configurations by their accuracies and losses (n,): what decides beforehand is the loss."""
    mixed = _standard(accuracy) + _standard(-loss)
    scores = {"loss": -loss, "accuracy": accuracy, "both": mixed}
    laws = {f"log-width, {k}": LogWidthModel.fit(widths, s, layers).predict(widths) for k, s in scores.items()}
    return {**scores, **laws}


def _standard(values: Floats) -> Floats:
    return (values - values.mean()) / max(float(values.std()), 1e-12)


# Scoring both spaces.


def score(args: argparse.Namespace) -> None:
    """Every seed of every space in turn; none is begun after ``--limit`` seconds."""
    started = time.perf_counter()
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    data = load_data(args.data, device=args.device, options=LoadOptions(batch_size=args.batch, channels_last=True))
    args.out.mkdir(parents=True, exist_ok=True)
    for seed in args.seeds:
        for name in args.spaces:
            file = args.out / f"{name}-{seed}.npz"
            if not file.exists() and time.perf_counter() - started < args.limit:
                score_space(name, seed, data, file, args)
                print(f"{name}, seed {seed}: {time.perf_counter() - started:.0f} s in all", flush=True)


def score_space(name: str, seed: int, data: Any, file: Path, args: argparse.Namespace) -> None:
    """Train the full network, score all its cuts, let it start and teach a supernet, score that."""
    space = load_model(args.model or f"zoo:{RELEASED[name].network}").space(groups=args.groups)
    clock, seconds = time.perf_counter(), {}

    def lap(what: str) -> None:
        nonlocal clock
        if args.device == "cuda":
            torch.cuda.synchronize()
        seconds[what], clock = round(time.perf_counter() - clock, 1), time.perf_counter()
        print(f"  {what}: {seconds[what]} s", flush=True)

    bf16 = args.device == "cuda"
    torch.manual_seed(seed)
    full = space.build(space.max).to(args.device)
    recipe = replace(FULL, epochs=args.epochs, bf16=bf16)
    retrain(full, data.train, Retraining(recipe, seed=seed), fast=_fast if bf16 else None)
    lap("full network")
    net = cut_supernet(space, full).eval()
    images = scoring_images(data.val, args)
    cut = score_all(net, [(x[: args.cut_images], y[: args.cut_images]) for x, y in images[:1]], options=options(args))
    lap("all cuts")
    torch.manual_seed(seed)
    recipe = replace(SUPERNET, epochs=args.supernet_epochs, bf16=bf16)
    train_taught(net.train(), data.train, full, SupernetTraining(METHODS["ua"].sampling, recipe, seed=seed))
    lap("supernet")
    found = score_all(net.eval(), images, options=options(args))
    lap("all paths")
    arrays = {
        "accuracy": found.accuracy[0],
        "loss": found.loss[0],
        "cut_accuracy": cut.accuracy[0],
        "cut_loss": cut.loss[0],
    }
    facts = {"space": name, "seed": seed, "seconds": seconds, "epochs": args.epochs, **provenance(args.device)}
    facts |= {"supernet_epochs": args.supernet_epochs, "images": [args.images, args.cut_images]}
    np.savez_compressed(file, facts=json.dumps(facts), **{k: v.astype(np.float32) for k, v in arrays.items()})


def _fast(network: nn.Module, x: Tensor, loss: Loss, teacher: nn.Module | None) -> Any:
    step, words = plain_step(network, x, loss, teacher)
    print(f"  plain network: {words}", flush=True)
    return step


def scoring_images(source: Source, args: argparse.Namespace) -> list[tuple[Tensor, Tensor]]:
    """The held-out images in one batch, whose statistics batch norm uses."""
    x, y = (torch.cat(parts) for parts in zip(*source.batches(0, device=args.device), strict=True))
    return [(x[: args.images], y[: args.images])]


def options(args: argparse.Namespace) -> Options:
    cuda = args.device == "cuda"
    memory = int(args.memory * torch.cuda.mem_get_info()[0]) if cuda else 4 << 30
    return Options(memory, bf16=cuda, fused=cuda)


# Judging, once.


def judge(args: argparse.Namespace) -> None:
    """Rows of seeds whose scores are not there any more stay."""
    judged = {file.stem for file in args.scores.glob("*.npz")}
    earlier = json.loads(RESULT.read_text())["rows"] if RESULT.exists() else []
    rows = [row for row in earlier if f"{row['space']}-{row['seed']}" not in judged]
    for file in sorted(args.scores.glob("*.npz")):
        held = np.load(file)
        facts = json.loads(str(held["facts"]))
        table = ChannelBench.load(facts["space"], args.tables)
        for what in ("", "cut_"):
            scores = readings(held[f"{what}accuracy"], held[f"{what}loss"], table.widths, table.space.layer_counts)
            kendalls = {name: float(kendalltau(score, table.mean).statistic) for name, score in scores.items()}
            rows.append({"scores": "cuts" if what else "supernet", "kendall": kendalls, **facts})
            print(facts["space"], facts["seed"], rows[-1]["scores"], {k: round(v, 3) for k, v in kendalls.items()})
    rows.sort(key=lambda row: (row["space"], row["seed"]))
    RESULT.write_text(json.dumps({"judged": provenance(), "rows": rows}, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", choices=["choose", "score", "judge"])
    parser.add_argument("settings", nargs="*")
    parser.add_argument("--data")
    parser.add_argument("--alone", type=Path, default=RESULT.with_name("channel-bench-alone.jsonl"))
    parser.add_argument("--out", type=Path)
    parser.add_argument("--scores", type=Path)
    parser.add_argument("--tables", type=Path)
    parser.add_argument("--spaces", nargs="+", default=list(RELEASED))
    parser.add_argument("--seeds", nargs="+", type=int, default=list(SEEDS))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--epochs", type=int, default=FULL.epochs)
    parser.add_argument("--supernet-epochs", type=int, default=SUPERNET.epochs)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--images", type=int, default=5000)
    parser.add_argument("--cut-images", type=int, default=2500)
    parser.add_argument("--limit", type=float, default=1e9, help="seconds after which no further space is begun")
    parser.add_argument("--memory", type=float, default=0.6, help="the share of a GPU's free memory that scoring takes")
    parser.add_argument("--model", help="another network, to try the script without a GPU")
    parser.add_argument("--groups", type=int, default=4)
    args = parser.parse_intermixed_args()
    if args.work == "choose":
        args.data = Path(args.data)
    {"choose": choose, "score": score, "judge": judge}[args.work](args)


if __name__ == "__main__":
    main()
