"""MobileNetV2 and ResNet18 at half of their latency by onnxruntime: accuracy beside Torch-Pruning's.

    python benchmarks/latency_rivals.py table      # on the CPU that is to be fast
    python benchmarks/latency_rivals.py correct    # there, too
    python benchmarks/latency_rivals_run.py --data DIR --out DIR --seconds 390   # on a GPU machine: all of the rest
    python benchmarks/latency_rivals.py measure --plans DIR/PLAN.json ...   # on that CPU again
    python benchmarks/latency_rivals.py page --rows DIR/rows.jsonl

``table`` measures layers, and ``correct`` by how much whole networks at half of the latency are slower than the table
says, so that networks can be chosen on another machine. ``prune`` and ``search`` are steps of the run. Plans are those
of benchmarks/rivals.py. What is computed is written down in docs/results/latency-budget.md, and ``page`` puts its table
there.
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
from rows import RESULTS, put, read
from scipy import stats

from bcnet import trace
from bcnet.latency.compare import compare_latency
from bcnet.latency.onnx import as_onnx
from bcnet.latency.table import LatencyTable, measure_table
from bcnet.latency.timing import TimingConfig
from bcnet.models.load import load_model
from bcnet.search import Constraints
from bcnet.search.strategies import neighbours as strategies
from bcnet.space.network import NetworkSpace

TABLES = RESULTS / "latency-tables.json"
NETWORKS = ("mobilenetv2_cifar", "resnet18_cifar")
RIVALS = ("tp-local-l2", "tp-global-l2", "tp-isomorphic-l2", "tp-global-fpgm")
BUDGET, WANTED, VECTOR = "latency=50%", 0.5, 16
FINALISTS = 2
SAMPLED = 7
TURNS = 5
PAGE = RESULTS / "latency-budget.md"


class Fast(Cutter):
    """A cutter whose budget is latency. Vectors of the CPU take 16 channels at once, so that widths between cost as
    much as the next multiple."""

    def __init__(self, model: torch.nn.Module, space: NetworkSpace, table: LatencyTable, correction: float = 1.0):
        super().__init__(model, space)
        self.table, self.vector = table, VECTOR
        self.limit = WANTED / correction * float(table(space.max)[0])

    def padded(self, widths: Widths) -> Widths:
        return np.minimum(-(-widths // self.vector) * self.vector, self.space.max)

    def flops(self, widths: Widths) -> int:
        """Nanoseconds: what the budget is in here."""
        return int(self.table(self.padded(widths))[0])


def opened(args: argparse.Namespace, images: Images | None = None) -> Fast:
    """The cutter of the trained network; images are needed for their shape alone."""
    from rivals_base import load_base

    images = images or Images.synthetic("cpu", size=16 if args.quick else 32, count=20)
    model = load_base(args.base, args.network, args.quick)
    space = space_of(model, images)
    if not args.quick:
        made = json.loads(args.tables.read_text())
        found = LatencyTable.from_json(json.dumps(made[args.network]))
        return Fast(model, space, found, made["corrections"][args.network]["factor"])
    cutter = Fast(model, space, measure_table(space, TimingConfig(threads=1, seconds=1e-4)))
    cutter.vector = 4
    cutter.limit = (cutter.flops(space.min) + cutter.flops(space.max)) / 2  # tiny networks have no half
    return cutter


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


def correct(args: argparse.Namespace) -> None:
    """By how much networks near half of the latency are slower than the table says: uniform and its neighbours."""
    made = json.loads(args.tables.read_text())
    for name in NETWORKS:
        space = load_model(f"zoo:{name}").space(groups=1000, round_to=VECTOR)
        found, rng = LatencyTable.from_json(json.dumps(made[name])), np.random.default_rng(0)
        full = float(found(space.max)[0])
        within = Constraints(space, {**space.costs, "latency": found}, [f"latency={WANTED * full:.0f}ns"])
        first = within.fill(np.maximum(space.floor(within.uniform()), space.min)[None], rng)
        rows = np.concatenate([first, strategies.near(within, first, SAMPLED - 1, rng)])
        measured = [float(np.median(each)) for each in ratios(space, list(rows), args.turns)]
        predicted = found(rows) / full
        factor = float(np.median(np.array(measured) / predicted))
        networks = [
            {"widths": w.tolist(), "predicted": float(p), "measured": m}
            for w, p, m in zip(rows, predicted, measured, strict=True)
        ]
        made.setdefault("corrections", {})[name] = {
            "factor": factor, "networks": networks, "provenance": provenance("cpu")
        }  # fmt: skip
        print(f"{name}: {factor:.3f}, of {np.round(np.array(measured) / predicted, 3).tolist()}", flush=True)
        args.tables.write_text(json.dumps(made) + "\n")


def ratios(space: NetworkSpace, rows: Sequence[Widths], turns: int) -> list[list[float]]:
    """The latency of each row over that of the full network by onnxruntime, in alternating passes, ``turns`` times."""
    example = space.example[0][:1]
    with ExitStack() as stack:
        ready = {
            str(number): stack.enter_context(as_onnx(space.build(widths).eval(), (example,)))
            for number, widths in enumerate([space.max, *rows])
        }
        found = [compare_latency(ready, example) for _ in range(turns)]
    return [sorted(turn[str(number + 1)] / turn["0"] for turn in found) for number in range(len(rows))]


def prune(args: argparse.Namespace) -> None:
    """Torch-Pruning's networks within the budget, widened to the multiples of 16 that cost no more."""
    from pruners import prune as pruned

    cutter = opened(args)
    entries: dict[str, Any] = {}
    for method in args.methods:
        start = time.perf_counter()
        kept = pruned(cutter, method, cutter.limit, [])
        scores = cutter.importance(None if method.endswith("l2") else _fpgm())
        kept = cutter.widened(kept, cutter.padded(cutter_widths(kept)), scores)
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


