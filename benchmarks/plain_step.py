"""What a training step of a plain network costs on a GPU: PyTorch's ways and bcnet's fused step, in one process.

    python benchmarks/plain_step.py --data DIR --out FILE.json [--network mobilenetv2_cifar] [--flops 44e6]

MobileNetV2 for CIFAR-10, whole and cut uniformly, batch 256, bf16, SGD included. Ways: plain (autocast, channels last,
recorded as a CUDA graph) and fused (the same, and kernel by kernel), alone and several networks side by side; with the
whole network as teacher; and the seconds until the first step of a network of new widths. At last, how far the
fused step's gradients and answers are from those in float32.
"""

from __future__ import annotations

import argparse
import copy
import json
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path as File
from typing import Any

import numpy as np
import torch
from parts import Images, network, provenance, space_of, uniform
from paths import Class, Lessons
from side_by_side import SideBySide, Training, autocast
from torch import nn
from torch.nn import functional

STEPS = 30
SCORED = 2500


def seconds(action: Callable[[], object], repeat: int = STEPS) -> float:
    """Seconds that an action takes once it is warm: the median of three."""
    found = []
    for _ in range(3):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(repeat):
            action()
        torch.cuda.synchronize()
        found.append((time.perf_counter() - start) / repeat)
    return sorted(found)[1]


def errors(model: nn.Module, images: Images) -> dict[str, Any]:
    """Gradients and answers by the fused step and by autocast, both relative to float32."""
    training = Training(epochs=1, taught=0.0)
    together = Class(space_of(model, images), training, Lessons(images, training, None), 1)
    (path,) = together.load([(together.paths[0].widths, model.state_dict())], record=False)
    x, y, _ = together.lessons.first(1)[0]
    plain = copy.deepcopy(model).to(x.device, memory_format=torch.channels_last).train()
    found: dict[str, dict[str, torch.Tensor]] = {}
    for way, dtype in (("float32", "fp32"), ("autocast", "bf16")):
        plain.zero_grad()
        with autocast(x.device, dtype):
            functional.cross_entropy(plain(x.float()).float(), y).backward()
        found[way] = {name: p.grad.clone() for name, p in plain.named_parameters()}
    path.engine.zero()
    path.engine.step(x, y, [(path.widths, "left")])
    found["fused"] = {name: p.grad.clone() for name, p in path.net.named_parameters()}
    total = {way: torch.cat([g.flatten() for _, g in sorted(grads.items())]) for way, grads in found.items()}
    size = total["float32"].norm()
    rows = {way: float((total[way] - total["float32"]).norm() / size) for way in ("autocast", "fused")}
    path.load(path.widths, model.state_dict())
    plain = copy.deepcopy(model).to(x.device).eval()
    images_32 = images.test[0][0][:500].float()
    with torch.no_grad():
        exact = plain(images_32)
        with autocast(x.device, "bf16"):
            half = plain(images_32).float()
    fused = path.engine.logits(images_32, path.widths)
    answers = {n: float((v - exact).norm() / exact.norm()) for n, v in (("autocast", half), ("fused", fused))}
    return {"gradients": rows, "answers": answers}


