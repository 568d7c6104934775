"""A table of slim networks that inherited their weights: what could be known of each before, and how good it became.

    python benchmarks/inherited_table.py --data DIR --base DIR --out FILE.jsonl [--published FILE] [--seconds 540]

About 40 networks of MobileNetV2 within 2 % of one budget: good ones (uniform, balanced, published, Torch-Pruning's),
perturbations of these, and random ones between uniform and balanced. All keep their channels by group L2 and are
fine-tuned side by side with the full network as teacher. Before that, opinions of each are taken and timed: the cut
network's losses once batch norm is recalibrated, and the same after some steps. Rows are appended as groups end; what
FILE has already is not done again, and no group is begun that would not end within ``--seconds``.
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
from channels import Cutter, fitted, recalibrate
from parts import Batch, BcnetError, Images, Widths, balanced, layer_counts, provenance, space_of, uniform
from pruners import prune
from rivals_base import load_base
from side_by_side import SideBySide, Training, autocast, evaluate
from torch import Tensor, nn
from torch.nn import functional

CALIBRATION = 8
"""Training batches for the statistics of batch norm."""
SAMPLES = (1000, 5000)
PRUNERS = ("tp-global-l2", "tp-isomorphic-l2", "tp-global-taylor")
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


def good_ones(cutter: Cutter, flops: float, published: Widths | None, batches: list[Batch]) -> dict[str, Widths]:
    """Networks that people would choose."""
    space = cutter.space
    found = {"uniform": uniform(space, flops), "balanced": balanced(space, flops)}
    if published is not None and cutter.flops(published) <= 1.01 * flops:
        found["published"] = published
    for method in PRUNERS:
        found[method] = np.array([len(stay) for stay in prune(cutter, method, flops, batches)], dtype=np.int64)
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
    """What can be measured of networks before they are trained; ``images`` hold the held-out images."""

    def __init__(self, images: Images, teacher: nn.Module, dtype: str):
        self.images, self.dtype = images, dtype
        source = images.train(256, 1000)
        self.calibration = [batch for batch, _ in zip(source(0), range(CALIBRATION), strict=False)]
        self.logits = torch.cat([self._logits(teacher.eval(), x) for x, _ in images.val])
        self.labels = torch.cat([y for _, y in images.val])

    def __call__(self, model: nn.Module) -> dict[str, float]:
        """Losses on held-out images of a network whose batch norm is recalibrated: labels (ce) and teacher (kl)."""
        kept = {name: tensor.clone() for name, tensor in model.state_dict().items() if "running" in name}
        recalibrate(model, self.calibration, self.dtype)
        model.eval()
        logits = torch.cat([self._logits(model, x) for x, _ in self.images.val])
        model.train()
        model.load_state_dict(kept, strict=False)
        found: dict[str, float] = {}
        for count in SAMPLES:
            some, labels = logits[:count], self.labels[:count]
            found[f"ce_{count}"] = float(functional.cross_entropy(some, labels))
            found[f"kl_{count}"] = float(_divergence(some, self.logits[:count]))
            found[f"error_{count}"] = float((some.argmax(1) != labels).float().mean())
        return found

    @torch.no_grad()
    def _logits(self, model: nn.Module, x: Tensor) -> Tensor:
        with autocast(x.device, self.dtype):
            return model(x).float()


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


def group_rows(
    together: SideBySide, names: Sequence[str], opinions: Opinions, heals: Sequence[int]
) -> dict[str, dict[str, Any]]:
    """Opinions, training and results of a group of students."""
    students = together.students
    rows: dict[str, dict[str, Any]] = {name: {"opinions": {}, "seconds": {}} for name in names}

    def ask(kind: str, start: float) -> None:
        found = [opinions(student.model) for student in students]
        together.wait()
        for name, values in zip(names, found, strict=True):
            rows[name]["opinions"].update({f"{kind}_{key}": value for key, value in values.items()})
            rows[name]["seconds"][kind] = (time.perf_counter() - start) / len(names)

    ask("cut", time.perf_counter())
    for steps in heals:
        start = time.perf_counter()
        with together.unchanged():
            together.heal(steps)
            ask(f"steps{steps}", start)
    start = time.perf_counter()
    together.run()
    together.wait()
    for name, student in zip(names, students, strict=True):
        rows[name]["seconds"]["training"] = (time.perf_counter() - start) / len(names)
        for part in ("val", "test"):
            rows[name][part] = evaluate(student.model, getattr(together.images, part), together.training.dtype)
    return rows


def read_rows(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def append(file: Path, rows: Sequence[dict[str, Any]]) -> None:
    with file.open("a") as out:
        out.writelines(json.dumps(row) + "\n" for row in rows)
        out.flush()


def arguments(given: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--base", type=Path, required=True, help="folder of rivals_base.py")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--network", default="mobilenetv2_cifar")
    parser.add_argument("--flops", type=float, default=44e6)
    parser.add_argument("--published", type=Path, help="JSON of published widths")
    parser.add_argument("--networks", type=Path, help="JSON of name -> widths, made by --plan on another machine")
    parser.add_argument("--plan", action="store_true", help="only write the networks to --out, as JSON")
    parser.add_argument("--count", type=int, default=40)
    parser.add_argument("--heals", type=int, nargs="*", default=[10, 30, 100])
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--taught", type=float, default=0.9)
    parser.add_argument("--temperature", type=float, default=4.0)
    parser.add_argument("--dtype", default="bf16")
    parser.add_argument("--fast-norm", action="store_true", help="batch norm and activation as one kernel")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--at-once", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=1e9)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--quick", action="store_true", help="tiny networks and synthetic images on the CPU")
    return parser.parse_args(given)


def main(given: Sequence[str] | None = None) -> None:
    start = time.perf_counter()
    args = arguments(given)
    device = "cpu" if args.quick else args.device
    images = Images.synthetic(device) if args.quick else Images.cifar10(args.data, device)
    teacher = load_base(args.base, args.network, args.quick)
    cutter = Cutter(teacher, space_of(teacher, images))
    if args.networks:
        listed = {name: np.array(widths) for name, widths in json.loads(args.networks.read_text()).items()}
    else:
        published = published_widths(args.published, "mobilenetv2_cifar10", "44M") if args.published else None
        few = [(x[:256].cpu(), y[:256].cpu()) for x, y in images.val]
        listed = networks(cutter, args.flops, good_ones(cutter, args.flops, published, few), args.count)
    if args.plan:
        args.out.write_text(json.dumps({name: widths.tolist() for name, widths in listed.items()}) + "\n")
        return
    training = Training(
        args.epochs, args.lr, args.batch, taught=args.taught, temperature=args.temperature, seed=args.seed,
        dtype=args.dtype, fast_norm=args.fast_norm,
    )  # fmt: skip
    done = {row["name"] for row in read_rows(args.out) if "name" in row}
    todo = [name for name in listed if name not in done]
    append(args.out, [{"provenance": provenance(device), "training": asdict(training), "network": args.network}])
    teacher.to(device, memory_format=torch.channels_last)
    opinions = Opinions(images, teacher, args.dtype)
    scores = cutter.importance()
    longest = 0.0
    for first in range(0, len(todo), args.at_once):
        begun = time.perf_counter()
        if begun - start + 1.05 * longest > args.seconds:
            print(f"{len(todo) - first} networks are left for another call", flush=True)
            break
        names = todo[first : first + args.at_once]
        models = [cutter.cut(cutter.best(listed[name], scores)) for name in names]
        together = SideBySide(models, images, training, teacher)
        recorded = (time.perf_counter() - begun) / len(names)
        rows = group_rows(together, names, opinions, args.heals)
        together.close()
        for name, row in rows.items():
            row["opinions"].update(prices(cutter, listed[name]))
            row["seconds"]["recording"] = recorded
            print(name, json.dumps(row["test"]), flush=True)
        append(args.out, [{"name": n, "widths": listed[n].tolist(), **row} for n, row in rows.items()])
        longest = max(longest, time.perf_counter() - begun)


if __name__ == "__main__":
    try:
        main()
    except BcnetError as error:
        raise SystemExit(f"error: {error}") from None
