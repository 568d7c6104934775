"""MobileNetV2 on CIFAR-10: what a search finds against uniform and balanced widths and the best of random networks.

    python benchmarks/cifar10.py --data cifar10:DIR --runs DIR --out FILE [--supernet epochs=8] [--retrain lr=0.1] ...

Every budget and seed is a run of `bcnet` in a folder of its own under ``--runs``; the budgets of a seed share one
supernet. Jobs run one after the other (on an H200 several processes only share the GPU). FILE is written anew after
each of them, and what a folder holds already is not done again; nothing is begun after ``--limit`` seconds. The
commands of earlier calls stand under ``before``.
"""

from __future__ import annotations

import argparse
import json
import shutil
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import torch

from bcnet.run.recipe import HEAD, Recipe
from bcnet.run.session import Run, facts
from bcnet.run.stages import retrain, search, supernet, trace
from bcnet.utils.provenance import provenance

BUDGETS = ("146M", "44M")
NETWORKS = ("uniform", "balanced", "random", "found", "published")
ORDER = ("train", "search", "found", "uniform", "balanced", "random", "published")
"""Every job comes after those it needs."""

PUBLISHED = {
    "44M": [12, 9, 43, 6, 7, 43, 12, 86, 28, 124, 16, 192, 172, 76, 211, 38, 201, 201, 230, 72, 432, 672, 528, 16, 896]
}
"""Widths the paper's authors published, by budget; these have 44.3M FLOPs."""

SUPERNET = {"epochs": 8, "lr": 0.4, "warmup": 1.0, "weight_decay": 1e-3, "head": HEAD}
RETRAIN = {"epochs": 8, "lr": 0.4, "warmup": 1.0, "weight_decay": 5e-4, "head": HEAD}
"""How the paper's trainings are shortened."""

THREADS = 2


class Job(NamedTuple):
    """A stage of a run, or one of its networks to retrain."""

    budget: str
    seed: int
    work: str

    @property
    def result(self) -> str:
        return f"retrain/{self.work}" if self.work in NETWORKS else self.work


def folder(runs: Path, budget: str, seed: int) -> Path:
    return runs / f"{budget}-{seed}"


def recipe(args: argparse.Namespace, budget: str, seed: int) -> Recipe:
    """The paper's recipe, shortened; every setting that differs from it is here."""
    paper = Recipe.read("mobilenetv2_cifar")
    return paper.changed(
        about="",
        data=args.data,
        val_fraction=args.val_fraction,
        loading={**asdict(paper.loading), "batch_size": args.batch, "eval_batch_size": 5000, "channels_last": True},
        groups=args.groups,
        base=args.base,
        round_to=args.round_to,
        budgets=[f"flops={budget}"],
        sampling={"extremes": args.extremes},
        supernet={**asdict(paper.supernet), "bf16": args.bf16, **SUPERNET, **dict(args.supernet)},
        search={"evaluations": args.evaluations, "choose": args.choose},
        retrain={**asdict(paper.retrain), "bf16": args.bf16, **RETRAIN, **dict(args.retrain)},
        compare=["uniform", "balanced", "random"],
        random={"networks": args.random_networks, "epochs": args.random_epochs},
        checkpoint_minutes=1000,
        threads=THREADS,
        seed=seed,
    )


def work(job: Job, run: Run, trained: Run) -> None:
    """Do ``job`` in ``run``; the run ``trained`` holds the supernet of its seed."""
    if job.work in NETWORKS:
        retrain.retrain_one(run, job.work, PUBLISHED[job.budget] if job.work == "published" else None)
    elif job.work == "search":
        if not run.done("train"):
            for suffix in ("safetensors", "json"):
                shutil.copy(trained.path(f"train.{suffix}"), run.path(f"train.{suffix}"))
        search.find(run)
    else:
        supernet.train(run)


