"""What bcnet's search proposes for a budget, as a plan that ``rivals.py tune`` fine-tunes beside everybody else's.

    python benchmarks/rivals_bcnet.py --base DIR --data DIR --out OURS.json [--network NAME] [--budget 44M]

Configurations are scored by their held-out loss after some steps of fine-tuning with the trained network as teacher.
Both searches begin with widths that rules give (uniform, within kinds of layers, one threshold) and others near them.
``--by evolution`` goes on with bcnet's search; networks are cut as they are. ``--by neighbours`` goes on near the best
so far; layers make up for dropped channels before they are scored, as in the networks that are fine-tuned in the end.
Finalists: the log-width model's choice over all scores (evolution), and the best few
scores once they are taken again on other training batches, which the luck of the first does not survive.
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
from channels import Cutter
from numpy.typing import NDArray
from parts import Images, Widths, provenance, space_of
from paths import Class, Lessons, Maker, State, first_of, order_of
from rivals import budget_flops
from rivals_base import load_base
from side_by_side import Training
from torch.nn import functional

from bcnet import trace
from bcnet.search import Constraints, SearchConfig, search
from bcnet.search.criteria import allot
from bcnet.search.strategies import neighbours as strategies
from bcnet.space.importance import importance, kinds, taylor
from bcnet.training.task import cross_entropy

TOP = 8
"""Best scores that are taken again, and of these the best half are finalists."""
Trial = tuple[Widths, float]
SETTINGS = ("by", "groups", "evaluations", "population", "steps", "lr", "at_once", "seed", "device")


class Scorer:
    """Negative held-out losses of cut networks after some steps; ``seconds`` adds up what they took."""

    def __init__(self, args: argparse.Namespace, images: Images, cutter: Cutter, seed: int):
        self.args, self.images, self.cutter = args, images, cutter
        self.teacher = load_base(args.base, args.network, args.quick).to(args.device)
        self.learn_from(seed)
        self.scores = [torch.from_numpy(s) for s in importance(cutter.space, cutter.model, "l2")]
        self.state = {name: tensor.to(args.device) for name, tensor in order_of(cutter, self.scores).items()}
        self.maker = Maker(cutter, images) if args.by == "neighbours" else None
        self.labels = torch.cat([y for _, y in images.val])
        self.seconds = 0.0

    def learn_from(self, seed: int) -> None:
        """Heal networks by the batches of this seed from now on."""
        training = Training(epochs=1, seed=seed, dtype="fp32" if self.args.quick else "bf16")
        lessons = Lessons(self.images, training, self.teacher)
        self.together = Class(self.cutter.space, training, lessons, self.args.at_once)

    def score_many(self, widths: Widths) -> NDArray[np.float64]:
        start, found = time.perf_counter(), []
        rows = np.atleast_2d(widths)
        for first in range(0, len(rows), self.args.at_once):
            some = rows[first : first + self.args.at_once]
            paths = self.together.load([(row, self._made(row)) for row in some])
            self.together.heal(paths, self.args.steps, self.args.lr)
            losses = [functional.cross_entropy(p.logits(self.images.val, True), self.labels) for p in paths]
            found += [-float(loss) for loss in losses]
        self.seconds += time.perf_counter() - start
        return np.array(found)

    def _made(self, widths: Widths) -> State:
        if self.maker is None:
            return first_of(self.cutter.space, self.state, widths)
        return self.maker(self.cutter.best(widths, self.scores), True)

    def score(self, widths: Widths) -> float:
        return float(self.score_many(widths)[0])


def rules(constraints: Constraints, cutter: Cutter, images: Images) -> dict[str, Widths]:
    """Widths that need no search."""
    space, l2 = cutter.space, importance(cutter.space, cutter.model, "l2")
    some = [(x[:256].cpu().float(), y[:256].cpu()) for x, y in images.val[:1]]
    by_taylor = taylor(space, cutter.model, some, cross_entropy)
    lamp = importance(space, cutter.model, "lamp")
    return {
        "uniform": constraints.uniform(),
        "isomorphic": allot(constraints, l2, "isomorphic", kinds(space)),
        "global": allot(constraints, l2),
        "taylor-isomorphic": allot(constraints, by_taylor, "isomorphic", kinds(space)),
        "lamp-isomorphic": allot(constraints, lamp, "isomorphic", kinds(space)),
        "lamp": allot(constraints, lamp),
    }


def neighbours(args: argparse.Namespace, constraints: Constraints, first: Widths, scorer: Scorer) -> list[Trial]:
    """All configurations with their scores, best first: bcnet's strategy of the same name, until time is over."""
    end = time.perf_counter() + args.seconds
    config = SearchConfig(evaluations=args.evaluations, population=args.population, seed=args.seed)
    strategy, found = strategies.neighbours(constraints, config, first), []
    rows = next(strategy)
    while len(found) < args.evaluations and time.perf_counter() < end:
        scores = np.full(len(rows), np.nan)
        for start in range(0, len(rows), args.at_once):
            if time.perf_counter() < end:
                some = slice(start, start + args.at_once)
                scores[some] = scorer.score_many(rows[some])
                found += zip(rows[some], scores[some].tolist(), strict=True)
        rows = strategy.send(scores)
    return sorted(found, key=lambda pair: -pair[1])


