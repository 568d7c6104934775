"""Twice as fast by onnxruntime on a CPU, measured: small trained networks by bcnet and by Torch-Pruning, and what
MobileNetV2 and ResNet18 take at the widths that hold the budget.

    python benchmarks/latency_budget.py run --cifar FOLDER
    python benchmarks/latency_budget.py large
    python benchmarks/latency_budget.py page

What is computed is written down in docs/results/latency-budget.md, above the tables that ``page`` prints. Trained
networks are those of benchmarks/reconstruction.py; run folders lie in build/latency-budget, and a stopped run goes on
where it was.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import reconstruction
import torch
from channels import Cutter
from pruners import prune
from rows import RESULTS, append, read
from scipy import stats
from torch import Tensor, nn

import bcnet
from bcnet.data.source import Data, from_loaders
from bcnet.errors import BcnetError
from bcnet.latency.compare import compare_latency
from bcnet.latency.onnx import as_onnx
from bcnet.latency.table import measure_table
from bcnet.latency.timing import TimingConfig
from bcnet.models.load import load_model
from bcnet.run.stages.budgets import ROUNDS, SLACK
from bcnet.search import LogWidthModel
from bcnet.search.constraints import Constraints
from bcnet.training.optim import Optimisation
from bcnet.training.retraining import Distillation, Retraining, evaluate, retrain
from bcnet.utils.provenance import provenance

BACKEND, WANTED = "onnxruntime", 0.5
CASES = [
    ("resnet", 1, 1),
    ("mobilenet", 1, 1),
    ("resnet", 2, 2),
    ("mobilenet", 1, 2),
    ("resnet", 3, 3),
    ("mobilenet", 1, 3),
]
"""Network, the seed of its base, and the seed of slimming and fine-tuning."""
LARGE = ("mobilenetv2_imagenet", "resnet18_imagenet")
TRAINED, HELD, BATCH = 10_000, 2_000, 125
EPOCHS, RATE, TAUGHT = 3, 0.05, Distillation(alpha=0.9, temperature=4.0)
RIVALS = ("tp-isomorphic-l2", "tp-local-l2")
HALVINGS, TURNS = 7, 5
RECIPE: dict[str, Any] = {
    "groups": 8,
    "latency": {"backend": BACKEND, "threads": 1},
    "healing": {"steps": 10},
    "search": {"evaluations": 12, "population": 8},
    "race": {"finalists": 4, "rounds": 1, "epochs": 1},
    "retrain": {"epochs": EPOCHS, "lr": RATE},
    "compare": ["full"],
    "threads": 1,
}


class Batches:
    """Images (n, 3, H, W) and labels in batches; ``augment`` shuffles, mirrors and shifts them by up to an eighth."""

    def __init__(self, x: Tensor, y: Tensor, augment: bool):
        self.x, self.y, self.augment = x, y, augment
        self.shift = x.shape[-1] // 8

    def __len__(self) -> int:
        return len(self.y) // BATCH

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        order = torch.randperm(len(self.y)) if self.augment else torch.arange(len(self.y))
        for at in order.split(BATCH):
            x = self.x[at]
            if self.augment:
                mirrored = (torch.rand(len(at)) < 0.5)[:, None, None, None]
                x = torch.where(mirrored, x.flip(3), x)
                x = torch.roll(x, tuple(torch.randint(-self.shift, self.shift + 1, (2,)).tolist()), (2, 3))
            yield x, self.y[at]


class Images:
    """Parts of CIFAR-10 at 16x16: training, held-out and test images."""

    def __init__(self, folder: Path):
        given = reconstruction.Images(folder)
        self.train = Batches(given.x[:TRAINED], given.y[:TRAINED], augment=True)
        self.val = Batches(given.held[0][:HELD], given.held[1][:HELD], augment=False)
        self.test = Batches(*given.test, augment=False)


def base(name: str, seed: int, bases: Path) -> nn.Module:
    """A network that benchmarks/reconstruction.py trained."""
    network = reconstruction.network(name)
    network.load_state_dict(torch.load(bases / f"{name}{seed}.pt", weights_only=True))
    return network.eval()


def ratios(network: nn.Module, slim: nn.Module, example: Tensor | None = None) -> list[float]:
    """The latency of ``slim`` over that of ``network``, in alternating passes, several times over."""
    example = torch.zeros(1, 3, 16, 16) if example is None else example
    with as_onnx(network, (example,)) as full, as_onnx(slim, (example,)) as other:
        found = [compare_latency({"full": full, "slim": other}, example) for _ in range(TURNS)]
    return sorted(one["slim"] / one["full"] for one in found)


def ours(name: str, seed: int, network: nn.Module, images: Images, cache: Path) -> dict[str, Any]:
    """`bcnet.slim` at half of the latency."""
    result = bcnet.slim(
        *(network, images.test.x[:1], images.train, images.val),
        test=images.test, budget=f"latency={WANTED:.0%}", recipe=RECIPE, seed=seed, out=cache / f"{name}-{seed}",
        progress=False,
    )  # fmt: skip
    checked = result.run.read("search")["latency"]
    return {
        **figures(network, result.model, images),
        "finalist": result.run.read("retrain/found").get("finalist"),
        "held_by_search": checked,
        "widths": list(result.widths.values()),
    }


def theirs(method: str, seed: int, network: nn.Module, images: Images, limit: float) -> dict[str, Any]:
    """Torch-Pruning, with the most FLOPs at which its network holds the latency, fine-tuned as ours is."""
    space = bcnet.trace(network, images.test.x[:2], groups=1000)
    cutter = Cutter(network, space)
    low, high, best = 0.02, 0.98, None
    for _ in range(HALVINGS):
        share = (low + high) / 2
        kept = prune(cutter, method, share * cutter.flops(space.max), [])
        slim = cutter.cut(kept).eval()
        if float(np.median(ratios(network, slim))) <= limit:
            low, best = share, kept
        else:
            high = share
    if best is None:
        raise BcnetError(f"{method} has no network within {limit:.2f} of the latency: allow it more")
    slim = cutter.cut(best)
    how = Optimisation(epochs=EPOCHS, lr=RATE, warmup=0.5, weight_decay=5e-4)
    retrain(slim, _data(images, seed).train, Retraining(how, TAUGHT, seed=seed), teacher=network)
    slim.to(memory_format=torch.contiguous_format)  # type: ignore[call-overload]
    return {**figures(network, slim.eval(), images), "widths": [len(stay) for stay in best]}


def figures(network: nn.Module, slim: nn.Module, images: Images) -> dict[str, Any]:
    params = [sum(p.numel() for p in net.parameters()) for net in (slim, network)]
    measured = evaluate(slim, _data(images).test)  # type: ignore[arg-type]
    return {
        "accuracy": round(100 * measured["score"], 2),
        "loss": round(measured["loss"], 4),
        "latency": ratios(network, slim),
        "params": params[0] / params[1],
    }


def run(images: Images, cache: Path, bases: Path, out: Path, seeds: list[int]) -> None:
    """All rows, each written as it is there. Torch-Pruning is allowed what bcnet's network takes, where that is more
    than the budget."""
    done = {(r["network"], r["seed"], r["method"]): r for r in read(out) if "seed" in r}
    rest = [(case, method) for case in CASES for method in ("bcnet", RIVALS[0])] + [(case, RIVALS[1]) for case in CASES]
    for (name, trained, seed), method in rest:
        if (name, seed, method) in done or seed not in seeds:
            continue
        start, network = time.monotonic(), base(name, trained, bases)
        if method == "bcnet":
            row = ours(name, seed, network, images, cache)
        else:
            latency = float(np.median(done[name, seed, "bcnet"]["latency"]))
            try:
                row = theirs(method, seed, network, images, max(latency, WANTED))
            except BcnetError as error:
                print(f"{name}, seed {seed}: {error}", flush=True)
                continue
        given = round(100 * evaluate(network, _data(images).test)["score"], 2)  # type: ignore[arg-type]
        row = {"network": name, "base": trained, "seed": seed, "method": method, "given": given, **row}
        row |= {"seconds": round(time.monotonic() - start), **provenance(packages=("torch", "onnxruntime"))}
        done[name, seed, method] = row
        append(out, row)
        print({k: row[k] for k in ("network", "seed", "method", "accuracy", "latency", "seconds")}, flush=True)


def large(out: Path) -> None:
    """MobileNetV2 and ResNet18 as they are, inputs of 224 x 224: balanced widths within half of the latency, measured,
    and predictions corrected until they hold, as ``bcnet run`` does."""
    done = {r["network"] for r in read(out)}
    for name in LARGE:
        if name in done:
            continue
        space = load_model(f"zoo:{name}").space(groups=8, round_to=16, least=4)
        table = measure_table(space, TimingConfig(backend=BACKEND, threads=1))
        factor, steps, full = 1.0, [], space.build(space.max).eval()
        limit = WANTED * float(table(space.max)[0])
        for _ in range(ROUNDS + 1):
            within = Constraints(space, {**space.costs, "latency": table.corrected(factor)}, [f"latency={limit:.0f}ns"])
            widths = LogWidthModel.balanced(space).best(within)
            measured = ratios(full, space.build(widths).eval(), space.example[0][:1])
            shares = [float(cost(widths)[0] / cost(space.max)[0]) for cost in (table, space.costs["flops"])]
            steps.append({"correction": factor, "predicted": shares[0], "measured": measured, "flops": shares[1]})
            if np.median(measured) <= SLACK * WANTED:
                break
            factor *= 1.01 * float(np.median(measured)) / WANTED
        row = {"network": name, "method": "balanced", "widths": widths.tolist(), "steps": steps}
        append(out, {**row, **provenance(packages=("torch", "onnxruntime"))})
        print(name, steps, flush=True)


def _data(images: Images, seed: int = 0) -> Data:
    return from_loaders(images.train, images.val, images.test, classes=10, seed=seed)


def page(rows: list[dict[str, Any]]) -> str:
    """The tables of docs/results/latency-budget.md."""
    lines = ["| network | method | accuracy, by seed | mean | latency, measured | parameters left |"]
    lines.append("| --- | --- | --- | ---: | --- | ---: |")
    gains: list[str] = []
    small = [row for row in rows if "accuracy" in row]
    for name in dict.fromkeys(row["network"] for row in small):
        own = [row for row in small if row["network"] == name]
        given = {row["base"]: row["given"] for row in own}.values()
        each = ", ".join(f"{accuracy:.2f}" for accuracy in given)
        lines.append(f"| {name} | as given | {each} | {np.mean([*given]):.2f} | 1 | 1 |")
        for method in ("bcnet", *RIVALS):
            mine = [row for row in own if row["method"] == method]
            if mine:
                lines.append(_line(name, method, mine))
            if method != "bcnet" and len(mine) > 1:
                gains.append(_gain(name, method, own))
    lines += ["", *gains, "", "| network | predicted | measured | corrected by | then measured | FLOPs left |"]
    lines.append("| --- | ---: | ---: | ---: | ---: | ---: |")
    return "\n".join([*lines, *(_large(row) for row in rows if "steps" in row)])


def _large(row: dict[str, Any]) -> str:
    first, last = row["steps"][0], row["steps"][-1]
    held = "" if np.median(last["measured"]) <= SLACK * WANTED else ", not held"
    then = "" if first is last else f"{_range(last['measured'])}{held}"
    return (
        f"| {row['network']} | {first['predicted']:.3f} | {_range(first['measured'])} | "
        f"{last['correction'] - 1:+.0%} | {then} | {last['flops']:.2f} |"
    )


def _range(ratios: list[float]) -> str:
    return f"{np.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})"


def _line(name: str, method: str, rows: list[dict[str, Any]]) -> str:
    accuracy = [row["accuracy"] for row in rows]
    medians = [float(np.median(row["latency"])) for row in rows]
    held = "" if max(medians) <= SLACK * WANTED else ", not all within the budget"
    latency = f"{', '.join(f'{m:.3f}' for m in medians)}{held}"
    each = ", ".join(f"{a:.2f}" for a in accuracy)
    left = float(np.mean([row["params"] for row in rows]))
    return f"| {name} | {method} | {each} | {np.mean(accuracy):.2f} | {latency} | {left:.2f} |"


def _gain(name: str, method: str, rows: list[dict[str, Any]]) -> str:
    """Paired differences over the seeds that both have, with their 95 % interval."""
    by = {(row["method"], row["seed"]): row["accuracy"] for row in rows}
    seeds = sorted({row["seed"] for row in rows})
    pairs = [by["bcnet", s] - by[method, s] for s in seeds if ("bcnet", s) in by and (method, s) in by]
    low, high = stats.t.interval(0.95, len(pairs) - 1, np.mean(pairs), stats.sem(pairs))
    return f"- {name}: bcnet over {method} {np.mean(pairs):+.2f} points, 95 % interval {low:+.2f} to {high:+.2f}."


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["run", "large", "page"])
    parser.add_argument("--cifar", type=Path, help="a folder with CIFAR-10")
    parser.add_argument("--bases", type=Path, default=Path("build/reconstruction"), help="the trained networks")
    parser.add_argument("--out", type=Path, default=RESULTS / "latency-budget.jsonl")
    parser.add_argument("--cache", type=Path, default=Path("build/latency-budget"), help="for run folders")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.what == "page":
        print(page(read(given.out)))
    elif given.what == "large":
        large(given.out)
    elif given.cifar is None:
        parser.error("run needs --cifar FOLDER")
    else:
        given.cache.mkdir(parents=True, exist_ok=True)
        run(Images(given.cifar), given.cache, given.bases, given.out, given.seeds)


if __name__ == "__main__":
    main()
