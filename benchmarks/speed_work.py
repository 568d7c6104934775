"""What the rows of benchmarks/speed_rows.py measure, each a generator of what it finds, part by part.

What a row does before its first ``yield`` is for the CPU alone, and is not timed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from speed_base import Action, Bench, supernet_of, uniform
from supernet_speed_base import four_paths
from torch import Tensor, nn
from without_gpu import reference

from bcnet.accel import SharedEvaluator
from bcnet.accel.enumeration.score_all import score_all, within_memory
from bcnet.accel.enumeration.walker import Options
from bcnet.accel.fused_step import FusedEvaluator, plain_step
from bcnet.data.source import LoaderSource
from bcnet.models import MODELS, build
from bcnet.models.channel_bench import channel_bench_mobilenet, channel_bench_resnet
from bcnet.run.recipe import Recipe
from bcnet.space.network import NetworkSpace, trace
from bcnet.supernet.scoring import Evaluator
from bcnet.supernet.supernet import Supernet
from bcnet.training.optim import Optimisation
from bcnet.training.retraining import Retraining, retrain

IMAGENET_IMAGES, HOUR = 1_281_167, 3600.0
RECIPES = ("mobilenetv2_imagenet", "resnet50_imagenet", "efficientnet_b0_imagenet", "resnet18_imagenet",
           "resnet34_imagenet", "proxylessnas_imagenet")  # fmt: skip
Found = Iterator[dict[str, Any]]
"""What a row finds, part by part."""


def mobilenet(bench: Bench) -> nn.Module:
    narrow = 8 if bench.tiny else 1
    return build("mobilenetv2_cifar", [max(w // narrow, 4) for w in MODELS["mobilenetv2_cifar"].widths])


def mobilenet_and_cut(bench: Bench) -> tuple[NetworkSpace, Any]:
    """MobileNetV2 for CIFAR-10, and its widths at 44M FLOPs."""
    space = trace(mobilenet(bench), torch.randn(2, 3, 32, 32), groups=1000, check=False)
    return space, uniform(space, "flops=50%" if bench.tiny else "flops=44M")


def plain_networks(bench: Bench) -> Found:
    """A step of MobileNetV2 for CIFAR-10: whole, cut to 44M FLOPs, and that with the whole one as a teacher."""
    space, cut = mobilenet_and_cut(bench)
    whole, slim = ([space.build(widths) for _ in range(4)] for widths in (space.max, cut))
    yield {}
    x, y = bench.batch(256, 32)
    yield bench.ms(fused_whole=bench.fused(whole[0], x, y), pytorch_whole=bench.plain(whole[1], x, y))
    yield bench.ms(fused_cut=bench.fused(slim[0], x, y), pytorch_cut=bench.plain(slim[1], x, y))
    teacher = bench.on(whole[2]).eval()
    taught, pytorch = bench.fused(slim[2], x, y, teacher), bench.plain(slim[3], x, y, teacher)
    yield bench.ms(fused_cut_taught=taught, pytorch_cut_taught=pytorch)


def compiled(bench: Bench, kind: str) -> Found:
    """A step of a network by torch.compile."""
    if kind == "ResNet50":
        network, classes, given = wide_resnet50(bench), 1000, (128, 32 if bench.tiny else 224)
    else:
        space, cut = mobilenet_and_cut(bench)
        network, classes, given = space.build(cut if kind == "cut" else space.max), 10, (256, 32)
    yield {}
    x, y = bench.batch(*given, classes, whole=True)
    yield bench.ms(compile=bench.compiled(network, x, y))


def supernet_step(bench: Bench, net: Supernet, x: Tensor, y: Tensor, fused: bool, widths: int) -> Action:
    """A step of four paths with SGD, each time of other widths, all of which were met before."""
    rng, sgd = np.random.default_rng(0), bench.sgd(net)
    engine = bench.engine(net) if fused else None
    paths = [four_paths(net, rng) for _ in range(2 if bench.warm else widths)]
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

    for _ in paths:
        step()
    return step


def space_row(bench: Bench, maker: Callable[[], nn.Module]) -> Found:
    net = supernet_of(maker(), 32, 4)
    yield {}
    x, y = bench.batch(256, 32)
    yield bench.ms(60, fused=supernet_step(bench, bench.on(net), x, y, True, 60))
    yield bench.ms(20, pytorch=supernet_step(bench, net, x, y, False, 20))


def supernet_mobilenetv2(bench: Bench) -> Found:
    """Beside it four plain steps, fused too, of the network of mean widths."""
    net = supernet_of(mobilenet(bench), 32, 8)
    mean = np.array([v.candidates[len(v.candidates) // 2] for v in net.space.variables])
    one = net.space.build(mean)
    yield {}
    x, y = bench.batch(256, 32)
    plain = bench.fused(one, x, y)
    yield bench.ms(30, fused=supernet_step(bench, bench.on(net), x, y, True, 30), one_plain_step=plain)
    yield bench.ms(8, pytorch=supernet_step(bench, net, x, y, False, 8))


def wide_resnet50(bench: Bench) -> nn.Module:
    return build(
        "resnet50_imagenet", [max(4, w // 16) if bench.tiny else w for w in MODELS["resnet50_imagenet"].widths]
    )


def resnet50(bench: Bench) -> Found:
    made = [wide_resnet50(bench) for _ in range(2)]
    yield {}
    x, y = bench.batch(128, 32 if bench.tiny else 224, 1000)
    yield bench.ms(10, fused=bench.fused(made[0], x, y))
    yield bench.ms(10, pytorch=bench.plain(made[1], x, y))


def scoring(bench: Bench) -> Found:
    """480 configurations of MobileNetV2, both sides, 2,500 images, as a run scores them on a GPU; some of them one by
    one by PyTorch and sharing prefixes, scaled up."""
    net = supernet_of(mobilenet(bench), 32, 8)
    widths = net.space.sample(np.random.default_rng(0), 4 if bench.warm else 480)
    yield {"configurations": len(widths)}
    x, y = bench.batch(2500, 32)
    net, bf16 = bench.on(net), not bench.tiny
    kernels = {"kernels": reference, "dtype": torch.float32} if bench.tiny else {}
    start = time.perf_counter()
    fused = FusedEvaluator(net, [(x, y)], bf16=bf16, **kernels)
    fused.score(net.space.max)
    yield {"images": len(x), "set_up_s": time.perf_counter() - start}
    ways = {
        "fused": (fused, len(widths)),
        "one by one": (Evaluator(net, [(x, y)], bf16=bf16), 24),
        "shared": (SharedEvaluator(net, [(x, y)], bf16=bf16), 120),
    }
    for name, (evaluator, count) in ways.items():
        evaluator.score(net.space.max)
        bench.wait()
        start = time.perf_counter()
        asked = widths[:count]
        evaluator.score_many(asked)
        bench.wait()
        yield {f"{name}_s": (time.perf_counter() - start) * len(widths) / len(asked)}


FIRST_STEP = """
import time; start = time.perf_counter()
import torch
from bcnet.accel.fused_step import PlainStep
from bcnet.accel.fused_step.proof import why_no_kernels
from bcnet.models import build
import sys
device = sys.argv[1]
marks = [("imports", time.perf_counter() - start)]
network = build("mobilenetv2_cifar").to(device)
count = 8 if device == "cpu" else 256
x, y = torch.randn(count, 3, 32, 32, device=device), torch.zeros(count, dtype=torch.long, device=device)
def loss(output, y, taught): return torch.nn.functional.cross_entropy(output.float(), y)
if device == "cpu":
    sys.path.append(sys.argv[2])
    from without_gpu import reference
    step = PlainStep(network, x, loss, None, reference, torch.float32)
