"""Ablations of the search in both Channel-Bench spaces, by looking accuracies up in the released tables.

    python benchmarks/table_ablations.py --tables DIR [--seeds 21] [--out docs/results/ablations-tables.json]

Strategies, the prior and the number of evaluations at 25, 50 and 75 % of the FLOPs of both tables. A search sees one
training run of the table, which errs about as much as a supernet's scores; what it finds is judged by the other two
runs. A row for each case, variant and seed; rows that are in FILE are not made again. Writes FILE, and the page and the
figure beside it; the first part of the page is the plan.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from intervals import interval
from numpy.typing import NDArray
from search import found_after

from bcnet.bench.ablate import chart, summary
from bcnet.bench.correlation import kendall
from bcnet.bench.table import ChannelBench
from bcnet.search import PathLosses, SearchConfig, search
from bcnet.space.widths import Widths
from bcnet.utils.provenance import origin, provenance

RESULTS = Path(__file__).parents[1] / "docs" / "results"
SPACES, SHARES = ("mobilenet", "resnet"), (25, 50, 75)
NOISE, LOGGED = 0.5, 1000
"""Points of noise on every logged loss; widths in the log that the prior knows."""
EVALUATIONS = 200
EVOLUTION = SearchConfig(evaluations=EVALUATIONS, population=20)
SEARCHES: dict[str, tuple[SearchConfig, int | None]] = {
    "evolution": (EVOLUTION, None),
    "evolution, 100 best": (EVOLUTION, 100),
    "evolution, whole log": (EVOLUTION, LOGGED),
    "prior only": (replace(EVOLUTION, strategy="prior"), LOGGED),
    "NSGA-II, as printed": (SearchConfig.paper(evaluations=EVALUATIONS, population=20), None),
    "Markov chains": (replace(EVOLUTION, strategy="markov"), None),
    "agent": (replace(EVOLUTION, strategy="agent"), None),
    "random": (replace(EVOLUTION, strategy="random"), None),
    "greedy": (replace(EVOLUTION, strategy="greedy"), None),
    "uniform": (replace(EVOLUTION, strategy="uniform"), None),
}
"""Settings, and how many widths of the log a prior is made of."""
POINTS = (25, 50, 100, 200)
PLANNED = 21
Floats = NDArray[np.float64]


class Scores:
    """Of every network of a table, as the search of a seed sees it: one run."""

    def __init__(self, table: ChannelBench, seed: int):
        self.table, self.rng = table, np.random.default_rng([seed, 50])
        self.run = seed % table.acc.shape[1]
        self.values: Floats = table.acc[:, self.run]

    def score_many(self, widths: Widths) -> Floats:
        return self.values[self.table.space.index(widths)]

    @property
    def judged(self) -> Floats:
        """The mean of the runs that the search does not see."""
        return np.delete(self.table.acc, self.run, axis=1).mean(axis=1)

    def log(self, count: int) -> PathLosses:
        """The ``count`` least losses of random networks, with noise of their own."""
        index = self.rng.integers(0, len(self.table), LOGGED)
        losses = 100 - self.table.acc[index, self.run] + self.rng.normal(0, NOISE, LOGGED)
        kept = np.argsort(losses, kind="stable")[:count]
        return PathLosses(self.table.widths[index[kept]], losses[kept])


def agreement(table: ChannelBench) -> float:
    """Kendall of what searches see with what judges them, the mean over runs."""
    each = [Scores(table, run) for run in range(table.acc.shape[1])]
    return float(np.mean([kendall(scores.values, scores.judged) for scores in each]))


def one(table: ChannelBench, share: int, name: str, seed: int) -> dict[str, Any]:
    """What the search ``name`` of a seed has found after each of :data:`POINTS`, by the runs it did not see."""
    config, logged = SEARCHES[name]
    scores = Scores(table, seed)
    initial = None if logged is None else scores.log(logged)
    result = search(table.space, scores, [f"flops={share}%"], config=replace(config, seed=seed), initial=initial)
    chosen = [found_after(result, count) for count in POINTS]
    by = [None if c is None else float(scores.judged[table.space.index(np.array(c))]) for c in chosen]
    return {"space": table.space.name, "share": share, "search": name, "seed": seed, "judged": by}


def measure(tables: Mapping[str, ChannelBench], seeds: int, file: Path) -> dict[str, Any]:
    """Seed by seed, so that all variants have as many whenever it is stopped."""
    data: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {"rows": []}
    there = {(r["space"], r["share"], r["search"], r["seed"]) for r in data["rows"]}
    for seed in range(seeds):
        for space, table in tables.items():
            for share in SHARES:
                for name in SEARCHES:
                    if (space, share, name, seed) not in there:
                        data["rows"].append(one(table, share, name, seed))
        data |= {
            "seeds": seed + 1,
            "kendall": {space: agreement(table) for space, table in tables.items()},
            **provenance(),
        }
        file.write_text(json.dumps(data, indent=1) + "\n")
        print(f"seed {seed}", flush=True)
    return data


def variants(rows: Sequence[Mapping[str, Any]], seeds: int) -> list[dict[str, Any]]:
    """Lines (ablation, variant, seed) with the mean accuracy over the six cases, as ``bcnet bench ablate`` has them."""
    last = len(POINTS) - 1
    wanted = [("evaluations", f"{count}", "evolution", at) for at, count in enumerate(POINTS)]
    for at in (1, last):
        kinds = {"none": "evolution", "100 best widths": "evolution, 100 best", "whole log": "evolution, whole log"}
        kinds |= {"prior only": "prior only"}
        wanted += [(f"prior, {POINTS[at]} evaluations", kind, name, at) for kind, name in kinds.items()]
    plain = [name for name in SEARCHES if "," not in name or name.startswith("NSGA")]
    wanted += [("search", name, name, last) for name in plain if name != "prior only"]
    lines = []
    for ablation, variant, name, at in wanted:
        for seed in range(seeds):
            mine = [r["judged"][at] for r in rows if (r["search"], r["seed"]) == (name, seed)]
            if None in mine:
                told: dict[str, Any] = {"failure": "nothing within the budget was scored"}
            else:
                told = {"accuracy": float(np.mean(mine))}
            lines.append({"ablation": ablation, "variant": variant, "seed": seed, **told})
    return lines


def page(data: dict[str, Any]) -> str:
    if not data["rows"]:
        return TEXT.format(found="It has not been run yet.\n")
    lines = variants(data["rows"], data["seeds"])
    table = ["| part | variant | accuracy | above the first variant of the part |", "| --- | --- | ---: | ---: |"]
    first: list[float] = []
    before = ""
    for row in summary(lines):
        new = row["ablation"] != before
        if new:
            before, first = row["ablation"], row["by_seed"]
        if row["mean"] is None or len(row["by_seed"]) < data["seeds"]:
            table.append(f"| {before if new else ''} | {row['variant']} | nothing within the budget | |")
            continue
        gap = np.array(row["by_seed"]) - np.array(first)
        over = "" if new else interval(gap, "+", 3)
        mean = f"{row['mean']:.3f} ± {row['half']:.3f} %"
        table.append(f"| {before if new else ''} | {row['variant']} | {mean} | {over} |")
    agreed = " and ".join(f"{value:.2f} ({space})" for space, value in data["kendall"].items())
    made = f"{origin(data)}: `{data['command']}`, {data['seeds']} seeds"
    if data["seeds"] < PLANNED:
        made += f" of the {PLANNED} that were planned, as the time of the machine did not suffice for more"
    made += f". Kendall of the scores with what judges them: {agreed}."
    return TEXT.format(found="\n".join([made, "", *table, "", "![By part](ablations-tables.svg)", ""]))


TEXT = """# Ablations of the search on the released tables

