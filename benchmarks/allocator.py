"""Measures what telling glibc to keep freed memory saves in training steps, at the batches that recipes use.

    OMP_NUM_THREADS=1 python benchmarks/allocator.py [--pairs 5]

Writes docs/results/allocator.json. The setting is of a whole process, so every figure is of a process of its own; those
with and without take turns. A step is forward pass, loss, backward pass and SGD, channels last; its time is the median
of some, the processor's (page faults count) and by the clock.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time

import numpy as np
import torch
import torch.nn.functional as F
from rows import RESULTS

from bcnet.models.load import load_model
from bcnet.training.allocator import tune_allocator
from bcnet.utils.provenance import provenance

NETWORKS = {"digits_cnn": (64, 256), "cluttered_cnn": (64, 256), "resnet18_cifar": (64,), "mobilenetv2_cifar": (64,)}
"""The batches by network."""
SECONDS, WARM_UP = 12.0, 3


def one(name: str, batch: int, tuned: bool) -> None:
    """Print milliseconds of a step, the processor's and by the clock, and of those of the processor the system's."""
    torch.set_num_threads(1)
    if tuned:
        tune_allocator()
    torch.manual_seed(0)
    loaded = load_model(f"zoo:{name}")
    network = loaded.model.to(memory_format=torch.channels_last).train()  # type: ignore[call-overload]
    sgd = torch.optim.SGD(network.parameters(), lr=0.01, momentum=0.9)
    x = torch.randn(batch, *loaded.example[0].shape).contiguous(memory_format=torch.channels_last)
    y = torch.randint(0, 10, (batch,))
    found, begun = list[tuple[float, float, float]](), time.perf_counter()
    while len(found) < WARM_UP + 5 or time.perf_counter() - begun < SECONDS:
        wall, own, system = time.perf_counter(), time.process_time(), os.times().system
        sgd.zero_grad(set_to_none=True)
        F.cross_entropy(network(x), y).backward()
        sgd.step()
        found.append((time.process_time() - own, time.perf_counter() - wall, os.times().system - system))
    steps = np.array(found[WARM_UP:])
    own, wall = np.median(steps[:, :2], 0)
    print(json.dumps({"own_ms": 1e3 * own, "wall_ms": 1e3 * wall, "system_ms": 1e3 * steps[:, 2].mean()}))


def compared(name: str, batch: int, pairs: int) -> dict[str, object]:
    rows: dict[str, list[dict[str, float]]] = {"plain": [], "tuned": []}
    for number in range(pairs):
        for way in ("plain", "tuned") if number % 2 else ("tuned", "plain"):
            command = [sys.executable, __file__, "--one", name, str(batch), way]
            done = subprocess.run(command, check=True, capture_output=True, text=True)
            rows[way].append(json.loads(done.stdout))
    ratios = [p["own_ms"] / t["own_ms"] for p, t in zip(rows["plain"], rows["tuned"], strict=True)]
    walls = [p["wall_ms"] / t["wall_ms"] for p, t in zip(rows["plain"], rows["tuned"], strict=True)]
    return {**rows, "times_faster": float(np.median(ratios)), "each": ratios, "by_the_clock": float(np.median(walls))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        one(args.one[0], int(args.one[1]), args.one[2] == "tuned")
        return
    results: dict[str, object] = {"provenance": provenance(), "load": os.getloadavg()}
    for name, batches in NETWORKS.items():
        for batch in batches:
            results[f"{name}, {batch}"] = found = compared(name, batch, args.pairs)
            print(name, batch, round(found["times_faster"], 3), np.round(found["each"], 3).tolist(), flush=True)  # type: ignore[call-overload]
    (RESULTS / "allocator.json").write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
