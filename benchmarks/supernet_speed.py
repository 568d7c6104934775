"""Measures a training step of the supernet: plain and fused engine on CUDA, paths against plain networks on CPU.

    python benchmarks/supernet_speed.py --device cuda --out docs/results/supernet-speed-cuda.json
    python benchmarks/supernet_speed.py --device cpu --out docs/results/supernet-speed-cpu.json

Variants take turns in one process; figures are medians after a warm-up. See docs/results/supernet-speed.md.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).parents[1]))

from supernet_speed_base import NETWORKS, attempt, four_paths, keep, say, supernet
from supernet_speed_cpu import on_cpu

from bcnet.accel.fused_step import FusedEngine
from bcnet.utils.provenance import provenance

GOALS_MS = {"mobilenet": 9.0, "resnet": 14.0}
WARM_UP = 80
"""Steps before the clock starts, in which every pair of widths of a convolution occurs: cuDNN plans each anew."""


class PlainEngine:
    """Autograd through the supernet, one path at a time, so that only one path's activations are held."""

    def __init__(self, net: Any, autocast: bool = False):
        self.net, self.autocast = net, autocast

    def step(self, x: Any, y: Any, paths: Any, weights: Any = None, smoothing: float = 0) -> Any:
        losses = []
        for (widths, side), weight in zip(paths, weights or [1 / len(paths)] * len(paths), strict=True):
            with torch.autocast(x.device.type, torch.bfloat16, enabled=self.autocast):
                loss = F.cross_entropy(self.net(x, widths, side), y, label_smoothing=smoothing)
            (loss * weight).backward()
            losses.append(loss.detach())
        return torch.stack(losses)


class JointEngine(PlainEngine):
    """The losses of all paths summed, one backward: what a first try writes."""

    def step(self, x: Any, y: Any, paths: Any, weights: Any = None, smoothing: float = 0) -> Any:
        with torch.autocast(x.device.type, torch.bfloat16, enabled=self.autocast):
            losses = torch.stack([F.cross_entropy(self.net(x, w, s), y) for w, s in paths])
        losses.mean().backward()
        return losses.detach()


def batches(batch: int) -> Iterator[Any]:
    """Endless augmented batches of random images on the device."""
    from bcnet.data.device import DeviceData
    from bcnet.data.options import LoadOptions

    rng = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (8192, 3, 32, 32), dtype=torch.uint8, generator=rng)
    labels = torch.randint(0, 10, (8192,), generator=rng)
    data = DeviceData(images, labels, mean=[127.0] * 3, std=[64.0] * 3, classes=10, pad=4, device="cuda")
    source = data.train(LoadOptions(batch_size=batch, crop=4, flip=True, channels_last=True))
    for epoch in range(1_000_000):
        yield from source.batches(epoch)


class Variant:
    """A supernet, an engine, an optimizer and its data: ``step()`` is one training step."""

    def __init__(self, network: str, engine: str, batch: int):
        self.net = supernet(network, "cuda")
        fused = engine.startswith("fused")
        if engine == "joint":
            self.engine: Any = JointEngine(self.net, True)
        elif engine == "plain":
            self.engine = PlainEngine(self.net, True)
        else:
            self.engine = FusedEngine(self.net, together="single" not in engine)
        self.optimizer = torch.optim.SGD(
            self.net.parameters(), 0.01, momentum=0.9, weight_decay=5e-4, nesterov=True, fused=fused or None
        )
        self.keep = fused
        self.data = batches(batch)
        rng = np.random.default_rng(1)
        self.paths = [four_paths(self.net, rng) for _ in range(2 * WARM_UP)]
        self.count = 0

    def step(self) -> Any:
        x, y = next(self.data)
        self.count += 1
        losses = self.engine.step(x, y, self.paths[self.count % len(self.paths)])
        self.optimizer.step()
        self.engine.zero() if self.keep else self.optimizer.zero_grad()
        return losses


def check_cuda(network: str, batch: int) -> dict[str, Any]:
    """The fused engine against float32 autograd, and bf16 autocast against the same, on one batch."""
    net = supernet(network, "cuda")
    for p in net.parameters():
        if p.dim() == 1:
            torch.nn.init.uniform_(p, 0.5, 1.5)
    x = torch.randn(batch, 3, 32, 32, device="cuda").to(memory_format=torch.channels_last)
    y = torch.randint(0, 10, (batch,), device="cuda")
    paths = four_paths(net, np.random.default_rng(5))
    torch.backends.cudnn.allow_tf32 = False
    found = {}
    for name, engine in {
        "float32": PlainEngine(net, False),
        "autocast": PlainEngine(net, True),
        "fused": FusedEngine(net),
        "fused single": FusedEngine(net, together=False),
    }.items():
        net.zero_grad(set_to_none=True)
        losses = attempt(name, lambda engine=engine: engine.step(x, y, paths, smoothing=0.1))
        if isinstance(losses, torch.Tensor):
            found[name] = losses.cpu(), {n: p.grad.clone() for n, p in net.named_parameters()}
    torch.backends.cudnn.allow_tf32 = True
    exact_loss, exact = found.pop("float32")
    whole = {n: g.norm() for n, g in exact.items()}
    report: dict[str, Any] = {"losses": exact_loss.tolist()}
    for name, (losses, grads) in found.items():
        errors = {n: float((grads[n] - exact[n]).norm() / whole[n]) for n in exact if whole[n] > 1e-5}
        worst = max(errors, key=lambda n: errors[n] if np.isfinite(errors[n]) else np.inf)
        report[name] = {
            "loss": float((losses - exact_loss).abs().max()),
            "gradient_median": float(np.median(list(errors.values()))),
            "gradient_worst": [worst, errors[worst]],
        }
    return report