Searching needs no GPU where accuracies can be looked up, so the parts of the paper's ablations that concern the search
alone can have many seeds in Channel-Bench's own spaces. `benchmarks/table_ablations.py`; the parts that need supernets
are on [the page of ablations](ablations.md).

## The plan, written before the run

- Both tables at 25, 50 and 75 % of the FLOPs. A search of 200 evaluations, population 20, sees *one* of the three
  training runs of every network (by turns with the seed), so that its scores err, by Kendall about as much as those of
  the better supernets. What it finds is judged by the mean of the other two runs.
- **evaluations**: the best score after 25, 50, 100 and 200 of evolution. **prior**: the first population from none, the
  100 best or all of 1,000 logged widths, whose losses have noise of 0.5 points on top, and the prior alone, after 50
  and 200. **search**: evolution, NSGA-II as printed, Markov chains, agent, random networks that fill the budget, greedy
  slimming, uniform scaling.
- Mean over the six cases; 95 % intervals (Student's t) over 21 seeds of that mean, and of its difference from the
  first variant of a part, seed by seed. All settings are the defaults but the population, which is halved as
  evaluations are few. Run once.

## What came of it

{found}
With scores that err as these do, no difference beyond chance shows between numbers of evaluations, kinds of prior, or
evolution, Markov chains, an agent and random networks that fill the budget: all are within 0.02 points. NSGA-II as
printed, greedy slimming and uniform scaling are below these, by 0.12, 0.06 and 0.06 points. What evolution gains over
random networks on [the tables as scores](rival-searches.md), 0.04 points, is therefore probably what the tables' own
noise favours.

**What this does not show**: a supernet's errors, which are not independent noise but follow widths; so it says how much
the search is worth where scores are as good as here, not what supernets are worth. K, base width and sides cannot
vary in a table. Settings of evolution were once chosen while looking at these tables ([search](search.md)), which
favours it over the others here. Seeds share three runs of each table, so intervals are over searches, not over
networks or data sets. Uniform scaling is weaker than it need be, as four candidates cannot express it.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tables", type=Path)
    parser.add_argument("--seeds", type=int, default=PLANNED)
    parser.add_argument("--out", type=Path, default=RESULTS / "ablations-tables.json")
    args = parser.parse_args()
    if args.tables:
        measure({space: ChannelBench.load(space, args.tables) for space in SPACES}, args.seeds, args.out)
    data = json.loads(args.out.read_text()) if args.out.exists() else {"rows": []}
    args.out.with_suffix(".md").write_text(page(data))
    if data["rows"]:
        args.out.with_suffix(".svg").write_text(chart(summary(variants(data["rows"], data["seeds"]))))


if __name__ == "__main__":
    main()
