"""The half of benchmarks/supernet_speed.py that runs on a CPU: paths against plain networks, and memory."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from supernet_speed_base import NETWORKS, attempt, four_paths, keep, say

from bcnet.models import build
from bcnet.space.network import trace
from bcnet.supernet.gradients import PathGradients
from bcnet.supernet.supernet import Supernet


def cpu_network(name: str) -> Any:
    return NETWORKS[name]() if name in NETWORKS else build("mobilenetv2_cifar")


def one_pass(run: Callable[[], torch.Tensor], y: torch.Tensor) -> None:
    F.cross_entropy(run(), y).backward()


def one_path(gradients: PathGradients, x: torch.Tensor, y: torch.Tensor, widths: Any) -> None:
    """As training does it: on views, whose gradients are added in place."""
    selection = gradients.net.select(widths, "right")
    leaves = gradients.leaves(selection)
    gradients.backward(F.cross_entropy(gradients.net.run(selection, x, leaves), y), [(selection, leaves)])


def alternate(calls: dict[str, Callable[[], None]], rounds: int) -> dict[str, float]:
    """Median milliseconds of each call, taken in turn."""
    for call in calls.values():
        call()
    taken: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            taken[name].append((time.perf_counter() - start) * 1e3)
    return {name: round(float(np.median(t)), 2) for name, t in taken.items()}


def time_cpu(name: str, batch: int, rounds: int) -> dict[str, float]:
    """A path against the plain network of the same widths, in both memory formats."""
    torch.manual_seed(0)
    space = trace(cpu_network(name), torch.randn(2, 3, 32, 32), groups=4)
    widths = space.sample(np.random.default_rng(0))[0]
    y = torch.randint(0, 10, (batch,))
    calls: dict[str, Callable[[], None]] = {}
    for label, order in (("", torch.contiguous_format), ("channels-last ", torch.channels_last)):
        x = torch.randn(batch, 3, 32, 32).to(memory_format=order)
        net = Supernet(space, "bcv2").to(memory_format=order).train()
        PathGradients(net).zero()
        plain = space.build(widths, weights_of=net, side="right").to(memory_format=order).train()
        calls[f"{label}path"] = partial(one_path, PathGradients(net), x, y, widths)
        calls[f"{label}plain"] = lambda plain=plain, x=x: one_pass(lambda: plain(x), y)
    return alternate(calls, rounds)


def saved_bytes(net: Supernet, x: torch.Tensor, y: torch.Tensor, paths: list[Any]) -> int:
    """Bytes of distinct tensors that autograd keeps for the backward of the summed losses, without parameters."""
    own = {p.untyped_storage().data_ptr() for p in net.parameters()}
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        torch.stack([F.cross_entropy(net(x, w, s), y) for w, s in paths]).mean().backward()
    return sum(kept.values())


def memory_cpu(name: str, batch: int) -> dict[str, float]:
    torch.manual_seed(0)
    net = Supernet(trace(cpu_network(name), torch.randn(2, 3, 32, 32), groups=4), "bcv2").train()
    paths = four_paths(net, np.random.default_rng(0))
    x, y = torch.randn(batch, 3, 32, 32), torch.randint(0, 10, (batch,))
    joint, alternating = saved_bytes(net, x, y, paths[:2]), saved_bytes(net, x, y, paths[:1])
    return {"joint_mib": joint / 2**20, "alternating_mib": alternating / 2**20, "ratio": alternating / joint}


def on_cpu(args: argparse.Namespace, results: dict[str, Any]) -> None:
    from bcnet.training.allocator import tune_allocator

    torch.set_num_threads(args.threads)
    results["device"] = f"{os.cpu_count()} cores, {torch.get_num_threads()} threads"
    names = ["mobilenet", "mobilenetv2"]
    for name in names:
        results[f"memory {name}"] = attempt(name, lambda name=name: memory_cpu(name, args.batch))
        say(f"memory {name}: {results[f'memory {name}']}")
    for tuned in (False, True):
        if tuned:
            results["allocator tuned"] = tune_allocator()
        for name in names:
            key = f"{name}{' tuned' if tuned else ''}"
            results[key] = attempt(key, lambda name=name: time_cpu(name, args.batch, args.rounds))
            say(f"{key}: {results[key]}")
            keep(args.out, results)
