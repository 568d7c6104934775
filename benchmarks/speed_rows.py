"""Times where users wait, one row after the other, each beside PyTorch's own way in the same process.

    python benchmarks/speed_rows.py --out FILE.json [--rows NAME ...] [--device cpu]

A row runs in a process of its own with a limit of seconds, so that one that fails or hangs costs no other; the file is
written after each. Images are random: speed does not depend on them. ``--device cpu`` tries the script with the
reference kernels at tiny sizes. Rows ``imagenet NAME`` take some steps of a recipe's supernet, scoring and retraining.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from supernet_speed_base import four_paths
from torch import Tensor, nn

from bcnet.accel import SharedEvaluator
from bcnet.accel.enumeration.score_all import score_all
from bcnet.accel.fused_step import FusedEngine, PlainStep, plain_step
from bcnet.accel.kernels import reference
from bcnet.data.source import LoaderSource
from bcnet.models import MODELS, build
from bcnet.models.channel_bench import channel_bench_mobilenet, channel_bench_resnet
from bcnet.run.recipe import Recipe
from bcnet.search import Constraints
from bcnet.space.network import NetworkSpace, trace
from bcnet.supernet.scoring import Evaluator
from bcnet.supernet.supernet import Supernet
from bcnet.training.cuda_graph import CudaGraphStep
from bcnet.training.optim import Optimisation
from bcnet.training.retraining import Retraining, retrain
from bcnet.utils.provenance import provenance

IMAGENET_IMAGES, HOUR = 1_281_167, 3600.0
RECIPES = ("resnet50_imagenet", "resnet34_imagenet", "resnet18_imagenet", "mobilenetv2_imagenet",
           "efficientnet_b0_imagenet", "proxylessnas_imagenet")  # fmt: skip


class Bench:
    """A device, and sizes that suit it."""

    def __init__(self, device: str):
        self.device, self.tiny = device, device == "cpu"

    def batch(self, count: int, size: int, classes: int = 10) -> tuple[Tensor, Tensor]:
        x = torch.randn(2 if self.tiny else count, 3, size, size).to(self.device, memory_format=torch.channels_last)
        return x, torch.randint(0, classes, (len(x),), device=self.device)

    def ms(self, action: Callable[[], object], steps: int = 20) -> float:
        """Milliseconds of an action once it is warm: the median of three."""
        found = []
        for _ in range(2 if self.tiny else 6):
            action()
        for _ in range(1 if self.tiny else 3):
            self.wait()
            start = time.perf_counter()
            for _ in range(1 if self.tiny else steps):
                action()
            self.wait()
            found.append(1e3 * (time.perf_counter() - start) / (1 if self.tiny else steps))
        return sorted(found)[len(found) // 2]

    def wait(self) -> None:
        if not self.tiny:
            torch.cuda.synchronize()

    def engine(self, net: Supernet) -> FusedEngine:
        return FusedEngine(net, reference, torch.float32) if self.tiny else FusedEngine(net)

    def fused(self, network: nn.Module, x: Tensor, y: Tensor, teacher: nn.Module | None = None) -> float:
        """Milliseconds of a fused step with SGD."""
        network = network.to(self.device, memory_format=torch.channels_last).train()
        kernels = (reference, torch.float32) if self.tiny else (None, torch.bfloat16)
        step = PlainStep(network, x, loss_with(teacher), *kernels)
        sgd = self.sgd(network)
        return self.ms(lambda: (step(x, y), sgd.step()))

    def sgd(self, network: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(network.parameters(), 1e-3, 0.9, fused=not self.tiny)

    def plain(self, network: nn.Module, x: Tensor, y: Tensor, teacher: nn.Module | None = None) -> float:
        """Milliseconds of PyTorch's step: autocast, channels last, a CUDA graph."""
        network = network.to(self.device, memory_format=torch.channels_last).train()
        loss = loss_with(teacher)

        def learn(images: Tensor, labels: Tensor) -> Tensor:
            network.zero_grad(set_to_none=self.tiny)
            with torch.autocast(self.device, torch.bfloat16):
                found = loss(network(images), images, labels)
            found.backward()
            return found.detach()[None]

        step = learn if self.tiny else CudaGraphStep(learn, network)
        sgd = self.sgd(network)
        return self.ms(lambda: (step(x, y), sgd.step()))


