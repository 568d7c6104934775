"""Writes what came of the trial into docs/results/log-width-trial.md, below its plan.

    python benchmarks/log_width_trial_report.py

It reads docs/results/log-width-trial.json, which ``--collect TRIAL JSONL`` makes from the files of ``bench build`` and
of ``log_width_trial.py``.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from log_width_report import RESULTS, row
from log_width_trial import GROUPS, SPACES
from numpy.typing import NDArray
from scipy.stats import kendalltau

from bcnet.bench.correlation import noise_ceiling
from bcnet.models.load import load_model
from bcnet.search import LogWidthModel
from bcnet.space.network import NetworkSpace
from bcnet.utils.provenance import origin

FILE, PAGE = RESULTS / "log-width-trial.json", RESULTS / "log-width-trial.md"
MARK = "## What came of it\n"
DRAWS = 2000
Floats = NDArray[np.float64]


def collect(trial: Path, lines: Path) -> None:
    """One file of everything that was measured: networks with both seeds, supernets, networks beside them."""
    found: dict[str, Any] = {"networks": {}}
    for space in SPACES:
        rows = [json.loads(line) for line in (trial / space / "results.jsonl").read_text().splitlines()[1:]]
        last: dict[int, dict[int, float]] = {}
        for r in rows:
            last.setdefault(r["widths"], {})[r["seed"]] = r["last"]
        found["networks"][space] = [[seeds[0], seeds[1]] for _, seeds in sorted(last.items()) if len(seeds) == 2]
    measured = [json.loads(line) for line in lines.read_text().splitlines()]
    found["widths"] = {
        s: json.loads((trial.parent / "rows" / s / "networks.json").read_text())["widths"] for s in SPACES
    }
    facts = ("command", "commit", "machine", "versions", "date")
    found["provenance"] = {key: measured[-1][key] for key in facts}
    found["measured"] = [{key: value for key, value in r.items() if key not in facts} for r in measured]
    FILE.write_text(json.dumps(found, indent=1) + "\n")


def predictions(space: NetworkSpace, widths: Floats, supernets: list[dict[str, Any]]) -> dict[str, list[Floats]]:
    """What every rival says of the networks (n,), once for each supernet where it needs one."""
    count = len(widths)
    found: dict[str, list[Floats]] = {}
    for by in ("accuracy", "loss"):
        models = [LogWidthModel(np.array(r["models"][by]["gains"]), 0.0) for r in supernets]
        found[f"log-width model, by {by}"] = [model.predict(widths) for model in models]
    for by in ("accuracy", "loss"):
        found[f"supernet's score, by {by}"] = [np.array(r["scores"][by][:count]) for r in supernets]
    found["balanced (logarithms × layers)"] = [LogWidthModel.balanced(space).predict(widths)]
    found["sum of logarithms (each width has one layer that produces it)"] = [np.log2(widths).sum(axis=1)]
    found["FLOPs"], found["parameters"] = ([space.costs[name](widths)] for name in ("flops", "params"))
    return found


def interval(statistic: Callable[[NDArray[np.int64]], float], count: int) -> tuple[float, float]:
    """The middle 95 % of a statistic over resampled networks."""
    rng = np.random.default_rng(0)
    drawn = [statistic(rng.integers(0, count, count)) for _ in range(DRAWS)]
    low, high = np.nanpercentile(drawn, [2.5, 97.5])
    return float(low), float(high)


def ranking(space: NetworkSpace, data: dict[str, Any], name: str) -> tuple[list[str], dict[str, float]]:
    """The rows of a table, and Kendall of every rival."""
    runs = np.array(data["networks"][name])
    truth = runs.mean(axis=1)
    widths = np.array(data["widths"][name])[: len(truth)].astype(float)
    supernets = [r for r in data["measured"] if r["what"] == "supernet" and r["space"] == name]
    lines, kendalls = [], {}
    for rival, said in predictions(space, widths, supernets).items():

        def mean(rows: NDArray[np.int64], said: list[Floats] = said) -> float:
            return float(np.mean([kendalltau(one[rows], truth[rows]).statistic for one in said]))

        kendalls[rival] = mean(np.arange(len(truth)))
        low, high = interval(mean, len(truth))
        each = ", ".join(f"{kendalltau(one, truth).statistic:.2f}" for one in said) if len(said) > 1 else ""
        lines.append(row(rival, f"{kendalls[rival]:.2f}", f"{low:.2f} to {high:.2f}", each))
    lines.append(row("a perfect predictor", f"{noise_ceiling(runs)['kendall']:.2f}", "", ""))
    return lines, kendalls


def networks(data: dict[str, Any], name: str) -> list[str]:
    """Accuracies of the networks beside those drawn, by how they were chosen."""
    drawn = np.array(data["networks"][name]).mean(axis=1)
    groups: dict[str, list[float]] = {}
    for r in data["measured"]:
        if r["what"] == "network" and r["space"] == name:
            groups.setdefault(r["network"].partition(", supernet")[0], []).append(r["accuracy"])
    lines = [
        row(f"the {len(drawn)} drawn, mean", f"{drawn.mean():.1f}", f"{drawn.std(ddof=1) / len(drawn) ** 0.5:.1f}", ""),
        row(f"the {len(drawn)} drawn, best (chosen by its test)", f"{drawn.max():.1f}", "", ""),
    ]
    for how, values in groups.items():
        error = f"{np.std(values, ddof=1) / len(values) ** 0.5:.1f}" if len(values) > 1 else ""
        lines.append(row(how, f"{np.mean(values):.1f}", error, ", ".join(f"{v:.1f}" for v in values)))
    return lines


def page(data: dict[str, Any]) -> str:
    facts = data["provenance"]
    out = [MARK, f"{origin(facts)}; `python benchmarks/log_width_trial.py judge`. All"]
    out += ["of it is in [log-width-trial.json](log-width-trial.json).", ""]
    for name in SPACES:
        space = load_model(f"benchmarks/trial_networks.py:{name}").space(groups=GROUPS)
        lines, _ = ranking(space, data, name)
        count = len(data["networks"][name])
        out += [f"### {name}: {count} networks", ""]
        out += [row("rival", "Kendall", "95 %", "by supernet"), row("---", "---:", "---", "---"), *lines, ""]
        if any(r["what"] == "network" and r["space"] == name for r in data["measured"]):
            heads = [row("network", "accuracy %", "standard error", "each"), row("---", "---:", "---:", "---")]
            out += [*heads, *networks(data, name), ""]
    return "\n".join([*out, ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--collect", type=Path, nargs=2, metavar=("TRIAL", "JSONL"))
    args = parser.parse_args()
    if args.collect:
        collect(*args.collect)
    plan, _, _ = PAGE.read_text().partition(MARK)
    _, _, verdict = PAGE.read_text().partition("### Verdict\n")
    told = f"### Verdict\n{verdict}" if verdict else ""
    PAGE.write_text(plan + page(json.loads(FILE.read_text())) + told)


if __name__ == "__main__":
    main()