else:
    why_no_kernels(x.device)
    marks.append(("proof", time.perf_counter() - start))
    step = PlainStep(network, x, loss)
marks.append(("traced and compiled", time.perf_counter() - start))
float(step(x, y)[0])
marks.append(("first step", time.perf_counter() - start))
print(*(f"{name}: {seconds:.2f}" for name, seconds in marks), sep=", ")
"""


def start(bench: Bench) -> Found:
    """Seconds from the interpreter's start to the end of the first step, without Triton's cache and with it."""
    yield {}
    with tempfile.TemporaryDirectory() as cache:
        for name in ("cold_s", "warm_s"):
            environment = {**os.environ, "TRITON_CACHE_DIR": cache}
            begun = time.perf_counter()
            command = [sys.executable, "-c", FIRST_STEP, bench.device, str(Path(__file__).parent)]
            done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
            yield {name: time.perf_counter() - begun, f"{name} in words": done.stdout.strip()}


def exhaustive(space: str, out: Path, *more: str) -> list[str]:
    """The command that scores all networks of a space, as it was measured before."""
    command = [sys.executable, str(Path(__file__).with_name("exhaustive.py")), "--out", str(out), *more]
    return [*command, "--device", "cuda", "--spaces", space, "--batch", "10000", "--sample", "2", *ENUMERATION[space]]


def enumeration(bench: Bench, space: str) -> Found:
    """All 16,384 networks, both sides, 10,000 images, by ``exhaustive.py``."""
    yield {}
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "found.json"
        tiny = [sys.executable, str(Path(__file__).with_name("exhaustive.py")), "--images", "32", "--out", str(out)]
        subprocess.run(tiny if bench.tiny else exhaustive(space, out), check=True)
        yield json.loads(out.read_text())["mobilenet" if bench.tiny else space]


def imagenet(bench: Bench, name: str) -> Found:
    """Images per second and memory of a recipe's supernet training, scoring and retraining, and its hours."""
    recipe, size = Recipe.read(name), 32 if bench.tiny else 224
    net = supernet_of(build(recipe.model.removeprefix("zoo:")), size, recipe.groups)
    slim = net.space.build(uniform(net.space, recipe.budgets[0]))
    teacher = None if recipe.distillation is None else net.space.build(net.space.max)
    found: dict[str, Any] = {"batch": recipe.loading.batch_size}
    yield found
    teacher = None if teacher is None else bench.on(teacher).eval()
    rng, sgd, engine = np.random.default_rng(0), bench.sgd(bench.on(net)), bench.engine(net)
    paths = [four_paths(net, rng)[:2] for _ in range(8)]
    number = iter(range(10**9))

    def supernet(x: Tensor, y: Tensor) -> Action:
        def learn() -> None:
            engine.zero()
            engine.step(x, y, paths[next(number) % len(paths)])
            sgd.step()

        return learn

    stages: dict[str, Callable[[Tensor, Tensor], Action]] = {
        "supernet": supernet,
        "scoring": lambda x, y: lambda: engine.logits(x, paths[0][0][0], statistics="batch"),
        "retrain": lambda x, y: bench.fused(slim, x, y, teacher),
    }
    for stage, make in stages.items():
        x, y = bench.batch(recipe.loading.batch_size, size, 1000)
        found |= bench.steps(stage, make, x, y)
        yield found
    a_batch = IMAGENET_IMAGES / HOUR
    epochs = {"supernet": recipe.supernet.epochs, "retrain": recipe.retrain.epochs}
    hours = sum(a_batch * count / found[f"{stage}_images_per_second"] for stage, count in epochs.items())
    yield {"hours_1": hours, "hours_8": hours / 8}


