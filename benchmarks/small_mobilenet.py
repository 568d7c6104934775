"""What a search finds in a small MobileNetV2, trained alone many times: the best score, the model's choice, and widths
that need no search, uniform and balanced.

    python benchmarks/small_mobilenet.py --data cifar10 --out FILE [--seeds 0 1] [--budgets flops=50% flops=15%]

MobileNetV2 for CIFAR-10 with a quarter of its channels sees 16 x 16 pixels, 14,000 training images and 6,000 more of
the training set: a supernet is scored on 2,000 of those, networks trained alone are tested on the other 4,000. Every
seed trains a supernet, searches under every budget, and trains what was found from scratch, several times. Lines
already in FILE are skipped. One core; ten minutes for every supernet, two for every network.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import torch
from recipe_proxy import Images, accuracy_alone, add, known, load

from bcnet.models import MODELS, build
from bcnet.run.recipe import HEAD
from bcnet.search import Constraints, LogWidthModel, SearchConfig, best_of, search
from bcnet.space.network import NetworkSpace, trace
from bcnet.supernet.paths import METHODS, PathSampling
from bcnet.supernet.scoring import Evaluator
from bcnet.supernet.supernet import Supernet
from bcnet.supernet.training import SupernetTraining, train_supernet
from bcnet.training.optim import Optimisation
from bcnet.utils.provenance import provenance

MODEL, SCORED, EVALUATIONS = "mobilenetv2_cifar", 2000, 240
SUPERNET = Optimisation(epochs=10, lr=0.4, warmup=1, weight_decay=5e-4, head=HEAD)
ALONE = Optimisation(epochs=10, lr=0.2, warmup=1, weight_decay=5e-4, head=HEAD)
STRATEGY = PathSampling(extremes=0.5)


def small_space() -> NetworkSpace:
    full = MODELS[MODEL].complete(None)
    widths = [max(8, int(width) // 16 * 4) for width in full[:-1]]
    network = build(MODEL, [*widths, int(full[-1]) // 4])
    return trace(network, torch.randn(2, 3, 16, 16), groups=10, base=2)


def trained(space: NetworkSpace, train: Images, seed: int) -> Supernet:
    torch.manual_seed(seed)
    net = Supernet(space, METHODS["bcv2"].principle)
    train_supernet(net, train, SupernetTraining(STRATEGY, SUPERNET, seed=seed))
    return net.to(memory_format=torch.channels_last)


def searched(net: Supernet, held_out: Images, budget: str, by: str, seed: int) -> dict[str, Any]:
    """What the search takes by score and by model, and uniform and balanced widths, with what the supernet gives."""
    evaluator = Evaluator(net, [(held_out.x[:SCORED], held_out.y[:SCORED])], by=by)
    space = net.space
    config = SearchConfig(evaluations=EVALUATIONS, seed=seed, choose="log-width")
    result = search(space, evaluator, [budget], config=config)
    best = best_of(result.trials[:-1], "flops")
    assert best is not None
    assert result.best is not None
    constraints = Constraints(space, space.costs, [budget])
    unsearched = {"balanced": LogWidthModel.balanced(space).best(constraints), "uniform": constraints.uniform()}
    networks = {"score": best.widths, "law": result.best.widths}
    networks |= {name: tuple(int(c) for c in widths) for name, widths in unsearched.items()}
    return {
        name: {
            "widths": widths,
            "supernet": evaluator.score(np.array(widths)),
            "flops": int(space.costs["flops"](widths)[0]),
        }
        for name, widths in networks.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--budgets", nargs="+", default=["flops=50%", "flops=15%"])
    parser.add_argument("--by", choices=["score", "loss"], default="score")
    parser.add_argument("--trainings", type=int, default=3, help="of every network, with seeds of their own")
    args = parser.parse_args()
    torch.set_num_threads(1)
    train, held_out = load(args.data)
    test = Images(held_out.x[SCORED:], held_out.y[SCORED:])
    space = small_space()
    for seed in args.seeds:
        done = {(r["budget"], r["seed"], r["by"]) for r in known(args.out)}
        todo = [budget for budget in args.budgets if (budget, seed, args.by) not in done]
        net = trained(space, train, seed) if todo else None
        for budget in todo:
            assert net is not None
            found = searched(net, held_out, budget, args.by, seed)
            for row in found.values():
                widths = np.array(row["widths"])
                seeds = range(10 * seed, 10 * seed + args.trainings)
                row["alone"] = [accuracy_alone(space, widths, (train, test), ALONE, each) for each in seeds]
            add(args.out, {"budget": budget, "seed": seed, "by": args.by, "networks": found, **provenance()})
            print(budget, seed, {name: (row["flops"], row["alone"]) for name, row in found.items()}, flush=True)


if __name__ == "__main__":
    main()
