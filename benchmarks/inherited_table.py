"""A table of slim networks that inherited their weights: what could be known of each before, and how good it became.

    python benchmarks/inherited_table.py --data DIR --base DIR --out FILE.jsonl [--published FILE] [--seconds 540]

About 40 networks of MobileNetV2 within 2 % of one budget: good ones (uniform, balanced, published, within kinds of
layers), perturbations of these, and random ones between uniform and balanced. All keep their channels by L2 norms and
are fine-tuned side by side with the full network as teacher. Before that, opinions of each are taken and timed: the cut
network's losses by the statistics of the held-out batches, and the same after some steps. ``--ways`` adds the good
ones made in other ways: channels by other criteria, with ``reconstruct``, and cut in two stages. Rows are appended as
groups end; what FILE has already is not done again, and no group is begun that would not end within ``--seconds``.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from channels import Cutter, fitted
from parts import BcnetError, Images, Widths, balanced, layer_counts, provenance, space_of, uniform
from paths import Class, Lessons, Maker, State, recut
from paths import Path as Student
from rivals_base import load_base
from side_by_side import Training
from torch import Tensor
from torch.nn import functional

from bcnet.search.constraints import Constraints
from bcnet.search.criteria import allot
from bcnet.space.importance import UnitScores, importance, kinds, taylor
from bcnet.training.task import cross_entropy

SAMPLES = (1000, 5000)
HEALING_RATE = 0.02
WAYS = ("reconstruct", "taylor", "bn-scale", "l1", "fpgm", "staged")
WAYS_OF = ("uniform", "isomorphic")
SPREAD = {"near": 0.15, "random": 0.4}
"""How far widths are moved, as the standard deviation of their natural logarithms."""


def published_widths(file: Path, network: str, budget: str) -> Widths:
    """Published widths in bcnet's order; of ``out:a/b/c``, a block's output comes after its first hidden width."""
    text = json.loads(file.read_text())[network][budget]["widths"]
    if isinstance(text, list):
        return np.array(text, dtype=np.int64)
    found: list[int] = []
    for word in text.split():
        out, colon, hidden = word.partition(":")
        first, *others = hidden.split("/") if colon else [""]
        found += [*([int(first)] if colon else []), int(out), *map(int, others)]
    return np.array(found, dtype=np.int64)


def isomorphic(cutter: Cutter, flops: float) -> Widths:
    """Widths by L2 importance within kinds of layers."""
    space = cutter.space
    constraints = Constraints(space, space.costs, [f"flops={flops:.0f}"])
    return allot(constraints, importance(space, cutter.model, "l2"), "isomorphic", kinds(space))


def good_ones(cutter: Cutter, flops: float, published: Widths | None) -> dict[str, Widths]:
    """Networks that people would choose."""
    space = cutter.space
    found = {"uniform": uniform(space, flops), "balanced": balanced(space, flops)}
    found["isomorphic"] = isomorphic(cutter, flops)
    if published is not None and cutter.flops(published) <= 1.01 * flops:
        found["published"] = published
    return found


def networks(cutter: Cutter, flops: float, good: dict[str, Widths], count: int, seed: int = 0) -> dict[str, Widths]:
    """``count`` networks by name: the good ones, perturbations of them in turn, and as many random ones."""
    rng = np.random.default_rng(seed)
    found = dict(good)
    names, number = list(good), 0
    while len(found) < count and number < 20 * count:
        near = number % 2 == 0
        name = names[(number // 2) % len(names)]
        between = rng.random()
        logs = np.log(good[name]) if near else _mean(between, good["uniform"], good["balanced"])
        kind = f"near-{name}" if near else "random"
        widths = fitted(logs + rng.normal(0, SPREAD["near" if near else "random"], len(logs)), cutter, flops, rng)
        if widths is not None:
            found[f"{kind}-{number}"] = widths
        number += 1
    return found


def _mean(share: float, a: Widths, b: Widths) -> Any:
    return share * np.log(a) + (1 - share) * np.log(b)


class Opinions:
    """What can be measured of networks before they are trained: losses on the held-out images by the statistics of
    their batches, against labels (ce) and the teacher (kl)."""

    def __init__(self, images: Images, teacher: Student):
        self.images = images
        self.logits = teacher.logits(images.val)
        self.labels = torch.cat([y for _, y in images.val])

    def __call__(self, student: Student) -> dict[str, float]:
        logits = student.logits(self.images.val, by_batch=True)
        found: dict[str, float] = {}
        for count in SAMPLES:
            some, labels = logits[:count], self.labels[:count]
            found[f"ce_{count}"] = float(functional.cross_entropy(some, labels))
            found[f"kl_{count}"] = float(_divergence(some, self.logits[:count]))
            found[f"error_{count}"] = float((some.argmax(1) != labels).float().mean())
        return found


def _divergence(student: Tensor, teacher: Tensor) -> Tensor:
    pair = functional.log_softmax(student, 1), functional.log_softmax(teacher, 1)
    return functional.kl_div(*pair, reduction="batchmean", log_target=True)


def prices(cutter: Cutter, widths: Widths) -> dict[str, float]:
    """What is known of a network without its weights."""
    logs = np.log2(widths)
    return {
        "flops": float(cutter.flops(widths)),
        "params": float(cutter.params(widths)),
        "logs": float(logs.sum()),
        "balanced": float(logs @ layer_counts(cutter.space)),
    }


class Table:
    """Makes the rows of some networks at a time."""

    def __init__(self, args: argparse.Namespace, images: Images, training: Training):
        self.args, self.images, self.training = args, images, training
        model = load_base(args.base, args.network, args.quick)
        self.cutter = Cutter(model, space_of(model, images))
        self.maker = Maker(self.cutter, images)
        device = images.test[0][0].device
        lessons = Lessons(images, training, load_base(args.base, args.network, args.quick).to(device))
        self.together = Class(self.cutter.space, training, lessons, args.at_once)
        teacher = self.together.paths[0]
        teacher.load(self.cutter.space.max, model.state_dict())
        self.opinions = Opinions(images, teacher)
        self.scores: dict[str, UnitScores] = {}

    def state(self, name: str, widths: Widths) -> State:
        """The weights of a network; its name ends with + and the way it is made, where that is another."""
        way = name.partition("+")[2]
        criterion = way if way in ("taylor", "bn-scale", "l1", "fpgm") else "l2"
        if criterion not in self.scores:
            self.scores[criterion] = self._importance(criterion)
        tensors = [torch.from_numpy(row) for row in self.scores[criterion]]
        return self.maker(self.cutter.best(widths, tensors), way == "reconstruct")

    def _importance(self, criterion: str) -> UnitScores:
        space, model = self.cutter.space, self.cutter.model
        if criterion != "taylor":
            return importance(space, model, criterion)
        some = [(x[:256].cpu().float(), y[:256].cpu()) for x, y in self.images.val[:1]]
        return taylor(space, model, some, cross_entropy)

    def rows(self, group: dict[str, Widths]) -> list[dict[str, Any]]:
        """Opinions, training and results of a group."""
        states = {name: self.state(name, widths) for name, widths in group.items()}
        networks = [(widths, states[name]) for name, widths in group.items()]
        rows = [{"name": n, "widths": w.tolist(), "opinions": {}, "seconds": {}} for n, w in group.items()]
        start = time.perf_counter()
        students = self.together.load(networks)
        recorded = time.perf_counter() - start
        for steps in (0, *self.args.heals):
            start = time.perf_counter()
            self.together.load(networks)
            self.together.heal(students, steps, HEALING_RATE)
            for row, student in zip(rows, students, strict=True):
                kind = f"steps{steps}" if steps else "cut"
                row["opinions"].update({f"{kind}_{k}": v for k, v in self.opinions(student).items()})
            for row in rows:
                row["seconds"][kind] = (time.perf_counter() - start) / len(rows)
        start = time.perf_counter()
        self.train(group, networks, students)
        for row, student in zip(rows, students, strict=True):
            row["val"], row["test"] = student.evaluate(self.images.val), student.evaluate(self.images.test)
            row["seconds"] |= {"training": (time.perf_counter() - start) / len(rows), "recording": recorded / len(rows)}
            row["opinions"].update(prices(self.cutter, np.array(row["widths"])))
        return rows

    def train(self, group: dict[str, Widths], networks: list[tuple[Widths, State]], students: list[Student]) -> None:
        """All epochs; what is staged spends the first at widths half-way to the full ones."""
        staged = [name.endswith("+staged") for name in group]
        if any(staged) and not all(staged):
            raise BcnetError("staged networks are trained apart from others")
        if all(staged):
            space = self.cutter.space
            half = [np.rint(np.sqrt(widths * space.max)).astype(np.int64) for widths in group.values()]
            starts = [self.state("uniform", widths) for widths in half]
            self.together.load(list(zip(half, starts, strict=True)))
            self.together.epoch(students, 0)
            networks = [(widths, recut(s, widths)) for s, widths in zip(students, group.values(), strict=True)]
        self.together.load(networks)
        for epoch in range(int(all(staged)), self.training.epochs):
            self.together.epoch(students, epoch)


def read_rows(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def secret(row: dict[str, Any]) -> bool:
    """Widths that others published are not ours to give away."""
    return "published" in row["name"]


def append(file: Path, rows: Sequence[dict[str, Any]]) -> None:
    with file.open("a") as out:
        out.writelines(json.dumps(row) + "\n" for row in rows)
        out.flush()


def add_tuning(parser: argparse.ArgumentParser) -> None:
    """Options of fine-tuning, several networks at once, within a time."""
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--taught", type=float, default=0.9)
    parser.add_argument("--temperature", type=float, default=4.0)
    parser.add_argument("--at-once", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=1e9)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--quick", action="store_true", help="tiny networks and synthetic images on the CPU")


def arguments(given: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--base", type=Path, required=True, help="folder of rivals_base.py")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--network", default="mobilenetv2_cifar")
    parser.add_argument("--flops", type=float, default=44e6)
    parser.add_argument("--published", type=Path, help="JSON of published widths")
    parser.add_argument("--networks", type=Path, help="JSON of name -> widths")
    parser.add_argument("--ways", nargs="*", choices=WAYS, default=[], help="the good ones made in other ways")
    parser.add_argument("--count", type=int, default=40)
    parser.add_argument("--heals", type=int, nargs="*", default=[10, 30, 100])
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    add_tuning(parser)
    return parser.parse_args(given)


def main(given: Sequence[str] | None = None) -> None:
    start = time.perf_counter()
    args = arguments(given)
    device = "cpu" if args.quick else args.device
    images = Images.synthetic(device) if args.quick else Images.cifar10(args.data, device)
    training = Training(
        args.epochs, args.lr, args.batch, taught=args.taught, temperature=args.temperature, seed=args.seed,
        dtype="fp32" if args.quick else "bf16",
    )  # fmt: skip
    table = Table(args, images, training)
    if args.networks:
        listed = {name: np.array(widths) for name, widths in json.loads(args.networks.read_text()).items()}
    else:
        published = published_widths(args.published, "mobilenetv2_cifar10", "44M") if args.published else None
        listed = networks(table.cutter, args.flops, good_ones(table.cutter, args.flops, published), args.count)
    for way in args.ways:
        listed |= {f"{name}+{way}": listed[name] for name in WAYS_OF}
    done = {row["name"] for row in read_rows(args.out) if "name" in row}
    todo = [name for name in listed if name not in done]
    append(args.out, [{"provenance": provenance(device), "training": asdict(training), "network": args.network}])
    longest = 0.0
    while todo:
        begun = time.perf_counter()
        if begun - start + 1.05 * longest > args.seconds:
            print(f"{len(todo)} networks are left for another call", flush=True)
            break
        alike = [name for name in todo if name.endswith("+staged") == todo[0].endswith("+staged")]
        names = alike[: args.at_once]
        todo = [name for name in todo if name not in names]
        rows = table.rows({name: listed[name] for name in names})
        for row in rows:
            print(row["name"], json.dumps(row["test"]), flush=True)
        append(args.out, [{k: v for k, v in row.items() if k != "widths" or not secret(row)} for row in rows])
        longest = max(longest, time.perf_counter() - begun)


if __name__ == "__main__":
    try:
        main()
    except BcnetError as error:
        raise SystemExit(f"error: {error}") from None
