"""How many evaluations does bcnet's search need? The searches of the fourth comparison once more, from their trials.

    python benchmarks/rivals_replay.py docs/results/rivals-4-ours.json

The strategy asks for the same configurations in the same order when it is given the same scores, so nothing is scored
again: what the first n trials had found is read off.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from parts import network

from bcnet import trace
from bcnet.search import Constraints, SearchConfig
from bcnet.search.strategies import neighbours as strategies

COUNTS = (6, 12, 24, 36, 48, 60, 72, 96, 120)


def losses_in_order(name: str, budget: str, facts: dict[str, Any]) -> list[float]:
    """The losses of all trials in the order in which the search asked for them."""
    settings = facts["settings"]
    space = trace(network(name).eval(), torch.zeros(2, 3, 32, 32), groups=settings["groups"], check=False)
    flops = float(budget.removesuffix("%")) / 100 * int(space.costs["flops"](space.max)[0])
    constraints = Constraints(space, space.costs, [f"flops={flops:.0f}"])
    known = {tuple(trial["widths"]): trial["loss"] for trial in facts["trials"]}
    rng = np.random.default_rng([settings["seed"], 30])
    rules = constraints.fill(space.floor(np.stack([np.array(widths) for widths in facts["rules"].values()])), rng)
    others = strategies.near(constraints, rules, max(0, settings["population"] - len(rules)), rng)
    config = SearchConfig(**{key: settings[key] for key in ("evaluations", "population", "seed")})
    strategy = strategies.neighbours(constraints, config, np.concatenate([rules, others]))
    rows, found = next(strategy), list[float]()
    while len(found) < len(known):
        asked = [tuple(row.tolist()) for row in rows]
        if any(row not in known for row in asked):
            raise SystemExit(f"error: {budget} was not searched by this strategy: it asks for other configurations")
        found += [known[row] for row in asked]
        rows = strategy.send(-np.array([known[row] for row in asked]))
    return found


def main() -> None:
    print("| budget | " + " | ".join(map(str, COUNTS)) + " |")
    print("| --- " + "| ---: " * len(COUNTS) + "|")
    for budget, content in json.loads(Path(sys.argv[1]).read_text()).items():
        losses = losses_in_order("vgg19_cifar", budget, content["facts"])
        print(f"| {budget} | " + " | ".join(f"{min(losses[:count]):.3f}" for count in COUNTS) + " |")


if __name__ == "__main__":
    main()
