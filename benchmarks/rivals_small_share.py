"""What a bound on healing is worth (`healing.share`), on the networks of rivals_small.py trained with other seeds.

    python benchmarks/rivals_small_share.py run --cifar FOLDER [--seeds 31 32 33] [--minutes 54]
    python benchmarks/rivals_small_share.py page

Rows are made in the order of ORDER, each for all given networks, and none is begun when the minutes are over. A stopped
run goes on where it was, if it is given time.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from fine_tuning_rate import figures
from intervals import interval
from rivals_small import BUDGET, PAGE, Trained
from rows import Row, append, command_line, put, read

import bcnet
from bcnet.utils.provenance import provenance

SHORT, LONG = 6, 24
BOUND, UNBOUND, UNIFORM = "bcnet, share 1", "bcnet, share 0", "uniform, "
SHARES = {BOUND: 1.0, UNBOUND: 0.0}
RIVAL = "tp-local-l2"
EQUAL = {f"{RIVAL}, all seconds of {ours}": ours for ours in SHARES}
ORDER = (
    (SHORT, (BOUND, UNBOUND, RIVAL, f"{RIVAL}, all seconds of {BOUND}")),
    (LONG, (BOUND,)),
    (LONG, (f"{RIVAL}, all seconds of {BOUND}",)),
    (LONG, (RIVAL,)),
    (SHORT, (f"{RIVAL}, all seconds of {UNBOUND}",)),
)
NAMES = {
    BOUND: "**bcnet as it is** (`healing.share: 1`)",
    UNBOUND: "bcnet, search unbounded (`healing.share: 0`)",
    UNIFORM + BOUND: "uniform, `reconstruct`, by the same call",
    UNIFORM + UNBOUND: "uniform, `reconstruct`, by the call with the unbounded search",
    RIVAL: "Torch-Pruning local L2",
    f"{RIVAL}, all seconds of {BOUND}": "Torch-Pruning local L2, for all of bcnet's seconds",
    f"{RIVAL}, all seconds of {UNBOUND}": "Torch-Pruning local L2, for all seconds with the unbounded search",
}


def by_bcnet(trained: Trained, epochs: int, share: float) -> dict[str, Row]:
    """What a user gets from one call: the network that ships, and the uniform one that it trains beside it."""
    train, val, test = trained.loaders
    recipe = {"retrain": {"epochs": epochs}, "healing": {"share": share}, "compare": ["uniform"], "threads": 1}
    example, budget = torch.randn(1, 3, 16, 16), f"flops={100 * BUDGET:g}%"
    begun = time.process_time()
    with tempfile.TemporaryDirectory() as folder:
        asked: dict[str, Any] = {"test": test, "recipe": recipe, "seed": trained.seed, "progress": False}
        run = bcnet.slim(trained.model, example, train, val, budget=budget, out=Path(folder) / "run", **asked).run
        whole = round(time.process_time() - begun)
        search = run.read("search")
        about = {"ships": run.chosen, "rate": run.read("rate")["lr"], "scored": search["evaluations"]}
        about |= {"winner": run.read("race")["winner"], "notes": search["notes"]}
        stages = {name: round(run.read(name)["seconds"]) for name in ("search", "rate", "race")}
        rows = {}
        for method, name in {"found": run.chosen, "uniform": "uniform"}.items():
            kept = run.read(f"retrain/{name}")
            accuracy, loss = round(100 * kept["score"], 2), round(kept["loss"], 4)
            rows[method] = {"widths": kept["widths"], "test": {"accuracy": accuracy, "loss": loss}}
    rows["found"] |= {**about, "stages": stages, "seconds": whole}
    return rows


def by_rival(trained: Trained, epochs: int) -> Row:
    row = trained.by_rival(RIVAL, epochs)
    return {**row, "parts": row["seconds"], "seconds": sum(row["seconds"].values())}


def run(given: argparse.Namespace) -> None:
    until = time.monotonic() + 60 * given.minutes
    networks = {seed: Trained(given.cifar, seed) for seed in given.seeds}
    given_as = {seed: figures(one.model, one.data.test) for seed, one in networks.items()}
    made = provenance()
    for epochs, methods in ORDER:
        for seed, trained in networks.items():
            for method in methods:
                rows = read(given.out)
                if any(_is(row, seed, method, epochs) for row in rows):
                    continue
                if time.monotonic() > until:
                    return
                own = {"seed": seed, "epochs asked": epochs}
                if method in SHARES:
                    call = by_bcnet(trained, epochs, SHARES[method])
                    found = {method: call["found"], UNIFORM + method: call["uniform"]}
                else:
                    found = {method: by_rival(trained, _epochs(rows, seed, method, epochs))}
                for name, row in found.items():
                    append(given.out, {"method": name, **own, **row, "given": given_as[seed], "made": made})
                    print(epochs, seed, name, row["test"], row.get("seconds"), flush=True)


def _is(row: Row, seed: int, method: str, epochs: int) -> bool:
    return (row["seed"], row["method"], row["epochs asked"]) == (seed, method, epochs)


def _epochs(rows: list[Row], seed: int, method: str, epochs: int) -> int:
    """The epochs that a rival has: those asked for, or as many as fit into all processor seconds of a call of bcnet."""
    if method == RIVAL:
        return epochs
    ours = next(row for row in rows if _is(row, seed, EQUAL[method], epochs))
    alone = next(row for row in rows if _is(row, seed, RIVAL, SHORT))["parts"]
    return max(epochs, int(SHORT * (ours["seconds"] - alone["choosing"]) / alone["tuning"]))


def table(rows: list[Row], epochs: int) -> str:
    """The networks of one length of fine-tuning, best first."""
    by_method: dict[str, dict[int, Row]] = {}
    for row in rows:
        if row["epochs asked"] == epochs:
            by_method.setdefault(row["method"], {})[row["seed"]] = row
    accuracy = {name: {s: row["test"]["accuracy"] for s, row in found.items()} for name, found in by_method.items()}
    lines = [
        "| network | epochs | test accuracy | seed by seed | bcnet over it | processor seconds | scored |",
        "| --- | ---: | ---: | --- | ---: | ---: | ---: |",
    ]
    for name in sorted(accuracy, key=lambda name: -float(np.mean(list(accuracy[name].values())))):
        mine, found = accuracy[name], [by_method[name][seed] for seed in sorted(by_method[name])]
        over = "" if name == BOUND else interval([accuracy[BOUND][s] - mine[s] for s in sorted(mine)], "+")
        cells = [
            NAMES[name],
            _each([row.get("epochs", epochs) for row in found]),
            f"{np.mean(list(mine.values())):.2f}",
            ", ".join(f"{mine[seed]:.2f}" for seed in sorted(mine)),
            over,
            _each([row["seconds"] for row in found if "seconds" in row]),
            _each([row["scored"] for row in found if "scored" in row]),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    given = {row["seed"]: row["given"]["accuracy"] for row in rows}
    return "\n".join([*lines, "", f"The given networks have {', '.join(f'{given[s]:.2f}' for s in sorted(given))} %."])


def _each(values: list[Any]) -> str:
    """One value where all are the same, else one for each given network."""
    return ", ".join(map(str, values if len(set(values)) > 1 else values[:1]))


def page(given: argparse.Namespace) -> None:
    rows = read(given.out)
    put(PAGE, {f"share-{epochs}": table(rows, epochs) for epochs in (SHORT, LONG)})


def main() -> None:
    options: dict[str, dict[str, Any]] = {
        "--seeds": {"type": int, "nargs": "*", "default": [31, 32, 33]},
        "--minutes": {"type": float, "default": 54.0, "help": "after which no row is begun"},
    }
    command_line(__doc__, "rivals-small-share", {"run": run, "page": page}, options)


if __name__ == "__main__":
    main()