def propose(args: argparse.Namespace, images: Images) -> tuple[dict[str, Any], dict[str, Any]]:
    """The plan's entries, and what there is to say about them."""
    start = time.perf_counter()
    model = load_base(args.base, args.network, args.quick)
    example = images.test[0][0][:2].float().cpu()
    cutter = Cutter(model, space_of(model, images))
    flops = budget_flops(args.budget, cutter)
    space = trace(model, example, groups=args.groups, check=False)
    constraints = Constraints(space, space.costs, [f"flops={flops:.0f}"])
    known = rules(constraints, cutter, images)
    scorer = Scorer(args, images, cutter, 3000 + args.seed)
    rng = np.random.default_rng([args.seed, 30])
    rows = constraints.fill(space.floor(np.stack(list(known.values()))), rng)
    others = strategies.near(constraints, rows, max(0, args.population - len(rows)), rng)
    first = np.concatenate([rows, others])
    chosen: dict[str, Widths] = {}
    if args.by == "neighbours":
        trials = neighbours(args, constraints, first, scorer)
    else:
        config = SearchConfig(
            choose="log-width", evaluations=args.evaluations, population=args.population, seed=args.seed
        )
        result = search(space, scorer, constraints.budgets, config=config, initial=np.unique(first, axis=0))
        scored = [(np.array(t.widths), t.score) for t in result.trials if t.feasible and t.score is not None]
        trials = sorted(scored, key=lambda pair: -pair[1])
        assert result.best is not None
        chosen["search"] = np.array(result.best.widths)
    top = np.array([widths for widths, _ in trials[:TOP]])
    scorer.learn_from(3001 + args.seed)
    second = scorer.score_many(top)
    order = np.argsort(-(second + np.array([score for _, score in trials[:TOP]])), kind="stable")
    short = "near" if args.by == "neighbours" else "best"
    chosen |= {f"{short}-{i + 1}": top[number] for i, number in enumerate(order[: TOP // 2])}
    if args.by == "neighbours":
        distinct = np.array(list(dict.fromkeys(tuple(widths.tolist()) for widths, _ in trials))[: strategies.MEANT])
        chosen |= {"mean": strategies.mean_of(constraints, distinct)[0], "lamp": rows[list(known).index("lamp")]}
    seconds = time.perf_counter() - start
    entries = {
        f"bcnet-{name}": {"widths": widths.tolist(), "seconds": seconds, "flops": cutter.flops(widths)}
        for name, widths in chosen.items()
    }
    facts = {
        "seconds": seconds,
        "scoring_seconds": scorer.seconds,
        "rules": {name: widths.tolist() for name, widths in known.items()},
        "trials": [{"widths": widths.tolist(), "loss": -score} for widths, score in trials],
        "again": (-second).tolist(),
    }
    return entries, facts


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--base", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--network", default="mobilenetv2_cifar")
    parser.add_argument("--budget", default="44M")
    parser.add_argument("--by", choices=["evolution", "neighbours"], default="neighbours")
    parser.add_argument("--seconds", type=float, default=60.0, help="for neighbours")
    parser.add_argument("--groups", type=int, default=24)
    parser.add_argument("--evaluations", type=int, default=150)
    parser.add_argument("--population", type=int, default=30)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--lr", type=float, default=0.02)
    parser.add_argument("--at-once", type=int, default=3)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="tiny networks and synthetic images on the CPU")
    args = parser.parse_args(arguments)
    args.device = "cpu" if args.quick else args.device
    images = Images.synthetic(args.device) if args.quick else Images.cifar10(args.data, args.device)
    entries, facts = propose(args, images)
    settings = {key: getattr(args, key) for key in SETTINGS}
    about = {"provenance": provenance(args.device), "settings": settings, **facts}
    args.out.write_text(json.dumps({args.network: {args.budget: entries}, "facts": about}) + "\n")
    print({name: entry["flops"] for name, entry in entries.items()}, f"{facts['seconds']:.1f} s", flush=True)
    print([round(t["loss"], 4) for t in facts["trials"][:TOP]], np.round(facts["again"], 4).tolist(), flush=True)


if __name__ == "__main__":
    torch.manual_seed(0)
    main()
