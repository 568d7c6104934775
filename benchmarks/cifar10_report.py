"""Writes docs/results/cifar10.md from docs/results/cifar10.json, which benchmarks/cifar10.py of commit 5294cdb wrote.

    python benchmarks/cifar10_report.py [FILE] [--rates FILE ...]

docs/results/cifar10-by-score.json is from before there was a log-width model; the page has its accuracies too.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from statistics import mean, variance
from typing import Any

import numpy as np
from scipy.stats import pearsonr, t

from bcnet.utils.provenance import origin

RESULTS = Path(__file__).parents[1] / "docs" / "results"
BY_SCORE = RESULTS / "cifar10-by-score.json"
PAPER = {
    "flops=146M": {"uniform": 94.32, "random": 93.85, "found": 95.42},
    "flops=44M": {"uniform": 92.88, "random": 92.31, "found": 94.42},
}
"""Accuracies of the paper's table, after 500 epochs and with a teacher."""
NAMES = {
    "found": "`bcnet`",
    "uniform": "`uniform`",
    "balanced": "`balanced`",
    "random": "`random`",
    "published": "the paper's widths",
}
COMPARED = ("found", "uniform", "random")
Run = dict[str, Any]


def accuracy(run: Run, name: str) -> float:
    return 100 * float(run["networks"][name]["score"])


def gains(runs: list[Run], name: str, over: str) -> list[float]:
    """Points of accuracy by seed."""
    both = [run for run in runs if name in run["networks"] and over in run["networks"]]
    return [accuracy(run, name) - accuracy(run, over) for run in both]


def signed(values: list[float]) -> str:
    """The mean and every seed's, such as +0.50 (+0.40, +0.60)."""
    return f"{mean(values):+.2f} ({', '.join(f'{v:+.2f}' for v in values)})" if values else ""


