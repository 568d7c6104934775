"""MobileNetV2 and ResNet18 at half of their latency by onnxruntime: accuracy beside Torch-Pruning's.

    python benchmarks/latency_rivals.py table                                           # on the CPU that is to be fast
    python benchmarks/latency_rivals.py prune  --base DIR --data DIR --network NAME --out PLAN.json
    python benchmarks/latency_rivals.py search --base DIR --data DIR --network NAME --out PLAN.json
    python benchmarks/rivals.py tune --base DIR --data DIR --networks NAME --plans PLAN.json ... --out ROWS.jsonl
    python benchmarks/latency_rivals.py measure --plans PLAN.json ... --out LATENCIES.json   # on that CPU again
    python benchmarks/latency_rivals.py page --rows ROWS.jsonl --latencies LATENCIES.json

``table`` measures layers once, so that ``prune`` and ``search`` can run on any machine. Plans are those of
benchmarks/rivals.py. What is computed is written down in docs/results/latency-budget.md.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch
from channels import Cutter
from parts import BcnetError, Images, Widths, provenance, space_of
from scipy import stats

from bcnet import trace
from bcnet.latency.compare import compare_latency
from bcnet.latency.onnx import as_onnx
from bcnet.latency.table import LatencyTable, measure_table
from bcnet.latency.timing import TimingConfig
from bcnet.models.load import load_model
from bcnet.search import Constraints
from bcnet.space.network import NetworkSpace

RESULTS = Path(__file__).parents[1] / "docs" / "results"
TABLES = RESULTS / "latency-tables.json"
NETWORKS = ("mobilenetv2_cifar", "resnet18_cifar")
RIVALS = ("tp-local-l2", "tp-global-l2", "tp-isomorphic-l2", "tp-global-fpgm")
BUDGET, WANTED, VECTOR = "latency=50%", 0.5, 16
FINALISTS = 2
TURNS = 5


class Fast(Cutter):
    """A cutter whose budget is latency. Vectors of the CPU take 16 channels at once, so that widths between cost as
    much as the next multiple."""

    def __init__(self, model: torch.nn.Module, space: NetworkSpace, table: LatencyTable, vector: int = VECTOR):
        super().__init__(model, space)
        self.table, self.vector = table, vector
        self.limit = WANTED * float(table(space.max)[0])

    def padded(self, widths: Widths) -> Widths:
        return np.minimum(-(-widths // self.vector) * self.vector, self.space.max)

    def flops(self, widths: Widths) -> int:
        """Nanoseconds: what the budget is in here."""
        return int(self.table(self.padded(widths))[0])


def opened(args: argparse.Namespace) -> tuple[Images, Fast]:
    """The images and the cutter of the trained network."""
    from rivals_base import load_base

    images = Images.synthetic(args.device) if args.quick else Images.cifar10(args.data, args.device)
    model = load_base(args.base, args.network, args.quick)
    space = space_of(model, images)
    if not args.quick:
        found = LatencyTable.from_json(json.dumps(json.loads(args.tables.read_text())[args.network]))
        return images, Fast(model, space, found)
    cutter = Fast(model, space, measure_table(space, TimingConfig(threads=1, seconds=1e-4)), vector=4)
    cutter.limit = (cutter.flops(space.min) + cutter.flops(space.max)) / 2  # tiny networks have no half
    return images, cutter


def table(args: argparse.Namespace) -> None:
    """Measure the layers of both networks here; what the file has already is kept."""
    made = json.loads(args.tables.read_text()) if args.tables.exists() else {}
    for name in NETWORKS:
        if name in made:
            continue
        space = load_model(f"zoo:{name}").space(groups=8, round_to=VECTOR, least=4)
        found = measure_table(space, TimingConfig(backend="onnxruntime", threads=1))
        made[name] = json.loads(found.to_json())
        print(f"{name}: {float(found(space.max)[0]) / 1e6:.2f} ms, mean error {found.error:.1%}", flush=True)
        args.tables.write_text(json.dumps({**made, "provenance": provenance("cpu")}) + "\n")


def prune(args: argparse.Namespace) -> None:
    """Torch-Pruning's networks within the budget, widened to the multiples of 16 that cost no more."""
    from pruners import prune as pruned

    _, cutter = opened(args)
    entries: dict[str, Any] = {}
    for method in args.methods:
        start = time.perf_counter()
        kept = pruned(cutter, method, cutter.limit, [])
        scores = cutter.importance(None if method.endswith("l2") else _fpgm())
        for stay, width, score in zip(kept, cutter.padded(cutter_widths(kept)).tolist(), scores, strict=True):
            others = [c for c in torch.argsort(score, descending=True, stable=True).tolist() if c not in set(stay)]
            stay.extend(others[: width - len(stay)])
            stay.sort()
        entries[method] = {"kept": kept, **facts(cutter, cutter_widths(kept)), "seconds": time.perf_counter() - start}
        print(method, cutter_widths(kept).tolist(), f"{entries[method]['predicted']:.3f}", flush=True)
        write(args, entries, {})


