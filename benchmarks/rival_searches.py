"""Rivals of the paper as searches under one scorer and one budget, simulated on the released tables.

    python benchmarks/rival_searches.py --tables FOLDER [--seeds 3]

Writes docs/results/rival-searches.json and .md: the regret after 400 evaluations, in points of the table's mean
accuracy, of every strategy at 25, 50 and 75 % of the FLOPs of both tables. Minutes of one core.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
from law_report import RESULTS, row
from numpy.typing import NDArray
from scipy.stats import t

from bcnet.bench import ChannelBench
from bcnet.search import SearchConfig, search
from bcnet.utils.provenance import origin, provenance

SPACES, SHARES, EVALUATIONS = ("mobilenet", "resnet"), (25, 50, 75), 400
STRATEGIES = {
    "evolution": SearchConfig(),
    "NSGA-II, as printed": SearchConfig.paper(),
    "Markov chains (after DMCP)": SearchConfig(strategy="markov"),
    "agent (after AMC)": SearchConfig(strategy="agent"),
    "greedy (AutoSlim)": SearchConfig(strategy="greedy"),
    "random, filling the budget": SearchConfig(strategy="random"),
    "uniform (the candidates about it)": SearchConfig(strategy="uniform"),
}


class Mean:
    """A table that answers with the mean of its training runs."""

    def __init__(self, table: ChannelBench):
        self.scorer = table.scorer()

    def score_many(self, widths: NDArray[np.int64]) -> NDArray[np.float64]:
        return self.scorer.score_many(widths, "mean")


def measured(folder: Path, seeds: int) -> list[dict[str, Any]]:
    found = []
    for space in SPACES:
        table = ChannelBench.load(space, folder)
        for share in SHARES:
            budget = f"flops={share}%"
            best = float(table.best({"flops": share / 100 * int(table.costs["flops"].max())}).mean)
            for name, config in STRATEGIES.items():
                fixed = config.strategy in ("greedy", "uniform")
                for seed in range(1 if fixed else seeds):
                    settings = {**config.__dict__, "seed": seed, "evaluations": EVALUATIONS}
                    result = search(table.space, Mean(table), [budget], config=SearchConfig(**settings))
                    assert result.best is not None
                    regret = best - float(table.query(np.array(result.best.widths)).mean)
                    found.append({"space": space, "share": share, "search": name, "seed": seed, "regret": regret})
                print(space, share, name, flush=True)
    return found


def page(data: dict[str, Any]) -> str:
    rows, cases = data["rows"], [(space, share) for space in SPACES for share in SHARES]
    heads = ["search", "mean", "95 %", *(f"{space} {share} %" for space, share in cases)]
    lines = [row(*heads), row("---", *["---:"] * (len(heads) - 1))]
    for name in STRATEGIES:
        mine = [r for r in rows if r["search"] == name]
        by_seed = [np.mean([r["regret"] for r in mine if r["seed"] == s]) for s in sorted({r["seed"] for r in mine})]
        half = (
            f"± {t.ppf(0.975, len(by_seed) - 1) * np.std(by_seed, ddof=1) / len(by_seed) ** 0.5:.3f}"
            if len(by_seed) > 1
            else ""
        )
        cells = [np.mean([r["regret"] for r in mine if (r["space"], r["share"]) == case]) for case in cases]
        lines.append(row(name, f"{np.mean(by_seed):.3f}", half, *(f"{cell:.3f}" for cell in cells)))
    return TEXT.format(seeds=data["seeds"], lines="\n".join(lines), origin=origin(data), command=data["command"])


TEXT = """# Rivals of the paper as searches

Strategies under the same scorer, the mean accuracy in a released Channel-Bench-Macro table, and the same budget:
regret after at most 400 evaluations in accuracy points, {seeds} seeds (greedy slimming and uniform scaling have none).
`{command}`, {origin}.

{lines}

What the rivals are, and what they are not:

- **Markov chains** have DMCP's distribution over widths, moved by the best of each generation instead of by gradients
  through a network that is trained at the same time (`search/strategies/markov.py`).
- **The agent** sets ratios layer by layer as AMC's does, from the same view of a layer, and learns by the plain policy
  gradient instead of DDPG (`search/strategies/agent.py`).
- **TAS** learns widths with the weights: it is a method of [`bcnet bench rank`](channel-bench.md), without its FLOPs
  loss and its distillation, as widths are ranked there and not chosen.
- **LeGR** needs the importances of a trained network's channels, which the tables do not have: it is not built. The
  criteria `*-global` of a run are its starting point, one threshold over all layers without a learned affine map. The
  paper prints 75.7 % for it on ResNet50 at 2.4G FLOPs.
- **MetaPruning** generates the weights of every width vector by a network of its own, which is neither small nor
  comparable at equal path passes: not built. The paper prints 73.4 % for it on ResNet50 at 1G FLOPs, and 75.2 % for
  BCNet.

Markov chains, the agent and random search have the same regret with every seed because all three fill the budget. With
four candidates per width, the networks to which nothing can be added are few (143 to 857 by case), and all three end at
the best of them; so the table does not tell them apart, and what is left is what the noise of the table gives to
networks that use less than they may.

What the table does not show: it judges searches by scores that do not err. With a supernet's scores, which do,
the order may be another. The settings of `evolution` were chosen while looking at these tables; those of Markov chains
and agent before they were run on them; `uniform` is weaker than it need be, as four candidates cannot express it.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tables", type=Path)
    parser.add_argument("--seeds", type=int, default=3)
    args = parser.parse_args()
    file = RESULTS / "rival-searches.json"
    if args.tables:
        found = {"seeds": args.seeds, "rows": measured(args.tables, args.seeds), **provenance()}
        file.write_text(json.dumps(found, indent=1) + "\n")
    file.with_suffix(".md").write_text(page(json.loads(file.read_text())))


if __name__ == "__main__":
    main()
