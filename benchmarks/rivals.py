"""Slim networks by other people's methods, and by ours, from the same trained networks under the same budgets.

    python benchmarks/rivals.py plan --base DIR --data DIR --out PLAN.json
    python benchmarks/rivals.py tune --base DIR --data DIR --plans PLAN.json OURS.json --out RESULTS.jsonl

``plan`` makes the networks: for each method the channels it keeps, and how long it took. ``tune`` fine-tunes them side
by side, all with the same epochs, rate and teacher, and appends a row for each as its group ends; what the file has
already is not done again, and no group is begun that would not end within ``--seconds``.

A plan is JSON: {network: {budget: {method: {"widths": [...]} or {"kept": [[...], ...]}, and "seconds"}}}; where only
widths are given, the channels of the largest group L2 norms are kept. Methods that begin with ``bcnet-`` make up for
the dropped channels by least squares, as ``reconstruct`` does; all others are cut as they are.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
from channels import Cutter, Kept, fitted
from fastnas import search as fastnas
from inherited_table import add_tuning, append, isomorphic, published_widths, read_rows
from parts import BcnetError, Images, Widths, balanced, provenance, space_of, uniform
from paths import Class, Lessons, Maker
from pruners import METHODS as PRUNERS
from pruners import prune
from rivals_base import load_base
from side_by_side import Training

from bcnet.training.race import SETTLING, RaceConfig

BUDGETS = {"mobilenetv2_cifar": ("146M", "44M"), "vgg19_cifar": ("50%", "25%")}
PUBLISHED = {("mobilenetv2_cifar", "44M"): "mobilenetv2_cifar10", ("vgg19_cifar", "50%"): "vgg19_cifar10"}
OWN = ("uniform", "uniform8", "balanced", "published", "random-0", "random-1", "random-2")
OURS = ("bcnet-uniform", "bcnet-isomorphic", "bcnet-published")
METHODS = (*OWN, *OURS, *PRUNERS, "fastnas")
NARROWEST = 0.1
CALIBRATION = 4


def budget_flops(text: str, cutter: Cutter) -> float:
    """FLOPs of a budget such as ``44M`` or ``50%``."""
    if text.endswith("%"):
        return float(text[:-1]) / 100 * cutter.flops(cutter.space.max)
    return float(text.removesuffix("M")) * (1e6 if text.endswith("M") else 1)


def uniform8(cutter: Cutter, flops: float) -> Widths:
    """The uniform scaling in multiples of eight: rounded down, then up again where it is furthest below and fits."""
    exact = uniform(cutter.space, flops)
    widths = np.minimum(cutter.space.max, np.maximum(8, exact // 8 * 8))
    for number in np.argsort(widths / exact, kind="stable"):
        wider = widths.copy()
        wider[number] = min(wider[number] + 8, cutter.space.max[number])
        widths = wider if cutter.flops(wider) <= flops else widths
    if cutter.flops(widths) > flops:
        raise BcnetError(f"multiples of eight do not hold {flops:,.0f} FLOPs: raise the budget")
    return widths


def random_widths(cutter: Cutter, flops: float, seed: int) -> Widths:
    """Random proportions, scaled until they fill the budget but for two per cent."""
    rng = np.random.default_rng([seed, 77])
    for _ in range(100):
        shares = rng.uniform(NARROWEST, 1.0, len(cutter.space.max))
        widths = fitted(np.log(shares * cutter.space.max), cutter, flops, rng)
        if widths is not None:
            return widths
    raise BcnetError(f"no random widths fill {flops:,.0f} FLOPs: raise the budget")


class Planner:
    """Makes the networks of every method from one trained network."""

    def __init__(self, args: argparse.Namespace, name: str, images: Images):
        self.args, self.name, self.images = args, name, images
        model = load_base(args.base, name, args.quick)
        self.cutter = Cutter(model, space_of(model, images))
        source = images.train(256, 2000)
        self.training = [batch for batch, _ in zip(source(0), range(CALIBRATION), strict=False)]

    def make(self, method: str, budget: str) -> dict[str, Any] | None:
        """An entry of the plan, or None where the method has nothing for this budget."""
        start = time.perf_counter()
        flops = budget_flops(budget, self.cutter)
        if method in PRUNERS:
            entry: dict[str, Any] = {"kept": prune(self.cutter, method, flops, self.training)}
        elif method == "fastnas":
            checkpoint = self.args.out.with_suffix(f".{self.name}.fastnas")
            dtype = "fp32" if self.args.quick else "bf16"
            entry = {"kept": fastnas(self.cutter, flops, self.training, self.images.val, checkpoint, dtype)}
        else:
            widths = self._widths(method, budget, flops)
            if widths is None:
                return None
            entry = {"widths": widths.tolist()}
        entry["seconds"] = time.perf_counter() - start
        entry["flops"] = self.cutter.flops(np.array(entry.get("widths") or [len(stay) for stay in entry["kept"]]))
        return entry

    def _widths(self, method: str, budget: str, flops: float) -> Widths | None:
        method = method.removeprefix("bcnet-")
        if method.startswith("random-"):
            return random_widths(self.cutter, flops, int(method.removeprefix("random-")))
        if method == "published":
            network = PUBLISHED.get((self.name, budget))
            if self.args.published is None or network is None:
                return None
            return published_widths(self.args.published, network, {"50%": ".5"}.get(budget, budget))
        choices: dict[str, Callable[[], Widths]] = {
            "uniform": lambda: uniform(self.cutter.space, flops),
            "uniform8": lambda: uniform8(self.cutter, flops),
            "balanced": lambda: balanced(self.cutter.space, flops),
            "isomorphic": lambda: isomorphic(self.cutter, flops),
        }
        if method not in choices:
            raise BcnetError(f"unknown method {method!r}: known are {', '.join(METHODS)}")
        return choices[method]()


def plan(args: argparse.Namespace, images: Images) -> None:
    """Write the plan, after each method anew; what it has already is kept."""
    made: dict[str, Any] = json.loads(args.out.read_text()) if args.out.exists() else {}
    for name in args.networks:
        planner = Planner(args, name, images)
        for budget in args.budgets or BUDGETS[name]:
            entries = made.setdefault(name, {}).setdefault(budget, {})
            for method in args.methods or METHODS:
                if method in entries:
                    continue
                try:
                    entry = planner.make(method, budget)
                except (BcnetError, ImportError, AssertionError, RuntimeError) as error:
                    print(f"{name} {budget} {method} failed: {error}", flush=True)
                    continue
                if entry is not None:
                    entries[method] = {**entry, "machine": provenance(args.device)["machine"]}
                    print(f"{name} {budget} {method}: {entry['flops']:,} FLOPs, {entry['seconds']:.1f} s", flush=True)
                    args.out.write_text(json.dumps(made) + "\n")


def tasks(args: argparse.Namespace) -> Iterator[tuple[str, str, int, dict[str, Any]]]:
    """Network, budget, seed and entries by method, of all plans together."""
    plans = [json.loads(file.read_text()) for file in args.plans]
    for name in args.networks:
        budgets = args.budgets or sorted({b for p in plans for b in p.get(name, {})})
        for seed in args.seeds:
            for budget in budgets:
                entries: dict[str, Any] = {}
                for one in plans:
                    entries |= one.get(name, {}).get(budget, {})
                wanted = {m: e for m, e in entries.items() if not args.methods or m in args.methods}
                # Random networks differ from seed to seed.
                yield (
                    name,
                    budget,
                    seed,
                    {m: e for m, e in wanted.items() if not m.startswith("random-") or m == f"random-{seed % 3}"},
                )


class Tuner:
    """Fine-tunes the networks of one trained network."""

    def __init__(self, args: argparse.Namespace, name: str, images: Images):
        self.args, self.images = args, images
        self.device = images.test[0][0].device
        model = load_base(args.base, name, args.quick)
        self.teacher = load_base(args.base, name, args.quick).to(self.device)
        self.cutter = Cutter(model, space_of(model, images))
        self.scores = self.cutter.importance()
        self.maker = Maker(self.cutter, images)
        self.training = Training(
            args.epochs, args.lr, args.batch, taught=args.taught, temperature=args.temperature,
            weight_decay=args.weight_decay,
        )  # fmt: skip
        self._class: Class | None = None

    def kept(self, entry: dict[str, Any]) -> Kept:
        if "kept" in entry:
            return [list(map(int, stay)) for stay in entry["kept"]]
        return self.cutter.best(self.cutter.space.check(entry["widths"]), self.scores)

    def tune(self, group: dict[str, Kept], seed: int) -> dict[str, dict[str, Any]]:
        """Rows of results by method."""
        start = time.perf_counter()
        together = self._of(seed)
        states = [self.maker(kept, method.startswith("bcnet-")) for method, kept in group.items()]
        widths = [np.array([len(stay) for stay in kept]) for kept in group.values()]
        made = time.perf_counter()
        paths = together.load(list(zip(widths, states, strict=True)))
        rounds: list[dict[str, Any]] = []
        for epoch in range(self.training.epochs):
            together.epoch(paths, epoch)
            if epoch + 1 in RaceConfig().milestones(self.training.epochs):
                found = {m: path.evaluate(self.images.val) for m, path in zip(group, paths, strict=True)}
                with together.settled(paths, self.training.rate(epoch + 1), SETTLING):
                    settled = [path.evaluate(self.images.val) for path in paths]
                for row, later in zip(found.values(), settled, strict=True):
                    row["settled"] = later["loss"]
                rounds.append({"epochs": epoch + 1, **found})
        end = time.perf_counter()
        return {
            method: {
                "widths": row.tolist(),
                "flops": self.cutter.flops(row),
                "params": self.cutter.params(row),
                "val": path.evaluate(self.images.val),
                "test": path.evaluate(self.images.test),
                "making_seconds": (made - start) / len(group),
                "tuning_seconds": (end - made) / len(group),
                "rounds": [{"epochs": one["epochs"], **one[method]} for one in rounds],
            }
            for method, row, path in zip(group, widths, paths, strict=True)
        }

    def _of(self, seed: int) -> Class:
        """The lessons of a seed and the paths that learn from them."""
        if self._class is None or self._class.training.seed != seed:
            training = replace(self.training, seed=seed)
            lessons = Lessons(self.images, training, self.teacher)
            self._class = Class(self.cutter.space, training, lessons, self.args.at_once)
        return self._class


def tune(args: argparse.Namespace, images: Images, start: float) -> None:
    recipe = {key: getattr(args, key) for key in ("epochs", "lr", "batch", "taught", "temperature", "weight_decay")}
    done = [row for row in read_rows(args.out) if "method" in row]
    begun = {_key(row) for row in done}
    append(args.out, [{"provenance": provenance(args.device), "recipe": recipe}])
    longest, tuner, loaded = 0.0, None, ""
    for name, budget, seed, entries in tasks(args):
        labels = {"network": name, "budget": budget, "seed": seed, "recipe": recipe}
        todo = {m: e for m, e in entries.items() if _key({**labels, "method": m}) not in begun}
        if not todo:
            continue
        if loaded != name:
            tuner, loaded = Tuner(args, name, images), name
        different, same = _distinct({method: tuner.kept(entry) for method, entry in todo.items()})
        names = list(different)
        for first in range(0, len(names), args.at_once):
            now = time.perf_counter()
            if now - start + 1.05 * longest > args.seconds:
                print("the rest is left for another call", flush=True)
                return
            some = names[first : first + args.at_once]
            rows = tuner.tune({method: different[method] for method in some}, seed)
            for twin, method in same.items():
                if method in rows:
                    rows[twin] = {**rows[method], "same_as": method}
            append(
                args.out,
                [
                    {
                        **labels,
                        "method": m,
                        "plan_seconds": todo[m].get("seconds"),
                        **row,
                        "training": asdict(tuner.training),
                    }
                    for m, row in rows.items()
                ],
            )
            for method, row in rows.items():
                print(f"{name} {budget} seed {seed} {method}: {row['test']['accuracy']:.2f} %", flush=True)
            longest = max(longest, time.perf_counter() - now)


def _key(row: dict[str, Any]) -> str:
    return json.dumps([row[key] for key in ("network", "budget", "seed", "method", "recipe")], sort_keys=True)


def _distinct(kept: dict[str, Kept]) -> tuple[dict[str, Kept], dict[str, str]]:
    """The networks that differ, and of those that do not, which one they are the same as."""
    different: dict[str, Kept] = {}
    same: dict[str, str] = {}
    for method, channels in kept.items():
        made = method.startswith("bcnet-")
        twins = (
            other for other, theirs in different.items() if theirs == channels and other.startswith("bcnet-") == made
        )
        twin = next(twins, None)
        if twin is None:
            different[method] = channels
        else:
            same[method] = twin
    return different, same


def arguments(given: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["plan", "tune"])
    parser.add_argument("--data", type=Path)
    parser.add_argument("--base", type=Path, required=True, help="folder of rivals_base.py")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--networks", nargs="+", default=["mobilenetv2_cifar"])
    parser.add_argument("--budgets", nargs="+")
    parser.add_argument("--methods", nargs="+", help=f"of {', '.join(METHODS)} or a plan's own; all by default")
    parser.add_argument("--published", type=Path, help="JSON of published widths")
    parser.add_argument("--plans", type=Path, nargs="+", default=[])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--epochs", type=int, default=16)
    parser.add_argument("--weight-decay", type=float, default=5e-4)
    add_tuning(parser)
    return parser.parse_args(given)


def main(given: Sequence[str] | None = None) -> None:
    start = time.perf_counter()
    args = arguments(given)
    args.device = "cpu" if args.quick else args.device
    images = Images.synthetic(args.device) if args.quick else Images.cifar10(args.data, args.device)
    if args.command == "plan":
        plan(args, images)
    else:
        tune(args, images, start)


if __name__ == "__main__":
    try:
        main()
    except BcnetError as error:
        raise SystemExit(f"error: {error}") from None