def search(args: argparse.Namespace, images: Images) -> None:
    """bcnet's finalists: neighbours of what rules give, scored after some steps of healing, in multiples of 16."""
    from rivals_bcnet import Scorer, neighbours, rules

    start = time.perf_counter()
    cutter = opened(args, images)
    space = trace(cutter.model, images.test[0][0][:2].float().cpu(), groups=1000, round_to=cutter.vector, check=False)
    constraints = Constraints(space, {**space.costs, "latency": cutter.table}, [f"latency={cutter.limit:.0f}ns"])
    rng = np.random.default_rng([args.seed, 30])
    known = rules(constraints, cutter, images)
    floored = np.maximum(space.floor(np.maximum(np.stack(list(known.values())), space.min)), space.min)
    rows = constraints.fill(floored, rng)
    scorer = Scorer(args, images, cutter, 3000 + args.seed)
    first = np.concatenate([rows, strategies.near(constraints, rows, max(0, args.population - len(rows)), rng)])
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
    """Latencies of all planned networks over that of the full one, several times over."""
    found: dict[str, Any] = json.loads(args.latencies.read_text()) if args.latencies.exists() else {}
    plans = [json.loads(file.read_text()) for file in args.plans]
    for name in NETWORKS:
        entries = {m: e for plan in plans for m, e in plan.get(name, {}).get(BUDGET, {}).items()}
        if not entries:
            continue
        space = load_model(f"zoo:{name}").space(groups=1000)
        widths = {m: np.array(e.get("widths") or cutter_widths(e["kept"])) for m, e in entries.items()}
        mine = found.setdefault(name, {})
        for (method, row), each in zip(widths.items(), ratios(space, list(widths.values()), args.turns), strict=True):
            mine[method] = {"widths": row.tolist(), "predicted": entries[method]["predicted"], "latency": each}
            print(name, method, f"{entries[method]['predicted']:.3f}", [round(r, 3) for r in each], flush=True)
        args.latencies.write_text(json.dumps({**found, "provenance": provenance("cpu")}) + "\n")