class Bench:
    """One network and its cut, timed in every way."""

    def __init__(self, args: argparse.Namespace, images: Images, model: nn.Module):
        self.args, self.images, self.model = args, images, model
        self.space = space_of(model, images)
        self.widths = {"whole": self.space.max, "cut": uniform(self.space, args.flops)}

    def lessons(self, taught: bool) -> tuple[Training, Lessons]:
        training = Training(epochs=1, taught=0.9 if taught else 0.0)
        return training, Lessons(self.images, training, None)

    def plain(self, kind: str, students: int = 1, teacher: bool = False) -> dict[str, float]:
        training = Training(epochs=1, taught=0.9 if teacher else 0.0)
        start = time.perf_counter()
        models = [self.space.build(self.widths[kind]) for _ in range(students)]
        built = time.perf_counter()
        together = SideBySide(models, self.images, training, copy.deepcopy(self.model) if teacher else None)
        first = time.perf_counter() - built
        ms = 1e3 * together.seconds_a_step(STEPS)
        together.close()
        return {"ms": ms, "ms_a_network": ms / students, "first_step_s": first, "build_s": built - start}

    def fused(self, kind: str, students: int = 1, record: bool = True) -> dict[str, float]:
        training, lessons = self.lessons(False)
        state = self.space.build(self.widths[kind]).state_dict()
        together = Class(self.space, training, lessons, students)
        torch.cuda.synchronize()
        start = time.perf_counter()
        paths = together.load([(self.widths[kind], state)] * students, record)
        lesson = lessons.first(1)[0]
        together.teach(paths, lesson, 0.01)
        torch.cuda.synchronize()
        first = time.perf_counter() - start
        ms = 1e3 * seconds(lambda: together.teach(paths, lesson, 0.01))
        return {"ms": ms, "ms_a_network": ms / students, "first_step_s": first}

    def new_widths(self, count: int = 4) -> dict[str, Any]:
        """Seconds from weights to the first recorded step, of networks of widths that were not met before."""
        rng = np.random.default_rng(0)
        training, lessons = self.lessons(False)
        together = Class(self.space, training, lessons, 1)
        found = []
        for _ in range(count):
            widths = np.maximum(4, (self.widths["cut"] * np.exp(rng.normal(0, 0.3, len(self.space)))).astype(np.int64))
            widths = np.minimum(widths, self.space.max)
            state = self.space.build(widths).state_dict()
            torch.cuda.synchronize()
            start = time.perf_counter()
            paths = together.load([(widths, state)])
            together.teach(paths, lessons.first(1)[0], 0.01)
            torch.cuda.synchronize()
            found.append(time.perf_counter() - start)
        return {"seconds": found}

    def scoring(self) -> dict[str, float]:
        """Milliseconds to ask one cut network about some images."""
        training, lessons = self.lessons(False)
        together = Class(self.space, training, lessons, 1)
        state = self.space.build(self.widths["cut"]).state_dict()
        (path,) = together.load([(self.widths["cut"], state)], record=False)
        x = self.images.val[0][0][:SCORED]
        path.engine.logits(x, path.widths, statistics="batch")
        return {"ms": 1e3 * seconds(lambda: path.engine.logits(x, path.widths, statistics="batch"), 5)}

    def profile(self, kind: str) -> list[str]:
        """The kernels that take longest in a fused step."""
        training, lessons = self.lessons(False)
        together = Class(self.space, training, lessons, 1)
        paths = together.load([(self.widths[kind], self.space.build(self.widths[kind]).state_dict())])
        lesson = lessons.first(1)[0]
        together.teach(paths, lesson, 0.01)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
            for _ in range(5):
                together.teach(paths, lesson, 0.01)
            torch.cuda.synchronize()
        events = sorted(profiler.key_averages(), key=lambda e: -e.device_time_total)
        return [f"{e.device_time_total / 5e3:8.3f} ms {e.count // 5:4d} x {e.key[:90]}" for e in events[:25]]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=File, required=True)
    parser.add_argument("--out", type=File, required=True)
    parser.add_argument("--network", default="mobilenetv2_cifar")
    parser.add_argument("--flops", type=float, default=44e6)
    parser.add_argument("--only", nargs="+", help="names of parts")
    args = parser.parse_args(arguments)
    torch.manual_seed(0)
    images = Images.cifar10(args.data, "cuda")
    model = network(args.network)
    bench = Bench(args, images, model)
    parts: dict[str, Callable[[], Any]] = {
        "fused whole": lambda: bench.fused("whole"),
        "fused cut": lambda: bench.fused("cut"),
        "plain whole": lambda: bench.plain("whole"),
        "plain cut": lambda: bench.plain("cut"),
        "plain cut, taught": lambda: bench.plain("cut", teacher=True),
        "fused whole, kernel by kernel": lambda: bench.fused("whole", record=False),
        "fused cut, kernel by kernel": lambda: bench.fused("cut", record=False),
        "fused cut, 3 side by side": lambda: bench.fused("cut", 3),
        "fused cut, 6 side by side": lambda: bench.fused("cut", 6),
        "fused new widths": bench.new_widths,
        "fused scoring": bench.scoring,
        "profile whole": lambda: bench.profile("whole"),
        "profile cut": lambda: bench.profile("cut"),
        "errors": lambda: errors(model, images),
    }
    found: dict[str, Any] = {"provenance": provenance("cuda"), "network": args.network, "flops": args.flops}
    for name, part in parts.items():
        if args.only and name not in args.only:
            continue
        start = time.perf_counter()
        try:
            found[name] = part()
        except Exception as error:  # one way that fails is no reason to lose the others
            traceback.print_exc()
            found[name] = {"failed": f"{type(error).__name__}: {error}"[:300]}
        lines = found[name] if isinstance(found[name], list) else [json.dumps(found[name])]
        print(f"{name} ({time.perf_counter() - start:.1f} s):", *lines, sep="\n    ", flush=True)
        args.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
