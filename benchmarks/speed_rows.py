"""Times where users wait, one row after the other, each beside PyTorch's own way in the same process, by turns.

    python benchmarks/speed_rows.py --out FILE.json [--rows NAME ...] [--warm] [--seconds 400] [--device cpu]

Rows come in the order of their importance. A row runs in a process of its own with a limit of seconds, so that one that
fails or hangs costs no other, and what it has found until then is kept; the file is written after each. ``--warm``
first runs all rows at once for a moment, which fills the compilers' caches and measures nothing. Images are random:
speed does not depend on them. ``--device cpu`` tries the script with the reference kernels at tiny sizes. Rows
``imagenet NAME`` take some steps of a recipe's supernet, scoring and retraining.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from speed_base import ROUNDS, Action, Bench, supernet_of, uniform
from supernet_speed_base import four_paths
from torch import Tensor, nn

from bcnet.accel import SharedEvaluator
from bcnet.accel.enumeration.score_all import score_all
from bcnet.accel.fused_step import plain_step
from bcnet.data.source import LoaderSource
from bcnet.models import MODELS, build
from bcnet.models.channel_bench import channel_bench_mobilenet, channel_bench_resnet
from bcnet.run.recipe import Recipe
from bcnet.space.network import trace
from bcnet.supernet.scoring import Evaluator
from bcnet.supernet.supernet import Supernet
from bcnet.training.optim import Optimisation
from bcnet.training.retraining import Retraining, retrain
from bcnet.utils.provenance import provenance

IMAGENET_IMAGES, HOUR = 1_281_167, 3600.0
RECIPES = ("mobilenetv2_imagenet", "resnet50_imagenet", "efficientnet_b0_imagenet", "resnet18_imagenet",
           "resnet34_imagenet", "proxylessnas_imagenet")  # fmt: skip
Found = Iterator[dict[str, Any]]
"""What a row finds, part by part."""


def plain_networks(bench: Bench) -> Found:
    """A step of MobileNetV2 for CIFAR-10: whole, cut to 44M FLOPs, and that with the whole one as a teacher."""
    x, y = bench.batch(256, 32)
    model = mobilenet(bench)
    space = trace(model, torch.randn(2, 3, 32, 32), groups=1000, check=False)
    cut = uniform(space, "flops=50%" if bench.tiny else "flops=44M")
    whole = [space.build(space.max) for _ in range(2)]
    yield bench.ms(fused_whole=bench.fused(whole[0], x, y), pytorch_whole=bench.plain(whole[1], x, y))
    slim = [space.build(cut) for _ in range(4)]
    yield bench.ms(fused_cut=bench.fused(slim[0], x, y), pytorch_cut=bench.plain(slim[1], x, y))
    teacher = model.to(bench.device, memory_format=torch.channels_last).eval()
    taught = bench.fused(slim[2], x, y, teacher)
    yield bench.ms(fused_cut_taught=taught, pytorch_cut_taught=bench.plain(slim[3], x, y, teacher))


def compiled(bench: Bench) -> Found:
    """The same networks by torch.compile, which compiles for a size of batch."""
    x, y = bench.batch(256, 32, whole=True)
    model = mobilenet(bench)
    space = trace(model, torch.randn(2, 3, 32, 32), groups=1000, check=False)
    yield bench.ms(compile_whole=bench.compiled(model, x, y))
    yield bench.ms(
        compile_cut=bench.compiled(space.build(uniform(space, "flops=50%" if bench.tiny else "flops=44M")), x, y)
    )
    x, y = bench.batch(128, 32 if bench.tiny else 224, 1000, whole=True)
    yield bench.ms(compile_resnet50=bench.compiled(wide_resnet50(bench), x, y))


def supernet_step(bench: Bench, net: Supernet, x: Tensor, y: Tensor, fused: bool) -> Action:
    """A step of four paths with SGD, each time of other widths."""
    rng, sgd = np.random.default_rng(0), bench.sgd(net)
    engine = bench.engine(net) if fused else None
    paths = [four_paths(net, rng) for _ in range(4 if bench.warm else 60)]
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

    for _ in range(0 if bench.warm else 60):
        step()
    return step


def space_row(bench: Bench, maker: Callable[[], nn.Module]) -> Found:
    x, y = bench.batch(256, 32)
    net = supernet_of(bench, maker(), 32, 4)
    yield bench.ms(60, fused=supernet_step(bench, net, x, y, True))
    yield bench.ms(60, pytorch=supernet_step(bench, net, x, y, False))


def mobilenet(bench: Bench) -> nn.Module:
    narrow = 8 if bench.tiny else 1
    return build("mobilenetv2_cifar", [max(w // narrow, 4) for w in MODELS["mobilenetv2_cifar"].widths])


def supernet_mobilenetv2(bench: Bench) -> Found:
    """Beside it four plain steps, fused too, of the network of mean widths."""
    x, y = bench.batch(256, 32)
    net = supernet_of(bench, mobilenet(bench), 32, 8)
    mean = np.array([v.candidates[len(v.candidates) // 2] for v in net.space.variables])
    plain = bench.fused(net.space.build(mean), x, y)
    yield bench.ms(60, fused=supernet_step(bench, net, x, y, True), one_plain_step=plain)
    yield bench.ms(60, pytorch=supernet_step(bench, net, x, y, False))


def wide_resnet50(bench: Bench) -> nn.Module:
    return build(
        "resnet50_imagenet", [max(4, w // 16) if bench.tiny else w for w in MODELS["resnet50_imagenet"].widths]
    )


def resnet50(bench: Bench) -> Found:
    x, y = bench.batch(128, 32 if bench.tiny else 224, 1000)
    made = [wide_resnet50(bench) for _ in range(2)]
    yield bench.ms(fused=bench.fused(made[0], x, y), pytorch=bench.plain(made[1], x, y))


def scoring(bench: Bench) -> Found:
    """480 configurations of MobileNetV2, both sides, 2,500 images: sharing prefixes; some of them one by one, and by
    the fused engine, scaled up."""
    x, y = bench.batch(2500, 32)
    net = supernet_of(bench, mobilenet(bench), 32, 8)
    widths = net.space.sample(np.random.default_rng(0), 4 if bench.warm else 480)
    some = widths[: 2 if bench.warm else 24]
    yield {"configurations": len(widths), "images": len(x)}
    Evaluator(net, [(x, y)], bf16=not bench.tiny).score_many(widths[-1:])
    engine = bench.engine(net)

    def fused(rows: Any) -> None:
        for row in rows:
            for side in net.sides:
                F.cross_entropy(engine.logits(x, row, side, "batch"), y).item()

    fused(some[:1])
    ways = {
        "shared": (SharedEvaluator(net, [(x, y)], bf16=not bench.tiny).score_many, widths),
        "one by one": (Evaluator(net, [(x, y)], bf16=not bench.tiny).score_many, some),
        "fused": (fused, some),
    }
    for name, (score, asked) in ways.items():
        bench.wait()
        start = time.perf_counter()
        score(asked)
        bench.wait()
        yield {f"{name}_s": (time.perf_counter() - start) * len(widths) / len(asked)}


FIRST_STEP = """
import time; start = time.perf_counter()
import torch
from bcnet.accel.fused_step import PlainStep
from bcnet.accel.fused_step.proof import why_no_kernels
from bcnet.accel.kernels import reference
from bcnet.models import build
import sys
device = sys.argv[1]
marks = [("imports", time.perf_counter() - start)]
network = build("mobilenetv2_cifar").to(device)
count = 8 if device == "cpu" else 256
x, y = torch.randn(count, 3, 32, 32, device=device), torch.zeros(count, dtype=torch.long, device=device)
def loss(output, y, taught): return torch.nn.functional.cross_entropy(output.float(), y)
if device == "cpu":
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
    with tempfile.TemporaryDirectory() as cache:
        for name in ("cold_s", "warm_s"):
            environment = {**os.environ, "TRITON_CACHE_DIR": cache}
            begun = time.perf_counter()
            command = [sys.executable, "-c", FIRST_STEP, bench.device]
            done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
            yield {name: time.perf_counter() - begun, f"{name} in words": done.stdout.strip()}


