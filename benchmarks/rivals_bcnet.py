"""What bcnet proposes for a budget, as a plan that ``rivals.py tune`` fine-tunes beside everybody else's.

    python benchmarks/rivals_bcnet.py --base DIR --data DIR --out OURS.json [--plans PLAN.json] [--seconds 150]

A search by what is left after some steps of healing (``--steps 0``: by the bare cut), from rules of thumb and random
configurations that the bare cut screens; its choice by the log-width model, its best single score, and one threshold
over all layers by two criteria. For every network of ``--plans`` the two opinions, cut and healed, are noted as well:
they cost a second each and tell how well the opinions rank.
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
from parts import Batch, Images, Widths, provenance
from rivals_base import load_base
from torch import nn

from bcnet import trace
from bcnet.search import Constraints, LogWidthModel, SearchConfig, best_of, search
from bcnet.search.criteria import allot
from bcnet.space.importance import Scores, importance, kept_units, taylor
from bcnet.space.network import NetworkSpace
from bcnet.training.inherit import CutScorer, Healing
from bcnet.training.optim import Optimisation
from bcnet.training.retraining import Distillation
from bcnet.training.task import Task, cross_entropy

SCREENED = 4
SETTINGS = ("groups", "evaluations", "population", "steps", "lr", "calibration", "images", "seed", "device")


class Ours:
    """The trained network, its width space, and scorers of networks that inherit from it."""

    def __init__(self, args: argparse.Namespace, images: Images):
        self.args, self.images = args, images
        device = args.device
        model = load_base(args.base, args.network, args.quick)
        example = images.test[0][0][:2].float().cpu()
        self.space: NetworkSpace = trace(model, example, groups=args.groups, check=False)
        self.model: nn.Module = load_base(args.base, args.network, args.quick).to(device)
        source = images.train(256, 3000 + args.seed)
        wanted = max(args.steps, args.calibration)
        self.train: list[Batch] = [batch for batch, _ in zip(source(0), range(wanted), strict=False)]
        val = [torch.cat(parts)[: args.images] for parts in zip(*images.val, strict=True)]
        self.val: list[Batch] = list(zip(val[0].split(500), val[1].split(500), strict=True))
        self.scores: Scores = importance(self.space, model, "l2")
        self.constraints = Constraints(self.space, self.space.costs, [f"flops={args.budget}"])
        self.cut = self.scorer(0)
        self.judge = self.scorer(args.steps) if args.steps else self.cut

    def scorer(self, steps: int) -> CutScorer:
        healing = Healing(
            steps=steps,
            optimisation=Optimisation(epochs=1, lr=self.args.lr, weight_decay=5e-4, bf16=self.args.device != "cpu"),
            distillation=Distillation(alpha=0.9, temperature=4.0),
            calibration=self.args.calibration,
            seed=self.args.seed,
        )
        return CutScorer(
            self.space, self.model, self.scores, self.train, self.val, Task.classification(),
            teacher=self.model, healing=healing,
        )  # fmt: skip

    def kept(self, widths: Widths, scores: Scores | None = None) -> list[list[int]]:
        found = kept_units(self.space, self.space.units(widths), scores or self.scores, self.space.model)
        return [row.tolist() for row in found]

    def rules_of_thumb(self) -> dict[str, Widths]:
        by_taylor = taylor(self.space, self.model, self.train[:4], cross_entropy)
        return {
            "uniform": self.constraints.uniform(),
            "balanced": LogWidthModel.balanced(self.space).best(self.constraints),
            "l2-global": allot(self.constraints, self.scores),
            "taylor-global": allot(self.constraints, by_taylor),
        }

    def search(self, known: dict[str, Widths]) -> tuple[dict[str, Widths], list[dict[str, Any]]]:
        """The search's choice and its best single score; and all its trials."""
        args = self.args
        rng = np.random.default_rng([args.seed, 30])
        wanted = args.population - len(known)
        drawn = self.constraints.fill(self.constraints.sample(rng, SCREENED * wanted)[0], rng)
        best = drawn[np.argsort(-self.cut.score_many(drawn), kind="stable")[:wanted]]
        near = self.constraints.fill(self.space.floor(np.stack(list(known.values()))), rng)
        first = np.unique(np.concatenate([near, best]), axis=0)
        config = SearchConfig(
            choose="log-width", evaluations=args.evaluations, population=args.population, seed=args.seed
        )
        result = search(self.space, self.judge, [f"flops={args.budget}"], config=config, initial=first)
        assert result.best is not None
        top = best_of(result.trials, "flops")
        assert top is not None
        trials = [{"widths": list(t.widths), "loss": -t.score} for t in result.trials if t.score is not None]
        return {"search": np.array(result.best.widths), "best-score": np.array(top.widths)}, trials


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--base", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--plans", type=Path, nargs="*", default=[])
    parser.add_argument("--network", default="mobilenetv2_cifar")
    parser.add_argument("--budget", default="44M")
    parser.add_argument("--groups", type=int, default=20)
    parser.add_argument("--evaluations", type=int, default=60)
    parser.add_argument("--population", type=int, default=16)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--lr", type=float, default=0.02)
    parser.add_argument("--calibration", type=int, default=4, help="training batches for batch norm's statistics")
    parser.add_argument("--images", type=int, default=5000, help="held-out images to score on")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="tiny networks and synthetic images on the CPU")
    args = parser.parse_args(arguments)
    args.device = "cpu" if args.quick else args.device
    images = Images.synthetic(args.device) if args.quick else Images.cifar10(args.data, args.device)
    start = time.perf_counter()
    ours = Ours(args, images)
    known = ours.rules_of_thumb()
    ready = time.perf_counter()
    found, trials = ours.search(known)
    seconds = time.perf_counter() - start
    print(f"rules of thumb {ready - start:.1f} s, search {seconds - (ready - start):.1f} s", flush=True)
    chosen = {**known, **found}
    entries: dict[str, Any] = {
        f"bcnet-{name}": {
            "widths": widths.tolist(),
            "kept": ours.kept(widths),
            "seconds": seconds if name in found else (ready - start) / len(known),
            "flops": int(ours.space.costs["flops"](widths)[0]),
        }
        for name, widths in chosen.items()
    }
    others = {
        name: np.array(entry.get("widths") or [len(stay) for stay in entry["kept"]])
        for file in args.plans
        for name, entry in json.loads(file.read_text()).get(args.network, {}).get(args.budget, {}).items()
    }
    opinions = {}
    for name, widths in {**{f"bcnet-{n}": w for n, w in chosen.items()}, **others}.items():
        opinions[name] = {
            "cut": -ours.cut.score(widths),
            **({"steps": -ours.judge.score(widths)} if args.steps else {}),
        }
        print(name, {key: round(value, 4) for key, value in opinions[name].items()}, flush=True)
    facts = {
        "provenance": provenance(args.device),
        "settings": {key: getattr(args, key) for key in SETTINGS},
        "seconds": seconds,
        "trials": trials,
        "opinions": opinions,
    }
    args.out.write_text(json.dumps({args.network: {args.budget: entries}, "facts": facts}) + "\n")


if __name__ == "__main__":
    torch.manual_seed(0)
    main()