def cutter_widths(kept: Sequence[Sequence[int]]) -> Widths:
    return np.array([len(stay) for stay in kept], dtype=np.int64)


def _fpgm() -> Any:
    from pruners import SCORERS

    return SCORERS["fpgm"]()


def facts(cutter: Fast, widths: Widths) -> dict[str, Any]:
    """What is known of widths before they are measured."""
    predicted = cutter.flops(widths) / float(cutter.table(cutter.space.max)[0])
    return {"predicted": predicted, "flops": int(cutter.space.costs["flops"](widths)[0])}


def search(args: argparse.Namespace) -> None:
    """bcnet's finalists: neighbours of what rules give, scored after some steps of healing, in multiples of 16."""
    from rivals_bcnet import Scorer, neighbours, rules, strategies

    start = time.perf_counter()
    images, cutter = opened(args)
    space = trace(cutter.model, images.test[0][0][:2].float().cpu(), groups=1000, round_to=cutter.vector, check=False)
    constraints = Constraints(space, {**space.costs, "latency": cutter.table}, [f"latency={cutter.limit:.0f}ns"])
    rng = np.random.default_rng([args.seed, 30])
    known = rules(constraints, cutter, images)
    floored = np.maximum(space.floor(np.maximum(np.stack(list(known.values())), space.min)), space.min)
    rows = constraints.fill(floored, rng)
    scorer = Scorer(args, images, cutter, 3000 + args.seed)
    first = np.concatenate([rows, strategies.near(constraints, rows, args.population - len(rows), rng)])
    trials = neighbours(args, constraints, np.unique(first, axis=0), scorer)
    top = np.array([widths for widths, _ in trials[: 2 * FINALISTS]])
    scorer.learn_from(3001 + args.seed)
    again = scorer.score_many(top) + np.array([score for _, score in trials[: len(top)]])
    chosen = {f"bcnet-near-{i + 1}": top[number] for i, number in enumerate(np.argsort(-again)[:FINALISTS])}
    chosen["bcnet-uniform"] = rows[list(known).index("uniform")]
    seconds = time.perf_counter() - start
    entries = {n: {"widths": w.tolist(), **facts(cutter, w), "seconds": seconds} for n, w in chosen.items()}
    print(
        {n: round(e["predicted"], 3) for n, e in entries.items()}, f"{seconds:.0f} s, {len(trials)} scored", flush=True
    )
    write(args, entries, {"trials": [{"widths": w.tolist(), "loss": -score} for w, score in trials]})


def write(args: argparse.Namespace, entries: dict[str, Any], more: dict[str, Any]) -> None:
    about = {"provenance": provenance(args.device), **more}
    args.out.write_text(json.dumps({args.network: {BUDGET: entries}, "facts": about}) + "\n")