def enumeration(bench: Bench, space: str) -> Found:
    """All 16,384 networks, both sides, 10,000 images, by ``exhaustive.py``."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "found.json"
        script = str(Path(__file__).with_name("exhaustive.py"))
        more = ["--images", "64"] if bench.tiny else ["--spaces", space, *(["--warm"] if bench.warm else [])]
        subprocess.run([sys.executable, script, "--device", bench.device, "--out", str(out), *more], check=True)
        yield json.loads(out.read_text())[space if not bench.tiny else "mobilenet"]


def imagenet(bench: Bench, name: str) -> Found:
    """Images per second and memory of a recipe's supernet training, scoring and retraining, and its hours."""
    recipe, steps = Recipe.read(name), 2 if bench.warm else 10
    size = 32 if bench.tiny else 224
    x, y = bench.batch(recipe.loading.batch_size, size, 1000)
    net = supernet_of(bench, build(recipe.model.removeprefix("zoo:")), size, recipe.groups)
    rng, sgd, engine = np.random.default_rng(0), bench.sgd(net), bench.engine(net)
    paths = [four_paths(net, rng)[:2] for _ in range(8)]
    number = iter(range(10**9))

    def learn() -> None:
        engine.zero()
        engine.step(x, y, paths[next(number) % len(paths)])
        sgd.step()

    found: dict[str, Any] = {"batch": len(x), "steps": ROUNDS * steps, **bench.ms(steps, supernet=learn)}
    yield found
    found |= bench.ms(steps, scoring=lambda: engine.logits(x, paths[0][0][0], statistics="batch"))
    found |= {"supernet_gib": memory_gib(bench)}
    yield found
    found |= bench.ms(steps, retrain=bench.fused(net.space.build(uniform(net.space, recipe.budgets[0])), x, y))
    a_batch = IMAGENET_IMAGES / len(x) / 1e3 / HOUR
    hours = a_batch * (recipe.supernet.epochs * found["supernet_ms"] + recipe.retrain.epochs * found["retrain_ms"])
    speed = {f"{stage}_images_per_second": 1e3 * len(x) / found[f"{stage}_ms"] for stage in ("supernet", "retrain")}
    yield {**found, **speed, "memory_gib": memory_gib(bench), "hours_1": hours, "hours_8": hours / 8}