def collected(runs: Path, origin: dict[str, Any]) -> dict[str, Any]:
    """All results that the folders hold."""
    rows = []
    for place in sorted(runs.iterdir()):
        run = Run(place, "cpu")
        traced = run.read("trace")
        row: dict[str, Any] = {"budget": run.recipe.budgets[0], "seed": run.recipe.seed, "networks": {}}
        row["variables"] = [[v["name"], v["candidates"][-1]] for v in traced["variables"]]
        row["full"] = traced["costs"]["full"]
        if run.done("train"):
            row["supernet"] = {k: v for k, v in run.read("train").items() if k != "version"}
        if run.done("search"):
            kept = ("best", "ranked_by", "log_width", "evaluations", "supernet", "prior", "notes", "seconds")
            row["search"] = {k: run.read("search")[k] for k in kept}
        for name in NETWORKS:
            if run.done(f"retrain/{name}"):
                result = run.read(f"retrain/{name}")
                row["networks"][name] = {k: v for k, v in result.items() if k not in ("version", "name")}
        rows.append({**row, "recipe": run.recipe.to_dict()})
    return {**origin, "runs": rows}


def setting(text: str) -> tuple[str, Any]:
    """A setting of a training, as in ``epochs=8``."""
    name, _, value = text.partition("=")
    return name, json.loads(value)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True)
    parser.add_argument("--runs", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--budgets", nargs="+", default=BUDGETS)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1])
    parser.add_argument("--works", nargs="+", choices=ORDER, default=ORDER[:-1])
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--val-fraction", type=float, default=0.05)
    parser.add_argument("--groups", type=int, default=20)
    parser.add_argument("--base", type=int, default=1)
    parser.add_argument("--round-to", type=int, default=1)
    parser.add_argument("--supernet", type=setting, nargs="*", default=[], help=f"settings other than {SUPERNET}")
    parser.add_argument("--extremes", type=float, default=0.5)
    parser.add_argument("--evaluations", type=int, default=480)
    parser.add_argument("--choose", choices=["score", "log-width"], default="log-width")
    parser.add_argument("--retrain", type=setting, nargs="*", default=[], help=f"settings other than {RETRAIN}")
    parser.add_argument("--random-networks", type=int, default=20)
    parser.add_argument("--random-epochs", type=int, default=1)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--limit", type=float, default=float("inf"))
    args = parser.parse_args()
    args.bf16 = args.device.startswith("cuda")
    return args


def opened(args: argparse.Namespace, budget: str, seed: int) -> Run:
    """The run of a budget and a seed, made and coupled unless it is there already."""
    run = Run(folder(args.runs, budget, seed), args.device)
    if not run.done("run"):
        settings = recipe(args, budget, seed)
        Run.create(run.folder, settings, facts([], settings, args.device))
    if not run.done("trace"):
        trace.trace_network(run)
    return run


def wanted(args: argparse.Namespace) -> list[Job]:
    """What is to be done, in order."""
    jobs = [Job(budget, seed, work) for work in args.works for seed in args.seeds for budget in args.budgets]
    only = {"train": args.budgets[:1], "published": list(PUBLISHED)}
    kept = [job for job in jobs if job.budget in only.get(job.work, args.budgets)]
    return sorted(kept, key=lambda job: ORDER.index(job.work))


def main() -> None:
    args, started = arguments(), time.perf_counter()
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    torch.set_num_threads(THREADS)
    runs = {(budget, seed): opened(args, budget, seed) for seed in args.seeds for budget in args.budgets}
    origin = provenance(args.device, ("torch", "numpy", "scipy", "pymoo"))
    if args.out.exists():
        earlier = json.loads(args.out.read_text())
        origin["before"] = [*earlier.get("before", []), earlier["command"]]
    for job in wanted(args):
        run, trained = runs[job.budget, job.seed], runs[args.budgets[0], job.seed]
        begun = time.perf_counter()
        if run.done(job.result):
            continue
        if begun - started > args.limit:
            print(f"{' '.join(map(str, job))}: not begun", flush=True)
            continue
        work(job, run, trained)
        origin["wall_seconds"] = time.perf_counter() - started
        print(f"{' '.join(map(str, job))}: {time.perf_counter() - begun:.0f} s", flush=True)
        args.out.write_text(json.dumps(collected(args.runs, origin), indent=1) + "\n")


if __name__ == "__main__":
    main()
