"""Which channels should stay? Criteria compared on small networks on a CPU, all with ``reconstruct``.

    python benchmarks/keeping.py run --cifar FOLDER --out docs/results/keeping.jsonl
    python benchmarks/keeping.py page

What is computed is written down in docs/results/reconstruction.md. A stopped run goes on where it was.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import numpy as np
import reconstruction
import torch.nn.functional as F
from reconstruction import Case, Images, measure, train
from rows import append, command_line, read
from scipy import stats

from bcnet.space.importance import UnitScores, importance, taylor
from bcnet.training.recalibration import recalibrate
from bcnet.training.reconstruction import inherited
from bcnet.utils.provenance import commit

CRITERIA = ("l2", "fpgm", "bn-scale", "taylor")
NETWORKS = ("mobilenet", "resnet")
SEEDS = (1, 2, 3)
EPOCHS, RATE = 2, 0.02
SMALLER = {"IMAGES": 6_000, "HELD": 2_000, "BASE_EPOCHS": {"mobilenet": 6, "resnet": 6}}
"""What differs from reconstruction.py, so that it takes half an hour."""
CALIBRATION = 1000


def scores_by(case: Case, criterion: str) -> UnitScores:
    if criterion == "taylor":
        x, y = case.images.x[:CALIBRATION], case.images.y[:CALIBRATION]
        some = list(zip(x.split(250), y.split(250), strict=True))
        return taylor(case.space, case.net, some, F.cross_entropy)
    return importance(case.space, case.net, criterion)


def row(case: Case, widths: list[int], criterion: str) -> dict[str, Any]:
    start = time.monotonic()
    scores = scores_by(case, criterion)
    chosen = time.monotonic()
    some = case.some[: CALIBRATION // 250]
    net = inherited(case.space, case.net, widths, scores, some)
    recalibrate(net, some)
    cut = measure(net, case.images.held)
    train(net, case.images, EPOCHS, RATE, case.seed + 100, case.taught)
    return {
        **{"network": case.name, "seed": case.seed, "criterion": criterion, "widths": widths},
        **{"cut": cut, "held": measure(net, case.images.held), "test": measure(net, case.images.test)},
        **{"choosing_seconds": round(chosen - start, 2), "seconds": round(time.monotonic() - start, 1)},
    }


def run(given: argparse.Namespace) -> None:
    done = {(r["network"], r["seed"], r["criterion"]) for r in read(given.out)}
    for name, value in SMALLER.items():
        setattr(reconstruction, name, value)
    images = Images(given.cifar)
    for seed in SEEDS:
        for name in NETWORKS:
            case = Case(name, seed, images, given.cache)
            base, widths = measure(case.net, images.test), case.constraints.uniform().tolist()
            for criterion in CRITERIA:
                if (name, seed, criterion) not in done:
                    found = row(case, widths, criterion) | {"given": base, "commit": commit()}
                    append(given.out, found)
                    print(name, seed, criterion, found["cut"], found["test"], found["seconds"], flush=True)


def table(path: Path) -> str:
    """The table of docs/results/reconstruction.md, with paired differences to ``l2`` over networks and seeds. ``auto``
    takes, for each network, the criterion of the lowest held-out loss after the cut."""
    cases: dict[tuple[str, int], dict[str, Any]] = {}
    for one in read(path):
        cases.setdefault((one["network"], one["seed"]), {})[one["criterion"]] = one
    whole = [found for found in cases.values() if set(found) == set(CRITERIA)]
    for found in whole:
        found["auto"] = min(found.values(), key=lambda one: one["cut"]["loss"])
    lines = ["| criterion | loss after the cut | test loss | over `l2` | test accuracy | over `l2` |"]
    lines.append("| --- | ---: | ---: | ---: | ---: | ---: |")
    for criterion in (*CRITERIA, "auto"):
        cells = [f"`{criterion}`", f"{np.mean([found[criterion]['cut']['loss'] for found in whole]):.3f}"]
        for which, digits in (("loss", 4), ("accuracy", 2)):
            apart = [found[criterion]["test"][which] - found["l2"]["test"][which] for found in whole]
            half = stats.t.ppf(0.975, len(apart) - 1) * stats.sem(apart)
            cells.append(f"{np.mean([found[criterion]['test'][which] for found in whole]):.{digits}f}")
            cells.append(f"{np.mean(apart):+.{digits}f} ± {half:.{digits}f}" if criterion != "l2" else "")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, "", f"{len(whole)} networks."])


def main() -> None:
    command_line(__doc__, "keeping", {"run": run, "page": lambda given: print(table(given.out))})


if __name__ == "__main__":
    main()