def loss_with(teacher: nn.Module | None) -> Callable[[Any, Tensor, Tensor], Tensor]:
    def loss(output: Any, x: Tensor, y: Tensor) -> Tensor:
        labelled = F.cross_entropy(output.float(), y)
        if teacher is None:
            return labelled
        with torch.no_grad():
            soft = teacher(x).float().softmax(1)
        return 0.1 * labelled + 0.9 * F.cross_entropy(output.float(), soft)

    return loss


def uniform(space: NetworkSpace, budget: str) -> Any:
    return Constraints(space, space.costs, [budget]).uniform()


def supernet_step(bench: Bench, net: Supernet, x: Tensor, y: Tensor, fused: bool) -> float:
    """Milliseconds of a step of four paths with SGD, each time of other widths."""
    rng, sgd = np.random.default_rng(0), bench.sgd(net)
    engine = bench.engine(net) if fused else None
    paths = [four_paths(net, rng) for _ in range(4 if bench.tiny else 60)]
    count = iter(range(10**9))

    def step() -> None:
        some = paths[next(count) % len(paths)]
        if engine is not None:
            engine.zero()
            engine.step(x, y, some)
        else:
            sgd.zero_grad()
            for path in some:
                with torch.autocast(bench.device, torch.bfloat16):
                    loss = F.cross_entropy(net(x, *path), y)
                (loss / 4).backward()
        sgd.step()

    for _ in range(0 if bench.tiny else 60):
        step()
    return bench.ms(step)


def supernet_of(bench: Bench, model: nn.Module, size: int, groups: int) -> Supernet:
    space = trace(model, torch.randn(2, 3, size, size), groups=groups, check=False)
    return Supernet(space, "bcv2").to(bench.device).train()


def space_row(bench: Bench, maker: Callable[[], nn.Module]) -> dict[str, Any]:
    x, y = bench.batch(256, 32)
    net = supernet_of(bench, maker(), 32, 4)
    return {"fused_ms": supernet_step(bench, net, x, y, True), "pytorch_ms": supernet_step(bench, net, x, y, False)}


