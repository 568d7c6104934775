"""Measures what a path of a supernet costs on a CPU, against the plain network of its widths.

    OMP_NUM_THREADS=1 python benchmarks/path_speed.py digits_cnn --rounds 200

Adds its rows to docs/results/path-speed.json. Both networks compute the same on the same batch, channels last, with the
statistics of the batch. They take turns in one process, and which goes first changes with every round. A ratio is the
median of the rounds' ratios; the processor's time counts, so that other work on the machine matters less, and wall time
stands beside it. The step has no optimizer, which the paths of a step share.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from bcnet.models.load import load_model
from bcnet.space.widths import Side
from bcnet.supernet.gradients import PathGradients
from bcnet.supernet.supernet import Supernet
from bcnet.training.allocator import tune_allocator
from bcnet.utils.provenance import provenance

RESULTS = Path(__file__).parents[1] / "docs" / "results" / "path-speed.json"
SIDE: Side = "right"
WARM_UP = 2
Call = Callable[[], Any]


def step_of_path(gradients: PathGradients, x: Tensor, y: Tensor, widths: Any) -> None:
    """As training does it: on views, whose gradients are added in place."""
    selection = gradients.net.select(widths, SIDE)
    leaves = gradients.leaves(selection)
    gradients.backward(F.cross_entropy(gradients.net.run(selection, x, leaves), y), [(selection, leaves)])


@torch.no_grad()
def forward(network: Call) -> None:
    network()


def calls_of(name: str, batch: int) -> tuple[list[int], dict[str, tuple[Call, Call]]]:
    """The widths, and for each kind of work what the path does and what the plain network does."""
    torch.manual_seed(0)
    space = load_model(f"zoo:{name}").space(groups=8, base=2)
    widths = space.sample(np.random.default_rng(0))[0]
    net = Supernet(space).train()
    plain = space.build(widths, weights_of=net, side=SIDE).train()
    for network in (net, plain):
        network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    x = torch.randn(batch, *space.example[0].shape[1:]).contiguous(memory_format=torch.channels_last)
    y = torch.randint(0, 10, (batch,))
    gradients = PathGradients(net)
    gradients.zero()
    torch.testing.assert_close(net(x, widths, SIDE), plain(x), rtol=1e-3, atol=1e-3)
    return widths.tolist(), {
        "step": (
            lambda: step_of_path(gradients, x, y, widths),
            lambda: F.cross_entropy(plain(x), y).backward(),
        ),
        "forward": (
            lambda: forward(lambda: net(x, widths, SIDE)),
            lambda: forward(lambda: plain(x)),
        ),
    }


def timed(call: Call) -> tuple[float, float]:
    """Milliseconds of the processor, and by the clock."""
    wall, own = time.perf_counter(), time.process_time()
    call()
    return (time.process_time() - own) * 1e3, (time.perf_counter() - wall) * 1e3


def compared(path: Call, plain: Call, rounds: int) -> dict[str, Any]:
    for _ in range(WARM_UP):
        path()
        plain()
    found = np.empty((rounds, 2, 2))  # rounds, (path, plain), (processor, wall)
    for number in range(rounds):
        for which in (0, 1) if number % 2 else (1, 0):
            found[number, which] = timed((path, plain)[which])
    ratios = found[:, 0] / found[:, 1]
    return {
        "rounds": rounds,
        "path_ms": np.median(found[:, 0, 0]).round(3),
        "plain_ms": np.median(found[:, 1, 0]).round(3),
        "ratio": np.median(ratios[:, 0]).round(4),
        "quartiles": np.quantile(ratios[:, 0], [0.25, 0.75]).round(4).tolist(),
        "ratio_wall": np.median(ratios[:, 1]).round(4),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("network")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    torch.set_num_threads(1)
    tune_allocator()
    load = os.getloadavg()[0]
    widths, works = calls_of(args.network, args.batch)
    row: dict[str, Any] = {"batch": args.batch, "threads": 1, "load": load, "widths": widths}
    row |= {work: compared(path, plain, args.rounds) for work, (path, plain) in works.items()}
    print(json.dumps(row, indent=1))
    results = json.loads(args.out.read_text()) if args.out.exists() else {}
    results[args.network] = row | {"provenance": provenance()}
    args.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
