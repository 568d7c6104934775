"""Compiles the fused kernels of all rows of benchmarks/speed_rows.py ahead, by one process on all cores.

    python benchmarks/speed_kernels.py cuda

Networks are traced and run dry one after the other while the kernels of those before are compiled.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import torch
from speed_base import Bench, supernet_of, uniform
from speed_work import RECIPES, mobilenet, mobilenet_and_cut, wide_resnet50

from bcnet.accel.fused_step import FusedEngine, proof
from bcnet.accel.fused_step.ahead import dry_run
from bcnet.accel.kernels import launch
from bcnet.models import build
from bcnet.models.channel_bench import channel_bench_mobilenet, channel_bench_resnet
from bcnet.run.recipe import Recipe
from bcnet.space.network import NetworkSpace, trace
from bcnet.supernet.supernet import Supernet


def plain(space: NetworkSpace) -> FusedEngine:
    return FusedEngine(Supernet(space, "ua").train(), track=True)


def wanted(bench: Bench) -> Iterator[tuple[str, list[launch.Request]]]:
    """What steps, answers and the proof launch, network by network."""
    small, large = (16, 3, 32, 32), (4, 3, 224, 224)
    space, cut = mobilenet_and_cut(bench)
    engine = plain(space)
    yield "MobileNetV2", dry_run(engine, small, [space.max, cut]) + dry_run(engine, small, [space.max], "running")
    x = torch.randn(2, 3, proof.SIZE, proof.SIZE)
    space = trace(proof._Example(), x, check=False)
    yield "proof", dry_run(plain(space), (proof.IMAGES, *x.shape[1:]), [space.max])
    for name, made in (("MobileNet", channel_bench_mobilenet), ("ResNet", channel_bench_resnet)):
        yield f"{name} space", dry_run(FusedEngine(supernet_of(made(), 32, 4)), small)
    engine = FusedEngine(supernet_of(mobilenet(bench), 32, 8))
    yield "MobileNetV2's supernet", dry_run(engine, small) + dry_run(engine, small, answers="batch")
    space = trace(wide_resnet50(bench), torch.randn(2, 3, 224, 224), groups=1000, check=False)
    yield "ResNet50", dry_run(plain(space), large, [space.max])
    for name in RECIPES:
        recipe = Recipe.read(name)
        net = supernet_of(build(recipe.model.removeprefix("zoo:")), 224, recipe.groups)
        slim = uniform(net.space, recipe.budgets[0])
        yield name, dry_run(FusedEngine(net), large) + dry_run(plain(net.space), large, [slim])


def main() -> None:
    device, begun = sys.argv[1], time.perf_counter()
    if device == "cuda":
        torch.cuda.init()
    with ThreadPoolExecutor(1) as pool:
        waiting = []
        for name, requests in wanted(Bench(device)):
            print(f"{time.perf_counter() - begun:5.1f} s {name}: {len(requests)} launches", flush=True)
            if device == "cuda":
                waiting.append((name, pool.submit(launch.compile_all, requests, 0)))
        for name, made in waiting:
            outcome = made.exception() or f"{made.result()} kernels"
            print(f"{time.perf_counter() - begun:5.1f} s {name}: {outcome}", flush=True)


if __name__ == "__main__":
    main()