def accuracy_table(budget: str, runs: list[Run]) -> list[str]:
    lines = [
        "| network | accuracy | by seed | M FLOPs | M parameters | over uniform | over random | paper |",
        "| --- | ---: | --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for name, words in NAMES.items():
        these = [run for run in runs if name in run["networks"]]
        if not these:
            continue
        scores = [accuracy(run, name) for run in these]
        costs = [run["networks"][name]["costs"] for run in these]
        cells = [
            words,
            f"{mean(scores):.2f} %",
            ", ".join(f"{s:.2f}" for s in scores),
            ", ".join(dict.fromkeys(f"{c['flops'] / 1e6:.1f}" for c in costs)),
            ", ".join(dict.fromkeys(f"{c['params'] / 1e6:.2f}" for c in costs)),
            "" if name == "uniform" else signed(gains(runs, name, "uniform")),
            "" if name == "random" else signed(gains(runs, name, "random")),
            f"{PAPER[budget][name]:.2f} %" if name in PAPER.get(budget, {}) else "",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def absent(runs: list[Run]) -> list[str]:
    """Which networks were not trained, in words."""
    missing = [f"{NAMES[n]} of seed {r['seed']}" for r in runs for n in COMPARED if n not in r["networks"]]
    return [f"Not run yet: {', '.join(missing)}.", ""] if missing else []


def verdict(budget: str, runs: list[Run]) -> str:
    """What the table says, in words."""
    name, found = budget.removeprefix("flops="), gains(runs, "found", "uniform")
    if not found:
        return f"At {name}, the found network was not retrained, so there is no verdict."
    paper = PAPER.get(budget)
    printed = f"; the paper's gain is {paper['found'] - paper['uniform']:+.1f}" if paper else ""
    gain = mean(found)
    if min(found) > 0:
        words = f"the found network beats uniform scaling with every seed, by {gain:.2f} points on average"
    elif gain > 0:
        words = (
            f"the found network is {gain:.2f} points better than uniform scaling on average, but not with every seed"
        )
    else:
        words = f"no gain: the found network is {-gain:.2f} points worse than uniform scaling on average"
    others = gains(runs, "found", "random")
    beside = f", and {mean(others):+.2f} points from `random`" if others else ""
    published = gains(runs, "published", "uniform")
    theirs = f" The widths that its authors published gain {mean(published):+.2f} points here." if published else ""
    return f"At {name}, {words}{printed}{beside}.{theirs}"


def uncertainty(by_budget: dict[str, list[Run]]) -> list[str]:
    """How sure the means are, from how much the gains over uniform scaling differ between seeds."""
    every = [gains(runs, name, "uniform") for runs in by_budget.values() for name in ("found", "balanced", "published")]
    several = [values for values in every if len(values) > 1]
    if not several:
        return []
    error = mean(variance(values) / len(values) for values in several) ** 0.5
    half = error * float(t.ppf(0.975, len(several[0]) - 1))
    return [
        f"By how gains differ between seeds, a mean gain has a standard error of about {error:.2f} points. With"
        f" {len(several[0])} seeds",
        f"that is ± {half:.1f} points by Student's t (95 %), more than any difference here.",
        "",
        *NOT_SHOWN,
    ]


NOT_SHOWN = [
    "**What this does not show**: how networks compare after the paper's 500 epochs, or after the 60 that a table of",
    "this kind needs at least; a third seed; VGG19; other rivals; a search that could have found the published widths.",
    "",
]


def by_loss(run: Run) -> bool:
    """Whether the search ranked by loss; results that do not say are from before it could."""
    return bool(run["search"].get("ranked_by", "score") == "loss")


def supernet_table(runs: list[Run]) -> list[str]:
    by = "Loss" if any(by_loss(run) for run in runs if "search" in run) else "Accuracy"
    lines = [
        f"{by} on the held-out training images, by which the search ranks.",
        "",
        "| budget | seed | found | uniform | full network | evaluations | supernet s | search s |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for run in runs:
        if "search" not in run:
            continue
        search = run["search"]
        scores = [search["best"]["score"], search["supernet"]["uniform"], search["supernet"]["full"]]
        cells = [
            run["budget"].removeprefix("flops="),
            str(run["seed"]),
            *(f"{-s:.4f}" if by_loss(run) else f"{100 * s:.2f} %" for s in scores),
            str(search["evaluations"]),
            f"{run['supernet']['seconds']:.0f}",
            f"{search['seconds']:.0f}",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def foretold(budget: str, runs: list[Run]) -> list[str]:
    """How well the law of each search foretells the accuracies of all networks retrained at its budget."""
    searches = [(run["seed"], run.get("search", {})) for run in runs]
    fits = [(seed, found.get("log_width") or found.get("law")) for seed, found in searches]  # now, and its name then
    laws = [(seed, fit["gains"]) for seed, fit in fits if fit]
    over: dict[tuple[int, ...], list[float]] = {}
    for run in (run for run in runs if "uniform" in run["networks"]):
        for name, network in run["networks"].items():
            over.setdefault(tuple(network["widths"]), []).append(accuracy(run, name) - accuracy(run, "uniform"))
    if not laws or len(over) < 3:
        return []
    logs, gained = np.log2(list(over)), [mean(values) for values in over.values()]
    found = ", ".join(f"{pearsonr(logs @ gains, gained).statistic:.2f} (seed {seed})" for seed, gains in laws)
    return [
        f"Over all {len(over)} networks retrained at {budget.removeprefix('flops=')}, Pearson's correlation of the law",
        f"of the scores with the accuracy is {found}. So few networks are no evidence: these figures",
        "are here because an earlier version of this page had them.",
        "",
    ]


SAME = ("uniform", "balanced", "published")
"""Networks whose widths do not depend on the seed."""


def width_table(runs: list[Run]) -> list[str]:
    """The share of every variable's channels that each network keeps."""
    having = {name: [run for run in runs if name in run["networks"]] for name in NAMES}
    columns = [(NAMES[name], having[name][0]["networks"][name]) for name in SAME if having[name]]
    for run in runs:
        seeded = [name for name in ("found", "random") if name in run["networks"]]
        columns += [(f"{NAMES[name]}, seed {run['seed']}", run["networks"][name]) for name in seeded]
    lines = [
        "| first layer of the variable | channels | " + " | ".join(head for head, _ in columns) + " |",
        "| --- | ---: |" + " ---: |" * len(columns),
    ]
    for i, (layer, full) in enumerate(runs[0]["variables"]):
        cells = [f"{network['widths'][i]} ({network['widths'][i] / full:.0%})" for _, network in columns]
        lines.append(f"| `{layer}` | {full} | " + " | ".join(cells) + " |")
    return lines


def taken(runs: list[Run]) -> float:
    """Seconds of all stages; a supernet that two budgets share counts once."""
    supernets = {run["seed"]: run["supernet"]["seconds"] for run in runs if "supernet" in run}
    searches = sum(run["search"]["seconds"] for run in runs if "search" in run)
    return sum(supernets.values()) + searches + sum(n["seconds"] for run in runs for n in run["networks"].values())


def seconds(runs: list[Run], name: str) -> str:
    taken = [run["networks"][name]["seconds"] for run in runs if name in run["networks"]]
    return f"{min(taken):.0f} to {max(taken):.0f} s" if taken else "not run"


def classifier(trained: dict[str, Any]) -> list[str]:
    """How the classifier learnt; results without ``head`` are from before there was one."""
    if trained.get("head"):
        return [f"- The classifier's peak rate is kept to {trained['head']:g} / its features in both trainings."]
    return [
        "- The classifier learns at the rate of all other layers and weights are drawn by fan-out. Both were",
        "  found to slow such short trainings down after this was measured, and were changed since.",
    ]


def warmup(training: dict[str, Any]) -> str:
    return f" after {training['warmup']:g} epochs of rising" if training["warmup"] else ""


def chosen(recipe: dict[str, Any]) -> str:
    """Which widths were taken; results that do not say are from before there was a law."""
    if recipe["search"].get("choose") in ("law", "log-width"):  # its name then, and now
        return "the choice of the log-width model was taken."
    link = "[log-width model](search.md#by-score-or-by-law)"
    return f"the best score was taken, as the {link} came after this was measured."


def rates(data: dict[str, Any]) -> list[str]:
    """How the rate of retraining was chosen."""
    if "rates" not in data:
        return []
    first = data["rates"][0]
    tried = ", ".join(f"{100 * r['score']:.2f} % with {r['lr']}" for r in data["rates"])
    return [
        f"- The rate of retraining was chosen by uniform scaling at {first['budget'].removeprefix('flops=')} with seed",
        f"  {first['seed']}, which is none of the above, and {first['epochs']} epochs: {tried}.",
    ]


def extremes(strategy: dict[str, Any]) -> str:
    share = strategy["extremes"]
    return f"{share:.0%} of the steps train the widest network and the narrowest. " if share else ""


def settings(data: dict[str, Any]) -> list[str]:
    runs: list[Run] = data["runs"]
    r = runs[0]["recipe"]
    trained, retrained, random = r["supernet"], r["retrain"], r["random"]
    held = r["val_fraction"] * 50_000
    return [
        "## What was done",
        "",
        f"- **Supernet**: `{r['method']}`, {r['groups']} groups with a base of {r['base']}, so that a layer keeps",
        f"  {r['base'] / r['groups']:.0%} to 100 % of its channels, in multiples of {r['round_to']} as in all networks",
        f"  here but the published one; {trained['epochs']} epochs of",
        f"  {50_000 - held:,.0f} images in batches of {r['loading']['batch_size']}, four paths a step, SGD with a",
        f"  cosine from {trained['lr']} to {trained['final_lr']}{warmup(trained)}, weight decay",
        f"  {trained['weight_decay']}. {extremes(r.get('sampling') or r['strategy'])}"
        "One supernet serves both budgets of a seed.",
        f"- **Search**: evolution from the prior, {r['search']['evaluations']} widths scored on the other {held:,.0f}",
        f"  training images by {'loss' if by_loss(runs[0]) else 'accuracy'} (mean of both sides, batch statistics);",
        f"  {chosen(r)} Test images were not looked at.",
        f"- **Retraining**, the same for all networks: {retrained['epochs']} epochs of all 50,000 training images from",
        f"  scratch, batches of {r['loading']['batch_size']}, cosine from {retrained['lr']}{warmup(retrained)},",
        f"  weight decay {retrained['weight_decay']}, random crops and flips, bf16, no teacher. The accuracy is",
        "  that of the last epoch on the 10,000 test images (all images re-encoded as JPEG, quality 95). The paper:",
        "  500 epochs.",
        f"- **What cannot be found**: a base of {r['base']} and multiples of {r['round_to']} leave the widths that the",
        "  paper's authors published for 44M out of the space that was searched (a layer has 7 of 144 channels, 5 %),",
        "  and keep uniform scaling, rounded down to the same multiples, below what it could be.",
        "  [The next table](cifar10-long.md) has a base of 1 and no rounding.",
        f"- **`random`**: {random['networks']} networks drawn within the budget, trained for {random['epochs']} of the",
        "  epochs, the best on the held-out images trained to the end. **`uniform`**: all layers scaled by one factor,",
        "  the largest that holds the budget. **`balanced`**: the widths that the [width",
        "  law](search.md#by-score-or-by-law) holds best where every layer gains alike, without any training or score.",
        "  **The paper's widths** are those its authors published for 44M. Random networks used as little as two",
        "  thirds of the budget then; now they fill it.",
        "- The seed is that of the split, the supernet, the search and the retraining.",
        *classifier(trained),
        *rates(data),
        f"- One process on one GPU, {taken(runs):.0f} s in all: retraining took",
        f"  {seconds(runs, 'found')} (`bcnet`), {seconds(runs, 'uniform')} (`uniform`), {seconds(runs, 'random')}"
        " (`random`, its drawn networks included).",
    ]


def by_budgets(data: dict[str, Any]) -> dict[str, list[Run]]:
    """The runs that trained a network, the largest budget first."""
    runs: list[Run] = [run for run in data["runs"] if run["networks"]]
    budgets = sorted({run["budget"] for run in runs}, key=lambda b: -float(b.removeprefix("flops=").rstrip("M")))
    return {b: [run for run in runs if run["budget"] == b] for b in budgets}


def by_score(data: dict[str, Any]) -> list[str]:
    """What was measured before there was a law."""
    r = data["runs"][0]["recipe"]
    lines = [
        "## By the best score",
        "",
        "The same before there was a law ([cifar10-by-score.json](cifar10-by-score.json)): the lowest loss in the",
        f"supernet was taken, and networks were retrained for {r['retrain']['epochs']} epochs.",
        "",
    ]
    for budget, these in by_budgets(data).items():
        lines += [f"At {budget.removeprefix('flops=')}:", "", *accuracy_table(budget, these), ""]
    return [*lines, f"{origin(data)}: `{data['command']}`", ""]


def page(data: dict[str, Any], earlier: dict[str, Any] | None = None) -> str:
    by_budget = by_budgets(data)
    runs = [run for these in by_budget.values() for run in these]
    full = runs[0]["full"]
    lines = [
        "# MobileNetV2 on CIFAR-10",
        "",
        "Made from [cifar10.json](cifar10.json) by `python benchmarks/cifar10_report.py`; measured by",
        "`benchmarks/cifar10.py` of the commit below. What the search finds, against uniform and balanced widths and",
        f"the best of random networks within the same FLOPs; the full network has {full['flops'] / 1e6:.0f}M, and",
        f"{full['params'] / 1e6:.1f}M parameters.",
        "",
        *(f"- {verdict(budget, these)}" for budget, these in by_budget.items()),
        "",
        *uncertainty(by_budget),
    ]
    for budget, these in by_budget.items():
        lines += [f"## {budget.removeprefix('flops=')} FLOPs", "", *accuracy_table(budget, these), "", *absent(these)]
    lines += [*settings(data), "", "## What the supernet said", ""]
    lines += [*supernet_table(runs), ""]
    for budget, these in by_budget.items():
        lines += foretold(budget, these)
    lines += by_score(earlier) if earlier else []
    for budget, these in by_budget.items():
        lines += [f"## Widths at {budget.removeprefix('flops=')}", "", *width_table(these), ""]
    commands = [*data.get("before", []), data["command"]]
    lines += ["## Where the figures come from", "", f"{origin(data)}:", "", *(f"- `{c}`" for c in commands)]
    lines += [f"- the rate, commit {r['commit'][:12]}: `{r['command']}`" for r in data.get("rates", [])]
    return "\n".join(lines) + "\n"


def rate(file: Path) -> dict[str, Any]:
    """What a file of one run, of uniform scaling alone, says of its rate."""
    data = json.loads(file.read_text())
    run = data["runs"][0]
    found = {k: run["recipe"]["retrain"][k] for k in ("lr", "epochs")} | {"score": run["networks"]["uniform"]["score"]}
    return {"budget": run["budget"], "seed": run["seed"], **found, "commit": data["commit"], "command": data["command"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, nargs="?", default=RESULTS / "cifar10.json")
    parser.add_argument("--rates", type=Path, nargs="*", default=[], help="runs that the rate was chosen by")
    args = parser.parse_args()
    data = json.loads(args.file.read_text())
    if args.rates:
        data["rates"] = [rate(file) for file in args.rates]
        args.file.write_text(json.dumps(data, indent=1) + "\n")
    args.file.with_suffix(".md").write_text(page(data, json.loads(BY_SCORE.read_text())))


if __name__ == "__main__":
    main()