def time_cuda(network: str, batch: int, engines: list[str], rounds: int, steps: int) -> dict[str, Any]:
    """Milliseconds a step (wall clock, variants in turn), launching alone, and peak memory."""
    torch.cuda.empty_cache()
    variants: dict[str, Variant] = {}
    results: dict[str, Any] = {}
    for name in engines:

        def prepare(name: str = name) -> None:
            variant = Variant(network, name, batch)
            for _ in range(WARM_UP):
                variant.step()
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            for _ in range(4):
                variant.step()
            torch.cuda.synchronize()
            results[name] = {"peak_mib": round((torch.cuda.max_memory_allocated() - before) / 2**20)}
            variants[name] = variant

        failed = attempt(f"{network} {name}", prepare)
        if failed:
            results[name] = failed
        else:
            say(f"{network} {name} is warm")
    taken: dict[str, list[float]] = {n: [] for n in variants}
    launched: dict[str, list[float]] = {n: [] for n in variants}
    for _ in range(rounds):
        for name, variant in variants.items():
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(steps):
                variant.step()
            torch.cuda.synchronize()
            taken[name].append((time.perf_counter() - start) / steps * 1e3)
            for _ in range(2):
                start = time.perf_counter()
                variant.step()
                launched[name].append((time.perf_counter() - start) * 1e3)
                torch.cuda.synchronize()
    for name, variant in variants.items():
        profile = attempt(f"profile {name}", lambda v=variant: kernel_times(v, 4))
        results[name] |= {
            "step_ms": round(float(np.median(taken[name])), 3),
            "spread_ms": [round(min(taken[name]), 3), round(max(taken[name]), 3)],
            "launch_ms": round(float(np.median(launched[name])), 3),
            "images_paths_per_second": round(batch * 4 / float(np.median(taken[name])) * 1e3),
            **profile,
        }
        say(f"{network} {batch} {name}: { {k: v for k, v in results[name].items() if k != 'table'} }")
    return results


def kernel_times(variant: Variant, steps: int) -> dict[str, Any]:
    """Busy time of the GPU a step, launches a step, and the kernels that took it."""
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        for _ in range(steps):
            variant.step()
        torch.cuda.synchronize()
    rows = [(e.key, e.self_device_time_total / steps / 1e3, e.count / steps) for e in found.key_averages()]
    rows = sorted((r for r in rows if r[1] > 0), key=lambda r: -r[1])
    return {
        "gpu_ms": round(sum(r[1] for r in rows), 3),
        "kernels": round(sum(r[2] for r in rows)),
        "table": [[name[:110], round(ms, 4), round(count, 1)] for name, ms, count in rows[:28]],
    }


def on_cuda(args: argparse.Namespace, results: dict[str, Any]) -> None:
    results["device"] = torch.cuda.get_device_name()
    for name in args.networks:
        results[f"check {name}"] = attempt(f"check {name}", lambda name=name: check_cuda(name, 64))
        say(f"check {name}: {json.dumps(results[f'check {name}'])}")
    for batch in args.batches:
        steps = max(8, 4096 // batch)
        for name in args.networks:
            key = f"{name} {batch}"
            plan = (name, batch, args.engines, args.rounds, steps)
            results[key] = attempt(key, lambda plan=plan: time_cuda(*plan))
            keep(args.out, results)


def show_cuda(results: dict[str, Any], networks: list[str]) -> None:
    for name in networks:
        for row in results.get(f"{name} 256", {}).get("fused", {}).get("table", []):
            print(f"  {name} {row[1]:8.4f} ms {row[2]:6.1f} x {row[0]}")
    print(f"{'network batch':16s} {'engine':14s} {'step':>8s} {'gpu':>8s} {'launch':>8s} kernels img·paths/s  peak MiB")
    for name in networks:
        for batch in (256, 1024):
            for engine, r in results.get(f"{name} {batch}", {}).items():
                if "step_ms" not in r:
                    print(f"{name} {batch} {engine}: {r}")
                    continue
                print(
                    f"{name + ' ' + str(batch):16s} {engine:14s} {r['step_ms']:8.2f} {r.get('gpu_ms', 0):8.2f} "
                    f"{r['launch_ms']:8.2f} {r.get('kernels', 0):7d} {r['images_paths_per_second']:11d} "
                    f"{r['peak_mib']:9d}"
                )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), required=True)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batch", type=int, default=32, help="images of a batch on CPU")
    parser.add_argument("--threads", type=int, default=2, help="threads on CPU")
    parser.add_argument("--networks", nargs="*", default=list(NETWORKS))
    parser.add_argument("--engines", nargs="*", default=["joint", "plain", "fused single", "fused"])
    parser.add_argument("--batches", nargs="*", type=int, default=[256, 1024])
    args = parser.parse_args()
    results: dict[str, Any] = {
        **provenance(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, "
        f"torch {torch.__version__}",
        "load": os.getloadavg()[0],
    }
    (on_cuda if args.device == "cuda" else on_cpu)(args, results)
    keep(args.out, results)
    if args.device == "cuda":
        show_cuda(results, args.networks)


if __name__ == "__main__":
    main()
