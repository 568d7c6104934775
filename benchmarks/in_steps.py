"""Is a network better cut in steps, with some fine-tuning between them, than at once? On a CPU.

    python benchmarks/in_steps.py run --cifar FOLDER
    python benchmarks/in_steps.py page

What is computed is written down in docs/results/in-steps.md, and ``page`` puts the table there. A stopped run goes on
where it was.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import numpy as np
import torch
from fine_tuning_rate import BATCH, TAUGHT, Case, figures
from intervals import interval
from rows import RESULTS, append, command_line, put, read
from torch import nn

from bcnet.search.constraints import Constraints
from bcnet.space.importance import importance
from bcnet.space.network import trace
from bcnet.training.optim import Optimisation
from bcnet.training.recalibration import recalibrate
from bcnet.training.reconstruction import inherited
from bcnet.training.retraining import Retraining, retrain
from bcnet.utils.provenance import provenance

CASES = (
    ("chain", 71, 0.25),
    ("resnet", 73, 0.15),
    ("mobilenet", 75, 0.15),
    ("excited", 74, 0.15),
    ("chain", 72, 0.15),
)
"""Network, seed, and what is left of the FLOPs."""
WAYS = {"at once": (6,), "in two": (2, 4), "in three": (1, 1, 4)}
"""Epochs of fine-tuning after every cut."""
RATE, SEEDS, SOME = 0.05, (0, 1), 8
PAGE = RESULTS / "in-steps.md"


def slimmed(case: Case, widths: list[list[int]], epochs: tuple[int, ...], seed: int) -> tuple[nn.Module, float]:
    """The network of ``case`` cut to each of ``widths`` in turn, with ``epochs`` of fine-tuning after each cut; and its
    held-out loss right after the last cut."""
    torch.manual_seed(seed)
    case.data.train.seed = seed  # type: ignore[attr-defined]
    some = [batch for batch, _ in zip(case.data.train.batches(0), range(SOME), strict=False)]
    net, cut = case.given, float("nan")
    for wanted, length in zip(widths, epochs, strict=True):
        space = trace(net, torch.randn(2, *case.data.shape), groups=1000, least=4)
        net = inherited(space, net, wanted, importance(space, net, "l2"), some)
        recalibrate(net, some)
        cut = figures(net.eval(), case.data.val)["loss"]
        how = Optimisation(epochs=length, lr=RATE, warmup=length / 12, weight_decay=5e-4, head=64.0)
        retrain(net, case.data.train, Retraining(how, TAUGHT, seed=seed), teacher=case.given)
    return net.eval(), cut


def run(given: argparse.Namespace) -> None:
    done = {(row["network"], row["base_seed"], row["way"], row["seed"]) for row in read(given.out)}
    for name, base_seed, left in CASES:
        wanted = [(way, seed) for seed in SEEDS for way in WAYS if (name, base_seed, way, seed) not in done]
        if not wanted:
            continue
        case = Case(name, base_seed, f"flops={left:.0%}", BATCH, given.cifar, given.cache)
        whole = figures(case.given, case.data.test)
        for way, seed in wanted:
            parts = len(WAYS[way])
            budgets = [f"flops={left ** (k / parts):.4%}" for k in range(1, parts + 1)]
            widths = [Constraints(case.space, case.space.costs, [b]).uniform().tolist() for b in budgets]
            begun = time.process_time()
            net, cut = slimmed(case, widths, WAYS[way], seed)
            row = {"network": name, "base_seed": base_seed, "left": left, "way": way, "seed": seed, "widths": widths}
            row |= {"given": whole, "cut": cut, "test": figures(net, case.data.test)}
            row |= {"seconds": round(time.process_time() - begun, 1), "made": provenance()}
            append(given.out, row)
            print(name, base_seed, way, seed, row["cut"], row["test"], row["seconds"], flush=True)


def table(rows: list[dict[str, Any]]) -> str:
    """Means over seeds of training for every network and way; differences to ``at once`` over the networks."""
    lines = ["| network | given | " + " | ".join(f"{way}: cut, test loss, accuracy, s" for way in WAYS) + " |"]
    lines.append("| --- | ---: |" + " ---: |" * len(WAYS))
    over: dict[str, dict[str, list[float]]] = {way: {"loss": [], "accuracy": []} for way in WAYS}
    for name, base_seed, left in CASES:
        own = [row for row in rows if (row["network"], row["base_seed"]) == (name, base_seed)]
        if len(own) < len(WAYS) * len(SEEDS):
            continue
        cells, means = [], {}
        for way in WAYS:
            mine = [row for row in own if row["way"] == way]
            means[way] = {key: float(np.mean([row["test"][key] for row in mine])) for key in ("loss", "accuracy")}
            cut, seconds = (float(np.mean([row[key] for row in mine])) for key in ("cut", "seconds"))
            cells.append(f"{cut:.3f}, {means[way]['loss']:.3f}, {means[way]['accuracy']:.2f}, {seconds:.0f}")
            for key in over[way]:
                over[way][key].append(means[way][key] - means["at once"][key])
        lines.append(f"| {name}, {base_seed}, {left:.0%} | {own[0]['given']['accuracy']:.2f} | {' | '.join(cells)} |")
    if not over["at once"]["loss"]:
        return "Not measured yet."
    told = [
        f"{way.capitalize()} minus at once, over the networks: test loss {interval(over[way]['loss'], '+', 3)}, "
        f"accuracy {interval(over[way]['accuracy'], '+')}."
        for way in list(WAYS)[1:]
    ]
    return "\n".join([*lines, "", *told])


def page(given: argparse.Namespace) -> None:
    put(PAGE, {"table": table(read(given.out))})


def main() -> None:
    command_line(__doc__, "in-steps", {"run": run, "page": page})


if __name__ == "__main__":
    main()
