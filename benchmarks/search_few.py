"""Evolution with few evaluations on the released tables, for comparing versions of it.

    PYTHONPATH=VERSION python benchmarks/search_few.py --tables FOLDER --name after

Adds the mean regret (accuracy points, both tables, 25, 50 and 75 % of the FLOPs, 5 seeds) after 20 to 400 evaluations
under NAME to docs/results/search-few.json.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
from rival_searches import SHARES, SPACES
from search import Mean

from bcnet.bench import ChannelBench
from bcnet.search import SearchConfig, search
from bcnet.utils.provenance import provenance

FILE = Path(__file__).parents[1] / "docs" / "results" / "search-few.json"
EVALUATIONS = {20: 8, 60: 20, 120: 40, 400: 40}
"""With the size of the population."""
SEEDS = 5


def regrets(folder: Path, evaluations: int) -> np.ndarray:
    """(cases, seeds)."""
    found = []
    for space in SPACES:
        table = ChannelBench.load(space, folder)
        for share in SHARES:
            best = float(table.best({"flops": share / 100 * int(table.costs["flops"].max())}).mean)
            row = []
            for seed in range(SEEDS):
                config = SearchConfig(evaluations=evaluations, population=EVALUATIONS[evaluations], seed=seed)
                chosen = search(table.space, Mean(table), [f"flops={share}%"], config=config).best
                assert chosen is not None
                row.append(best - float(table.query(np.array(chosen.widths)).mean))
            found.append(row)
    return np.array(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tables", type=Path, required=True)
    parser.add_argument("--name", required=True)
    args = parser.parse_args()
    known = json.loads(FILE.read_text()) if FILE.exists() else {}
    rows = {}
    for n in EVALUATIONS:
        found = regrets(args.tables, n)
        rows[str(n)] = {"mean": found.mean(), "by_case": found.mean(1).tolist(), "by_seed": found.mean(0).tolist()}
    known[args.name] = {**rows, **provenance()}
    FILE.write_text(json.dumps(known, indent=1) + "\n")


if __name__ == "__main__":
    main()
