"""What the halves of benchmarks/supernet_speed.py share: networks, paths, and what happens to results on the way."""

from __future__ import annotations

import json
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bcnet.models.channel_bench import channel_bench_mobilenet, channel_bench_resnet
from bcnet.space.network import trace
from bcnet.supernet.supernet import Supernet

NETWORKS = {"mobilenet": channel_bench_mobilenet, "resnet": channel_bench_resnet}
START = time.perf_counter()


def attempt(name: str, call: Callable[[], Any]) -> Any:
    """The result of ``call``, or a record of its failure: one broken variant must not hide the others."""
    try:
        return call()
    except Exception as error:
        print(f"FAILED {name}: {error}", flush=True)
        traceback.print_exc(limit=-4)
        return {"error": f"{type(error).__name__}: {str(error)[:400]}"}


def keep(out: Path | None, results: dict[str, Any]) -> None:
    """Write what is known so far."""
    if out:
        out.write_text(json.dumps(results, indent=1) + "\n")


def say(text: str) -> None:
    print(f"[{time.perf_counter() - START:6.1f}s] {text}", flush=True)


def supernet(name: str, device: str) -> Supernet:
    torch.manual_seed(0)
    space = trace(NETWORKS[name](), torch.randn(2, 3, 32, 32), groups=4)
    net = Supernet(space, "bcv2").to(device, memory_format=torch.channels_last)
    return net.train()


def four_paths(net: Supernet, rng: np.random.Generator) -> list[Any]:
    widths = net.space.sample(rng)[0]
    pairs = zip(net.space.variables, widths.tolist(), strict=True)
    other = np.array([net.principle.complement(v, w) for v, w in pairs])
    return [(w, side) for w in (widths, other) for side in ("left", "right")]