def memory(bench: Bench) -> Found:
    """Whether training, scoring and enumeration go on in parts, with a notice, where a GPU has 4 GiB."""
    yield {}
    x, y = bench.batch(4096, 32)
    narrow = (8, 16, 16, 16, 8, 16, 16)
    if not bench.tiny:
        torch.cuda.set_per_process_memory_fraction(4 * 2**30 / torch.cuda.get_device_properties(0).total_memory)
    config = Retraining(Optimisation(epochs=1, lr=0.01, bf16=not bench.tiny))

    def network() -> nn.Module:
        return channel_bench_mobilenet(narrow) if bench.tiny else channel_bench_mobilenet()

    def train() -> Any:
        source = LoaderSource([(x, y)] * 2)
        return retrain(network().to(bench.device), source, config, fast=lambda *given: plain_step(*given)[0])

    net = bench.on(supernet_of(network(), 32, 2))
    few = net.space.sample(np.random.default_rng(0), 4)

    def enumerate_all() -> Any:
        parts = within_memory(net, [(x[:2048], y[:2048])], Options())
        return f"{len(score_all(net, parts).widths):,} widths, in parts of {len(parts[0][0])} images"

    stages: dict[str, Callable[[], Any]] = {
        "training": train,
        "scoring": lambda: SharedEvaluator(net, [(x, y)], bf16=not bench.tiny).score_many(few),
        "enumeration": enumerate_all,
    }
    for name, stage in stages.items():
        with warnings.catch_warnings(record=True) as heard:
            warnings.simplefilter("always")
            try:
                said = str(stage())[:200]
            except Exception as error:  # that is what is asked here
                said = f"failed: {type(error).__name__}: {str(error)[:200]}"
        yield {name: {"result": said, "notices": sorted({str(w.message)[:200] for w in heard})}}
        if not bench.tiny:
            torch.cuda.empty_cache()


ENUMERATION: dict[str, tuple[str, ...]] = {"mobilenet": (), "resnet": ("--overlap", "--memory", "110")}
COMPILED = {"torch.compile, MobileNetV2": "whole", "torch.compile, cut": "cut", "torch.compile, ResNet50": "ResNet50"}
ROWS: dict[str, tuple[int, Callable[[Bench], Found]]] = {
    "plain step, MobileNetV2": (60, plain_networks),
    "supernet step, MobileNet space": (30, lambda b: space_row(b, channel_bench_mobilenet)),
    "supernet step, ResNet space": (30, lambda b: space_row(b, channel_bench_resnet)),
    "supernet step, MobileNetV2": (40, supernet_mobilenetv2),
    "scoring": (60, scoring),
    "plain step, ResNet50": (35, resnet50),
    "start": (60, start),
    "memory": (40, memory),
    "all networks, MobileNet space": (60, lambda b: enumeration(b, "mobilenet")),
    **{f"imagenet {name}": (30, lambda b, name=name: imagenet(b, name)) for name in RECIPES},  # type: ignore[misc]
    **{name: (30, lambda b, kind=kind: compiled(b, kind)) for name, kind in COMPILED.items()},  # type: ignore[misc]
    "all networks, ResNet space": (120, lambda b: enumeration(b, "resnet")),
}
"""By name: seconds at most, and what is measured."""