def measure(args: argparse.Namespace) -> None:
    """Latencies of all planned networks over that of the full one, in alternating passes, several times over."""
    found: dict[str, Any] = json.loads(args.out.read_text()) if args.out.exists() else {}
    plans = [json.loads(file.read_text()) for file in args.plans]
    for name in NETWORKS:
        entries = {m: e for plan in plans for m, e in plan.get(name, {}).get(BUDGET, {}).items()}
        space = load_model(f"zoo:{name}").space(groups=1000)
        widths = {m: np.array(e.get("widths") or cutter_widths(e["kept"])) for m, e in entries.items()}
        example = torch.zeros(1, 3, 32, 32)
        with ExitStack() as stack:
            ready = {
                m: stack.enter_context(as_onnx(space.build(w).eval(), (example,)))
                for m, w in {"full": space.max, **widths}.items()
            }
            turns = [compare_latency(ready, example) for _ in range(args.turns)]
        mine = found.setdefault(name, {})
        for method, row in widths.items():
            ratios = [turn[method] / turn["full"] for turn in turns]
            known = mine.setdefault(method, {"widths": row.tolist(), "predicted": entries[method]["predicted"]})
            known["latency"] = sorted([*known.get("latency", []), *ratios])
            print(name, method, f"{known['predicted']:.3f}", [round(r, 3) for r in known["latency"]], flush=True)
        args.out.write_text(json.dumps({**found, "provenance": provenance("cpu")}) + "\n")


def page(args: argparse.Namespace) -> None:
    """The table of docs/results/latency-budget.md; bcnet is the finalist of least held-out loss, seed by seed."""
    rows = [json.loads(line) for line in args.rows.read_text().splitlines()]
    latencies = json.loads(args.latencies.read_text())
    print("| network | method | latency, measured | accuracy, by seed | mean | bcnet over it |")
    print("| --- | --- | ---: | --- | ---: | ---: |")
    for name in NETWORKS:
        own = [row for row in rows if row.get("network") == name]
        seeds = sorted({row["seed"] for row in own})
        finals = [_winner([r for r in own if r["seed"] == s and r["method"].startswith("bcnet-")]) for s in seeds]
        ours = [row["test"]["accuracy"] for row in finals]
        shown = ", ".join(f"{_latency(latencies, row):.3f}" for row in finals)
        print(f"| {name} | bcnet | {shown} | {_each(ours)} | {np.mean(ours):.2f} | |")
        for method in dict.fromkeys(row["method"] for row in own):
            mine = sorted((row for row in own if row["method"] == method), key=lambda row: row["seed"])
            theirs = [row["test"]["accuracy"] for row in mine]
            gain = "" if method.startswith("bcnet") or len(theirs) < len(seeds) else _gain(ours, theirs)
            cells = [name, method, f"{_latency(latencies, mine[0]):.3f}", _each(theirs), f"{np.mean(theirs):.2f}", gain]
            print(f"| {' | '.join(cells)} |")


def _winner(rows: list[dict[str, Any]]) -> dict[str, Any]:
    return min(rows, key=lambda row: row["val"]["loss"])


def _latency(latencies: dict[str, Any], row: dict[str, Any]) -> float:
    return float(np.median(latencies[row["network"]][row["method"]]["latency"]))


def _each(values: Sequence[float]) -> str:
    return ", ".join(f"{value:.2f}" for value in values)


def _gain(ours: Sequence[float], theirs: Sequence[float]) -> str:
    pairs = np.subtract(ours, theirs)
    low, high = stats.t.interval(0.95, len(pairs) - 1, pairs.mean(), stats.sem(pairs))
    return f"{pairs.mean():+.2f} ({low:+.2f} to {high:+.2f})"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    does = {"table": table, "prune": prune, "search": search, "measure": measure, "page": page}
    parser.add_argument("command", choices=does)
    parser.add_argument("--tables", type=Path, default=TABLES)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--base", type=Path, help="folder of rivals_base.py")
    parser.add_argument("--network", choices=NETWORKS, default=NETWORKS[0])
    parser.add_argument("--methods", nargs="+", default=list(RIVALS))
    parser.add_argument("--plans", type=Path, nargs="+", default=[])
    parser.add_argument("--rows", type=Path)
    parser.add_argument("--latencies", type=Path)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--turns", type=int, default=TURNS)
    parser.add_argument("--seconds", type=float, default=20.0, help="for the search")
    parser.add_argument("--population", type=int, default=24)
    parser.add_argument("--evaluations", type=int, default=60)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--lr", type=float, default=0.02)
    parser.add_argument("--at-once", type=int, default=3)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="tiny networks and synthetic images on the CPU")
    args = parser.parse_args(arguments)
    args.by = "neighbours"
    torch.manual_seed(0)
    if args.command != "search":
        torch.set_num_threads(1)
    does[args.command](args)


if __name__ == "__main__":
    try:
        main()
    except BcnetError as error:
        raise SystemExit(f"error: {error}") from None