def mobilenet(bench: Bench) -> nn.Module:
    narrow = 8 if bench.tiny else 1
    return build("mobilenetv2_cifar", [max(w // narrow, 4) for w in MODELS["mobilenetv2_cifar"].widths])


def supernet_mobilenetv2(bench: Bench) -> dict[str, Any]:
    x, y = bench.batch(256, 32)
    net = supernet_of(bench, mobilenet(bench), 32, 8)
    mean = np.array([v.candidates[len(v.candidates) // 2] for v in net.space.variables])
    four = 4 * bench.fused(net.space.build(mean), x, y)
    found = {"fused_ms": supernet_step(bench, net, x, y, True), "four_plain_steps_fused_ms": four}
    return {**found, "pytorch_ms": supernet_step(bench, net, x, y, False)}


def taught(bench: Bench) -> dict[str, Any]:
    x, y = bench.batch(256, 32)
    model = mobilenet(bench)
    space = trace(model, torch.randn(2, 3, 32, 32), groups=64, check=False)
    slim = space.build(uniform(space, "flops=15%"))
    teacher = model.to(bench.device, memory_format=torch.channels_last).eval()
    again = [space.build(uniform(space, "flops=15%")) for _ in range(3)]
    return {
        "fused_ms": bench.fused(slim, x, y), "fused_taught_ms": bench.fused(again[0], x, y, teacher),
        "pytorch_ms": bench.plain(again[1], x, y), "pytorch_taught_ms": bench.plain(again[2], x, y, teacher),
    }  # fmt: skip


def resnet50(bench: Bench) -> dict[str, Any]:
    x, y = bench.batch(128, 32 if bench.tiny else 224, 1000)
    widths = [max(4, w // 16) if bench.tiny else w for w in MODELS["resnet50_imagenet"].widths]
    made = [build("resnet50_imagenet", widths) for _ in range(2)]
    return {"fused_ms": bench.fused(made[0], x, y), "pytorch_ms": bench.plain(made[1], x, y)}


def scoring(bench: Bench) -> dict[str, Any]:
    """480 configurations of MobileNetV2, both sides, 2,500 images; one by one some of them, scaled up."""
    x, y = bench.batch(2500, 32)
    net = supernet_of(bench, mobilenet(bench), 32, 8)
    widths = net.space.sample(np.random.default_rng(0), 4 if bench.tiny else 480)
    some = widths[: 2 if bench.tiny else 24]
    found: dict[str, Any] = {"configurations": len(widths), "images": len(x)}
    bf16 = not bench.tiny
    for name, maker, asked in (("shared", SharedEvaluator, widths), ("one by one", Evaluator, some)):
        Evaluator(net, [(x, y)], bf16=bf16).score_many(widths[-1:])
        evaluator = maker(net, [(x, y)], bf16=bf16)
        bench.wait()
        start = time.perf_counter()
        evaluator.score_many(asked)
        bench.wait()
        found[f"{name}_s"] = (time.perf_counter() - start) * len(widths) / len(asked)
    return found


FIRST_STEP = """
import time; start = time.perf_counter()
import torch
from bcnet.accel.enumeration.score_all import score_all
from bcnet.accel.fused_step import PlainStep
from bcnet.accel.kernels import reference
from bcnet.models import build
import sys
device = sys.argv[1]
network = build("mobilenetv2_cifar").to(device)
x, y = torch.randn(8 if device == "cpu" else 256, 3, 32, 32, device=device), torch.zeros(8 if device == "cpu" else 256, dtype=torch.long, device=device)
kernels = (reference, torch.float32) if device == "cpu" else ()
step = PlainStep(network, x, lambda output, x, y: torch.nn.functional.cross_entropy(output.float(), y), *kernels)
float(step(x, y)[0])
print(time.perf_counter() - start)
"""  # noqa: E501


def start(bench: Bench) -> dict[str, Any]:
    """Seconds from the interpreter's start to the end of the first step, without Triton's cache and with it."""
    found = {}
    with tempfile.TemporaryDirectory() as cache:
        for name in ("cold_s", "warm_s"):
            environment = {**os.environ, "TRITON_CACHE_DIR": cache}
            begun = time.perf_counter()
            subprocess.run([sys.executable, "-c", FIRST_STEP, bench.device], env=environment, check=True)
            found[name] = time.perf_counter() - begun
    return found


def enumeration(bench: Bench, space: str) -> dict[str, Any]:
    """All 16,384 networks, both sides, 10,000 images, by ``exhaustive.py``."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "found.json"
        script = str(Path(__file__).with_name("exhaustive.py"))
        more = ["--images", "64"] if bench.tiny else ["--spaces", space]
        subprocess.run([sys.executable, script, "--device", bench.device, "--out", str(out), *more], check=True)
        found: dict[str, Any] = json.loads(out.read_text())
    return found


def imagenet(bench: Bench, name: str) -> dict[str, Any]:
    """Images per second and memory of a recipe's supernet training, scoring and retraining, and its hours."""
    recipe, steps = Recipe.read(name), 2 if bench.tiny else 20
    size = 32 if bench.tiny else 224
    count = 2 if bench.tiny else recipe.loading.batch_size
    x, y = bench.batch(count, size, 1000)
    model = build(recipe.model.removeprefix("zoo:"))
    net = supernet_of(bench, model, size, recipe.groups)
    rng, sgd, engine = np.random.default_rng(0), bench.sgd(net), bench.engine(net)
    paths = [four_paths(net, rng)[:2] for _ in range(8)]
    number = iter(range(10**9))

    def learn() -> None:
        engine.zero()
        engine.step(x, y, paths[next(number) % len(paths)])
        sgd.step()

    found: dict[str, Any] = {"batch": len(x), "steps": 3 * steps, "supernet_ms": bench.ms(learn, steps)}
    found["scoring_ms"] = bench.ms(lambda: engine.logits(x, paths[0][0][0], statistics="batch"), steps)
    slim = net.space.build(uniform(net.space, recipe.budgets[0]))
    found["retrain_ms"] = bench.fused(slim, x, y)
    found["memory_gib"] = 0.0 if bench.tiny else torch.cuda.max_memory_allocated() / 2**30
    a_batch = IMAGENET_IMAGES / len(x) / 1e3 / HOUR
    hours = a_batch * (recipe.supernet.epochs * found["supernet_ms"] + recipe.retrain.epochs * found["retrain_ms"])
    return {**found, "images_per_second": 1e3 * len(x) / found["retrain_ms"], "hours_1": hours, "hours_8": hours / 8}


def memory(bench: Bench) -> dict[str, Any]:
    """Whether training and enumeration go on in parts, with a notice, where a GPU has 4 GiB."""
    x, y = bench.batch(4096, 32)
    narrow = (8, 16, 16, 16, 8, 16, 16)
    made = channel_bench_mobilenet(narrow) if bench.tiny else channel_bench_mobilenet()
    if not bench.tiny:
        torch.cuda.set_per_process_memory_fraction(4 * 2**30 / torch.cuda.get_device_properties(0).total_memory)
    config = Retraining(Optimisation(epochs=1, lr=0.01, bf16=not bench.tiny))
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        history = retrain(
            made.to(bench.device), LoaderSource([(x, y)] * 2), config, fast=lambda n, x, loss: plain_step(n, x, loss)[0]
        )
        torch.cuda.empty_cache()
        net = supernet_of(bench, channel_bench_mobilenet(narrow) if bench.tiny else channel_bench_mobilenet(), 32, 2)
        scored = score_all(net, [(x[:2048], y[:2048])])
    return {"notices": [str(w.message) for w in heard], "losses": str(history)[:300], "scored": len(scored.widths)}


ROWS: dict[str, tuple[int, Callable[[Bench], dict[str, Any]]]] = {
    "supernet step, MobileNet space": (40, lambda b: space_row(b, channel_bench_mobilenet)),
    "supernet step, ResNet space": (40, lambda b: space_row(b, channel_bench_resnet)),
    "supernet step, MobileNetV2": (50, supernet_mobilenetv2),
    "taught": (40, taught),
    "ResNet50": (45, resnet50),
    "scoring": (60, scoring),
    "start": (60, start),
    "memory": (60, memory),
    "all networks, MobileNet space": (60, lambda b: enumeration(b, "mobilenet")),
    "all networks, ResNet space": (90, lambda b: enumeration(b, "resnet")),
    **{f"imagenet {name}": (40, lambda b, name=name: imagenet(b, name)) for name in RECIPES},  # type: ignore[misc]
}
"""By name: seconds at most, and what is measured."""


def alone(name: str, device: str, limit: float) -> dict[str, Any]:
    """A row in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "row.json"
        command = [sys.executable, __file__, "--row", name, "--device", device, "--out", str(out)]
        try:
            done = subprocess.run(command, timeout=limit, capture_output=True, text=True)
        except subprocess.TimeoutExpired:
            return {"failed": f"it took more than {limit:.0f} s"}
        return json.loads(out.read_text()) if out.exists() else {"failed": done.stderr.strip()[-400:]}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cuda", choices=["cpu", "cuda"])
    parser.add_argument("--rows", nargs="+", choices=list(ROWS), default=list(ROWS))
    parser.add_argument("--row", choices=list(ROWS), help=argparse.SUPPRESS)
    parser.add_argument("--seconds", type=float, default=400, help="of all rows together")
    args = parser.parse_args(arguments)
    if args.row:
        args.out.write_text(json.dumps(ROWS[args.row][1](Bench(args.device))))
        return
    begun = time.perf_counter()
    found: dict[str, Any] = {"provenance": provenance(args.device)}
    for name in args.rows:
        left = args.seconds - (time.perf_counter() - begun)
        found[name] = alone(name, args.device, min(ROWS[name][0], left)) if left > 5 else {"failed": "no time was left"}
        print(f"{name:35s} {json.dumps(found[name])[:400]}", flush=True)
        args.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