def memory_gib(bench: Bench) -> float:
    return 0.0 if bench.tiny else torch.cuda.max_memory_allocated() / 2**30


def memory(bench: Bench) -> Found:
    """Whether training, scoring and enumeration go on in parts, with a notice, where a GPU has 4 GiB."""
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

    net = supernet_of(bench, network(), 32, 2)
    few = net.space.sample(np.random.default_rng(0), 4)
    stages: dict[str, Callable[[], Any]] = {
        "training": train,
        "scoring": lambda: SharedEvaluator(net, [(x, y)], bf16=not bench.tiny).score_many(few),
        "enumeration": lambda: len(score_all(net, [(x[:2048], y[:2048])]).widths),
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


ROWS: dict[str, tuple[int, Callable[[Bench], Found]]] = {
    "plain step, MobileNetV2": (70, plain_networks),
    "supernet step, MobileNetV2": (50, supernet_mobilenetv2),
    "supernet step, MobileNet space": (40, lambda b: space_row(b, channel_bench_mobilenet)),
    "supernet step, ResNet space": (40, lambda b: space_row(b, channel_bench_resnet)),
    "scoring": (75, scoring),
    "start": (60, start),
    "plain step, ResNet50": (45, resnet50),
    "all networks, MobileNet space": (65, lambda b: enumeration(b, "mobilenet")),
    "memory": (40, memory),
    **{f"imagenet {name}": (30, lambda b, name=name: imagenet(b, name)) for name in RECIPES},  # type: ignore[misc]
    "all networks, ResNet space": (110, lambda b: enumeration(b, "resnet")),
    "torch.compile": (60, compiled),
}
"""By name: seconds at most, and what is measured."""
COLD = ("start", "memory")
"""Rows that are not run before to be warm."""


class Row:
    """A row in a process of its own, which waits for its turn with all imports done."""

    def __init__(self, name: str, device: str, warm: bool = False):
        self.name, self.folder = name, tempfile.TemporaryDirectory()
        self.out = Path(self.folder.name) / "row.json"
        more = ["--warm"] if warm else []
        command = [sys.executable, __file__, "--row", name, "--device", device, "--out", str(self.out), *more]
        streams = {"stdin": subprocess.PIPE, "stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
        self.process = subprocess.Popen(command, text=True, start_new_session=True, **streams)  # type: ignore[call-overload]

    def run(self, limit: float) -> dict[str, Any]:
        begun, failed = time.perf_counter(), ""
        try:
            _, said = self.process.communicate("go\n", timeout=limit)
            failed = said.strip()[-400:] if self.process.returncode else ""
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)  # with the processes that it started
            self.process.communicate()
            failed = f"it took more than {limit:.0f} s"
        found = json.loads(self.out.read_text()) if self.out.exists() else {}
        self.folder.cleanup()
        return {**found, "row_s": time.perf_counter() - begun, **({"failed": failed} if failed else {})}


def row(args: argparse.Namespace) -> None:
    """What the process of a row does."""
    if not sys.stdin.readline():
        return  # nobody waits for it any more
    found: dict[str, Any] = {}
    for part in ROWS[args.row][1](Bench(args.device, args.warm)):
        found |= part
        written = args.out.with_suffix(".part")
        written.write_text(json.dumps(found))
        written.replace(args.out)


def warm_up(names: Sequence[str], device: str) -> None:
    """All rows at once for a moment."""
    begun = time.perf_counter()
    with ThreadPoolExecutor(4) as pool:
        some = [name for name in names if name not in COLD]
        for name, found in zip(some, pool.map(lambda name: Row(name, device, True).run(60), some), strict=True):
            print(f"warm: {name:35s} {found['row_s']:5.1f} s {found.get('failed', '')}", flush=True)
    print(f"warm after {time.perf_counter() - begun:.0f} s", flush=True)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cuda", choices=["cpu", "cuda"])
    parser.add_argument("--rows", nargs="+", choices=list(ROWS), default=list(ROWS))
    parser.add_argument("--row", choices=list(ROWS), help=argparse.SUPPRESS)
    parser.add_argument("--warm", action="store_true", help="fill the compilers' caches before")
    parser.add_argument("--seconds", type=float, default=400, help="of all rows together")
    args = parser.parse_args(arguments)
    if args.row:
        row(args)
        return
    begun = time.perf_counter()
    if args.warm:
        warm_up(args.rows, args.device)
    found: dict[str, Any] = {"provenance": provenance(args.device)}
    waiting = [Row(args.rows[0], args.device)]
    for number, name in enumerate(args.rows):
        waiting += [Row(later, args.device) for later in args.rows[number + 1 : number + 2]]
        left = args.seconds - (time.perf_counter() - begun)
        found[name] = waiting.pop(0).run(max(1, min(ROWS[name][0], left)))
        print(f"{name:35s} {json.dumps(found[name])[:400]}", flush=True)
        args.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
