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
from intervals import half
from log_width_report import RESULTS, row
from search import Mean

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
        width = f"± {half(by_seed):.3f}" if len(by_seed) > 1 else ""
        cells = [np.mean([r["regret"] for r in mine if (r["space"], r["share"]) == case]) for case in cases]
        lines.append(row(name, f"{np.mean(by_seed):.3f}", width, *(f"{cell:.3f}" for cell in cells)))
    networks = json.loads((RESULTS / "rival-networks.json").read_text())
    return TEXT.format(
        seeds=data["seeds"],
        lines="\n".join(lines),
        origin=origin(data),
        command=data["command"],
        networks=network_rows(networks["rows"]),
        networks_origin=origin(networks),
        fewer=fewer_evaluations(),
    )


def fewer_evaluations() -> str:
    """The regret of evolution before and after its offspring grew, in words."""
    found = json.loads((RESULTS / "search-few.json").read_text())
    pairs = {n: (found["before"][n]["mean"], found["after"][n]["mean"]) for n in ("20", "60", "120", "400")}
    return ", ".join(f"{before:.3f} to {after:.3f} after {n}" for n, (before, after) in pairs.items())


def network_rows(rows: list[dict[str, Any]]) -> str:
    """The table of rivals that need a network: accuracy, and its interval over seeds."""
    lines = [row("from", "method", "test accuracy, %", "95 %", "seeds", "of the budget")]
    lines.append(row("---", "---", *["---:"] * 4))
    names = dict.fromkeys((r["how"], r["method"]) for r in sorted(rows, key=lambda r: r["how"] == "scratch"))
    for how, name in names:
        mine = [r for r in rows if (r["how"], r["method"]) == (how, name)]
        values = [r["accuracy"] for r in mine]
        width = f"± {half(values):.2f}" if len(values) > 1 else ""
        start, used = {"trained": "a trained network", "scratch": "scratch"}[how], np.mean([r["used"] for r in mine])
        lines.append(row(start, name, f"{np.mean(values):.2f}", width, str(len(values)), f"{used:.0%}"))
    return "\n".join(lines)


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
- **LeGR, MetaPruning and TAS** need a network, which a table does not have: see below.

Markov chains, the agent and random search have the same regret with every seed because all three fill the budget. With
four candidates per width, the networks to which nothing can be added are few (143 to 857 by case), and all three end at
the best of them; so the table does not tell them apart, and what is left is what the noise of the table gives to
networks that use less than they may.

Evolution grows most of its offspring to 95 % of the budget. Before it did, its regret here was 0.015 ± 0.024, and with
fewer evaluations the difference is larger: 5 seeds, all six cases, {fewer}.

What the table does not show: it judges searches by scores that do not err. With a supernet's scores, which do,
the order may be another. The settings of `evolution`, how many offspring grow among them (four ways were tried),
were chosen while looking at these tables; those of Markov chains and agent before they were run on them; `uniform` is
weaker than it need be, as four candidates cannot express it.

## With a network: LeGR, MetaPruning, TAS

Digits in clutter, the example's network (`zoo:cluttered_cnn`) at 12 % of its FLOPs, 10,000 test images. Searches from a
trained network have 20 evaluations under the same score, the cut network after 25 steps of healing; what they choose
inherits and is fine-tuned for 4 epochs. Supernets are trained for 6 epochs at four paths a step and searched by
evolution with 60 evaluations, by loss; what they choose is trained from scratch for 8 epochs. The full network teaches
all of them in these last trainings, which are the same for all rows of a kind. `python benchmarks/rival_networks.py`,
{networks_origin}; intervals are Student's t over seeds, each with a full network and a split of its own.

{networks}

From scratch MetaPruning has the highest mean, above the bilateral supernet; the intervals of the supernets overlap.
LeGR ended with its first configuration on all three seeds. From a trained network, Markov chains, agent, random search
and evolution all fill the budget and have higher means than uniform scaling; between them there is no difference
beyond chance. Evolution did not fill it before (71 % of it, 69.67 ± 1.37 on these seeds); its row was made again after
its offspring were grown to 95 % of a budget, at the commit above, and the others are of commits ef2ff08 and 2e14377.
The rows of supernets were searched by evolution as it was before that.

- **LeGR** (`search/strategies/legr.py`, `search: {{strategy: legr}}`) ranks all channels by a learned affine map of
  their importance (here `l2`) and is otherwise as printed: regularised evolution, a change reaches a tenth of the
  layers. LeGR has hundreds of evaluations where it has 20 here, and its first, one threshold without a map, is hard to
  beat in so few. The paper prints 75.7 % for it on ResNet50 at 2.4G FLOPs.
- **MetaPruning** (`supernet/meta.py`) generates weights from the whole width vector, trained on the paths of UA. Its
  generators see more than the printed ones do and share the norms. A generator makes a path's step costlier than a path
  of a plain supernet; path passes are equal, seconds are not. The paper prints 73.4 % for it on ResNet50 at 1G FLOPs,
  and 75.2 % for BCNet.
- **TAS** (`supernet/tas.py`) chooses by itself: its loss of FLOPs as printed, the likeliest widths, lowered or filled
  to the budget. The rate of its logits is twenty times the printed one, as it has hundreds of steps and not ten
  thousands. Its distillation is what all rows have. The paper prints 76.2 % for it on ResNet50 at 2.3G FLOPs.

What this table does not show: a task of any size. Few evaluations and epochs, one small network and one budget, both
made for the example, where widths matter. Uniform scaling uses 93 % of the budget, as channels are few, and leaves
the first layer 2 of its 8 channels; that makes it weak: on the page of [the example](example.md) keeping 4 is worth
1.7 points. Of evolution's 20 evaluations 8 are its first population. Nothing was tuned for any row but the rate of
TAS's logits, before its first run.
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
