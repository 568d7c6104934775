"""Rivals of the paper that need a network: LeGR, MetaPruning and TAS, beside others under the same scorer and budget.

    python benchmarks/rival_networks.py [--seeds 0 1 2]

Digits in clutter, the example's network at 12 % of its FLOPs. From a trained network: searches under one scorer (the
cut network after 25 steps), 20 evaluations each; the choice inherits, and is fine-tuned. From scratch: supernets of
equal path passes, 60 evaluations of evolution each, or TAS's own choice; the choice is trained anew. The full network
teaches all of them. Writes docs/results/rival-networks.json, a row at a time; rows that are there are not made again.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from bcnet.data import LoadOptions, load_data
from bcnet.models.load import load_model
from bcnet.search import Constraints, SearchConfig, search
from bcnet.search.criteria import allot
from bcnet.space.importance import importance
from bcnet.space.widths import Widths
from bcnet.supernet.meta import MetaSupernet, train_meta
from bcnet.supernet.paths import METHODS
from bcnet.supernet.scoring import Evaluator
from bcnet.supernet.supernet import Supernet
from bcnet.supernet.tas import Spending, train_tas
from bcnet.supernet.training import SupernetTraining, train_supernet
from bcnet.training.inherit import CutScorer, Healing
from bcnet.training.optim import Optimisation
from bcnet.training.reconstruction import inherited
from bcnet.training.retraining import Distillation, Retraining, evaluate, retrain
from bcnet.utils.provenance import provenance

FILE = Path(__file__).parents[1] / "docs" / "results" / "rival-networks.json"
BUDGET = "flops=12%"
FULL = Optimisation(epochs=5, lr=0.1, warmup=0.5, weight_decay=5e-4)
SUPERNET = Optimisation(epochs=6, lr=0.1, warmup=0.5, weight_decay=5e-4)
TUNED = Optimisation(epochs=4, lr=0.1, warmup=0.5)
FRESH = Optimisation(epochs=8, lr=0.1, warmup=0.5, weight_decay=5e-4)
TEACHER = Distillation(alpha=0.9, temperature=4.0)
LOGITS = 0.02
"""The rate of TAS's logits, twenty times the printed one, as there are hundreds of steps and not ten thousands."""


class Bench:
    """Data, a trained full network and its width space, all of one seed."""

    def __init__(self, seed: int):
        self.seed = seed
        options = LoadOptions(batch_size=100, eval_batch_size=1000)
        self.data = load_data("cluttered_digits", val_fraction=0.25, seed=seed, options=options)
        torch.manual_seed(seed)
        loaded = load_model("zoo:cluttered_cnn")
        self.full, self.space = loaded.model, loaded.space(groups=16)
        self.constraints = Constraints(self.space, self.space.costs, [BUDGET])
        retrain(self.full, self.data.train, Retraining(optimisation=FULL, seed=seed))
        self.batches = [batch for _, batch in zip(range(25), self.data.train.batches(0), strict=False)]

    @cached_property
    def cut(self) -> CutScorer:
        optimisation = Optimisation(epochs=1, lr=0.05)
        healing = Healing(steps=25, optimisation=optimisation, distillation=TEACHER, seed=self.seed)
        val = list(self.data.val.batches(0))
        parts = (self.space, self.full, "l2", self.batches, val)
        return CutScorer(*parts, teacher=self.full, healing=healing, reconstruct=True)

    def from_trained(self, strategy: str) -> Widths:
        config = SearchConfig(strategy=strategy, evaluations=20, population=8, seed=self.seed)
        ranks = importance(self.space, self.full, "l2") if strategy == "legr" else None
        return self._best(self.cut, config, importance=ranks)

    def supernet(self, method: str) -> Widths:
        torch.manual_seed(self.seed)
        config = SupernetTraining(METHODS["ua" if method == "meta" else method].sampling, SUPERNET, self.seed)
        if method == "meta":
            net: Supernet = MetaSupernet(self.space)
            train_meta(net, self.data.train, config)  # type: ignore[arg-type]
        else:
            net = Supernet(self.space, METHODS[method].principle)
            train_supernet(net, self.data.train, config)
        scorer = Evaluator(net, list(self.data.val.batches(0)), by="loss")
        return self._best(scorer, SearchConfig(evaluations=60, population=20, seed=self.seed))

    def tas(self) -> Widths:
        config = SupernetTraining(optimisation=SUPERNET, seed=self.seed)
        cost, limit = self.space.costs["flops"], self.constraints.budgets[0].limit
        net = Supernet(self.space, "ua")
        learnt = train_tas(net, self.data, config, spending=Spending(cost, limit), rate=LOGITS)  # type: ignore[arg-type]
        rng = np.random.default_rng(self.seed)
        index = self.constraints.shrink(self.space.encode([learnt.likeliest()]), rng)
        return self.constraints.fill(self.space.decode(index), rng)[0]

    def _best(self, scorer: Any, config: SearchConfig, **given: Any) -> Widths:
        found = search(self.space, scorer, [BUDGET], config=config, **given).best
        assert found is not None
        return np.array(found.widths)

    def accuracy(self, widths: Widths, how: str) -> float:
        """Of the network at ``widths`` on the test images, in percent, after the training that all have."""
        torch.manual_seed(self.seed)
        if how == "trained":
            network: nn.Module = inherited(self.space, self.full, widths, "l2", self.batches[:8])
        else:
            network = self.space.build(widths)
        optimisation = TUNED if how == "trained" else FRESH
        config = Retraining(optimisation=optimisation, distillation=TEACHER, seed=self.seed)
        retrain(network, self.data.train, config, teacher=self.full)
        assert self.data.test is not None
        return 100 * evaluate(network, self.data.test)["score"]