def page(args: argparse.Namespace) -> None:
    """Put the table into docs/results/latency-budget.md."""
    put(args.page, {"rivals": "\n".join(lines(read(args.rows), json.loads(args.latencies.read_text())))})


def lines(rows: Sequence[dict[str, Any]], latencies: dict[str, Any]) -> list[str]:
    """The table: bcnet is the finalist of least held-out loss, seed by seed, and is compared over the seeds that both
    have."""
    made = [
        "| network | method | latency, measured | accuracy, by seed | mean | bcnet over it |",
        "| --- | --- | --- | --- | ---: | ---: |",
    ]
    for name in NETWORKS:
        own = [row for row in rows if row.get("network") == name]
        given = [row for row in rows if row.get("given") == name]
        made += [f"| {name} | as given | 1 | | {row['test']['accuracy']:.2f} | |" for row in given[-1:]]
        seeds = sorted({row["seed"] for row in own if row["method"].startswith("bcnet-")})
        finals = {s: _winner([r for r in own if r["seed"] == s and r["method"].startswith("bcnet-")]) for s in seeds}
        if finals:
            made.append(_line(name, "**bcnet: least held-out loss**", list(finals.values()), latencies, ""))
        for method in dict.fromkeys(row["method"] for row in own):
            mine = sorted((row for row in own if row["method"] == method), key=lambda row: row["seed"])
            pairs = [(finals[row["seed"]], row) for row in mine if row["seed"] in finals]
            gain = "" if method.startswith("bcnet") else _gain([[r["test"]["accuracy"] for r in two] for two in pairs])
            made.append(_line(name, method, mine, latencies, gain))
    return made


def _line(name: str, method: str, rows: list[dict[str, Any]], latencies: dict[str, Any], gain: str) -> str:
    accuracy = [row["test"]["accuracy"] for row in rows]
    measured = [f"{np.median(latencies[name][row['method']]['latency']):.3f}" for row in rows]
    shown = measured[:1] if len(set(measured)) == 1 else measured
    cells = [name, method, ", ".join(shown), ", ".join(f"{a:.2f}" for a in accuracy), f"{np.mean(accuracy):.2f}", gain]
    return f"| {' | '.join(cells)} |"


def _winner(rows: list[dict[str, Any]]) -> dict[str, Any]:
    return min(rows, key=lambda row: row["val"]["loss"])


def _gain(pairs: Sequence[Sequence[float]]) -> str:
    """The mean difference of pairs (ours, theirs), with its 95 % interval from two of them on."""
    differences = np.array([ours - theirs for ours, theirs in pairs])
    if len(differences) < 2:
        return f"{differences.mean():+.2f}, one seed" if len(differences) else ""
    low, high = stats.t.interval(0.95, len(differences) - 1, differences.mean(), stats.sem(differences))
    return f"{differences.mean():+.2f} ({low:+.2f} to {high:+.2f})"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    does = {"table": table, "correct": correct, "prune": prune, "measure": measure, "page": page}
    parser.add_argument("command", choices=does)
    parser.add_argument("--tables", type=Path, default=TABLES)
    parser.add_argument("--base", type=Path, help="folder of rivals_base.py")
    parser.add_argument("--network", choices=NETWORKS, default=NETWORKS[0])
    parser.add_argument("--methods", nargs="+", default=list(RIVALS))
    parser.add_argument("--plans", type=Path, nargs="+", default=[])
    parser.add_argument("--rows", type=Path)
    parser.add_argument("--latencies", type=Path, default=RESULTS / "latency-rivals-measured.json")
    parser.add_argument("--page", type=Path, default=PAGE)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--turns", type=int, default=TURNS)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--quick", action="store_true", help="tiny networks and synthetic images on the CPU")
    args = parser.parse_args(arguments)
    torch.manual_seed(0)
    torch.set_num_threads(1)
    does[args.command](args)


if __name__ == "__main__":
    try:
        main()
    except BcnetError as error:
        raise SystemExit(f"error: {error}") from None
