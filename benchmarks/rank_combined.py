"""Do several opinions together rank networks better than the best of them? First the stand-in, then the tables, once.

    python benchmarks/rank_combined.py stand-in
    python benchmarks/rank_combined.py tables --scores FOLDER --tables DIR

Opinions are a supernet's losses, the log-width model of them, and the losses of cuts of a trained network, as
rank_trained.py makes them; a combination is the sum of opinions in standard units. ``stand-in`` reads
docs/results/rank-trained-scores.json, ``tables`` the scores that rank_trained.py left in FOLDER; both add what they
find to docs/results/rank-combined.json. The plan is in docs/results/rank-trained.md.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import recipe_proxy as stand_in
from rank_trained import Floats, _standard
from scipy.stats import kendalltau

from bcnet.bench.spaces import RELEASED, get_space
from bcnet.bench.table import ChannelBench
from bcnet.search.predictors.log_width import LogWidthModel
from bcnet.utils.provenance import provenance

RESULTS = Path(__file__).parents[1] / "docs" / "results"
SUPERNETS = ("bcv2", "bcv2:taught", "ua:start:taught")
"""Of the stand-in, each with seeds 0 and 1; the tables have the last one."""


def combined(losses: Mapping[str, Floats], cuts: Mapping[str, Floats], widths: Any, layers: Any) -> dict[str, Floats]:
    """Predictions (n,) by what they are made of, from ``losses`` and ``cuts`` (n,) of the same seeds."""

    def law(scores: Floats) -> Floats:
        return LogWidthModel.fit(widths, scores, layers).predict(widths)

    found = {}
    for seed in losses:
        alone, cut = _standard(-losses[seed]), _standard(-cuts[seed])
        found[f"{seed}: loss"] = alone
        found[f"{seed}: model"] = law(alone)
        found[f"{seed}: loss + model"] = alone + _standard(law(alone))
        found[f"{seed}: loss + cuts"] = alone + cut
        found[f"{seed}: model of loss + cuts"] = law(alone + cut)
    seeds = np.sum([_standard(-loss) for loss in losses.values()], axis=0)
    return {**found, "all seeds: loss": seeds, "all seeds: model": law(seeds)}


def kendalls(predictions: Mapping[str, Floats], truth: Floats) -> dict[str, float]:
    return {name: round(float(kendalltau(found, truth).statistic), 4) for name, found in predictions.items()}


def on_stand_in() -> dict[str, Any]:
    scores = json.loads((RESULTS / "rank-trained-scores.json").read_text())["loss"]
    rows = sorted(stand_in.known(RESULTS / "channel-bench-alone.jsonl"), key=lambda row: row["number"])
    widths, truth = (np.array([row[key] for row in rows]) for key in ("widths", "accuracy"))
    layers = get_space("mobilenet").layer_counts
    cuts = {seed: np.array(scores[f"cut:{seed}"]) for seed in "01"}
    supernets = {net: {seed: np.array(scores[f"{net}:{seed}"]) for seed in "01"} for net in SUPERNETS}
    return {net: kendalls(combined(losses, cuts, widths, layers), truth) for net, losses in supernets.items()}


def on_tables(folder: Path, tables: Path) -> dict[str, Any]:
    found = {}
    for name in RELEASED:
        held = {file.stem.split("-")[1]: np.load(file) for file in sorted(folder.glob(f"{name}-*.npz"))}
        losses, cuts = ({seed: one[key].astype(float) for seed, one in held.items()} for key in ("loss", "cut_loss"))
        table = ChannelBench.load(name, tables)
        found[name] = kendalls(combined(losses, cuts, table.widths, table.space.layer_counts), table.mean)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", choices=["stand-in", "tables"])
    parser.add_argument("--scores", type=Path)
    parser.add_argument("--tables", type=Path)
    args = parser.parse_args()
    out = RESULTS / "rank-combined.json"
    result = json.loads(out.read_text()) if out.exists() else {}
    found = on_stand_in() if args.work == "stand-in" else on_tables(args.scores, args.tables)
    result[args.work] = {"kendall": found, **provenance()}
    out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