def methods(bench: Bench) -> Iterator[tuple[str, str, Callable[[], Widths]]]:
    """(how the choice is trained, its name, what makes it)."""
    l2 = importance(bench.space, bench.full, "l2")
    yield "trained", "uniform", bench.constraints.uniform
    yield "trained", "l2, one threshold (LeGR's first)", lambda: allot(bench.constraints, l2)
    for strategy, name in (("legr", "LeGR"), ("evolution", "evolution")):
        yield "trained", name, lambda strategy=strategy: bench.from_trained(strategy)  # type: ignore[misc]
    yield "scratch", "uniform", bench.constraints.uniform
    yield "scratch", "TAS, FLOPs loss", bench.tas
    for method, name in (("meta", "MetaPruning"), ("ua", "UA supernet"), ("bcv2", "BCNetV2 supernet")):
        yield "scratch", name, lambda method=method: bench.supernet(method)  # type: ignore[misc]
    for strategy, name in (
        ("random", "random, filling the budget"),
        ("markov", "Markov chains (after DMCP)"),
        ("agent", "agent (after AMC)"),
    ):
        yield "trained", name, lambda strategy=strategy: bench.from_trained(strategy)  # type: ignore[misc]


def known() -> list[dict[str, Any]]:
    """The rows that are there, also those of another process that makes other seeds."""
    return list(json.loads(FILE.read_text())["rows"]) if FILE.exists() else []


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    args = parser.parse_args()
    torch.set_num_threads(1)
    for seed in args.seeds:
        bench = Bench(seed)
        assert bench.data.test is not None
        full = 100 * evaluate(bench.full, bench.data.test)["score"]
        for how, name, make in methods(bench):
            if any((row["seed"], row["how"], row["method"]) == (seed, how, name) for row in known()):
                continue
            widths = make()
            used = float(bench.space.costs["flops"](widths)[0]) / bench.constraints.budgets[0].limit
            row = {"seed": seed, "how": how, "method": name, "widths": [int(c) for c in widths], "used": round(used, 3)}
            row |= {"accuracy": bench.accuracy(widths, how), "full": full}
            print(row, flush=True)
            FILE.write_text(json.dumps({**provenance(), "budget": BUDGET, "rows": [*known(), row]}, indent=1) + "\n")


if __name__ == "__main__":
    main()
