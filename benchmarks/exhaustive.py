"""Measures scoring all widths at once.

    python benchmarks/exhaustive.py                   # CPU: 1,024 widths of the MobileNet space, against one by one
    python benchmarks/exhaustive.py --device cuda     # both spaces, 16,384 widths, both sides, 10,000 images

One-by-one scoring is timed on a sample of the same widths in the same run and scaled up. ``cpu`` times are those that
the process itself spent, which on a shared machine say more than the clock on the wall. On a GPU one batch is run
first to warm up; random images are used, since speed does not depend on them.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from bcnet.accel.enumeration.score_all import AllScores, Options, score_all
from bcnet.errors import BcnetError
from bcnet.models.channel_bench import channel_bench_mobilenet, channel_bench_resnet
from bcnet.space.network import trace
from bcnet.supernet.supernet import Supernet
from bcnet.utils.provenance import provenance

NETWORKS = {"mobilenet": channel_bench_mobilenet, "resnet": channel_bench_resnet}
Batches = list[tuple[Tensor, Tensor]]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--spaces", nargs="+", default=None, choices=list(NETWORKS))
    parser.add_argument("--images", type=int, default=None, help="512 on the CPU, 10,000 on a GPU")
    parser.add_argument("--batch", type=int, default=2048)
    parser.add_argument("--precision", default="bf16", choices=["bf16", "tf32", "fp32"], help="on a GPU")
    parser.add_argument("--plain", action="store_true", help="without the Triton kernels, which need bf16")
    parser.add_argument("--memory", type=float, default=None, help="cap in GiB: 8 on the CPU, 64 on a GPU")
    parser.add_argument("--average", action="store_true", help="also score the mean of both sides' logits")
    parser.add_argument("--overlap", action="store_true", help="both sides at the same time on a GPU")
    parser.add_argument("--sample", type=int, default=8, help="widths scored one by one")
    parser.add_argument(
        "--profile", action="store_true", help="print where a GPU spends its time on a quarter of the tree"
    )
    parser.add_argument("--warm", action="store_true", help="on a GPU: only the batch that warms up")
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--out", type=Path, default=None, help="a JSON file")
    return parser.parse_args()


def supernet(name: str, device: str) -> Supernet:
    """The bcv2 supernet of a space, with random weights and a classifier that separates widths."""
    torch.manual_seed(0)
    net = Supernet(trace(NETWORKS[name](), torch.randn(2, 3, 32, 32), groups=4), "bcv2")
    torch.nn.init.normal_(net.get_parameter("classifier.weight"), std=0.1)
    return net.to(device).eval()


def data(images: int, batch: int, device: str) -> Batches:
    """Random uint8 images as float (n, 3, 32, 32) and classes, in scoring batches."""
    rng = np.random.default_rng(0)
    pixels = torch.from_numpy(rng.integers(0, 256, (images, 3, 32, 32), dtype=np.uint8)).to(device)
    classes = torch.from_numpy(rng.integers(0, 10, images)).to(device)
    scaled = pixels.float().div_(255).sub_(0.5).div_(0.25)
    return list(zip(scaled.split(batch), classes.split(batch), strict=True))


def clocks(device: str) -> np.ndarray:
    """The time now, on the wall and as this process spent it, (2,), once the device has done its work."""
    if device == "cuda":
        torch.cuda.synchronize()
    return np.array([time.perf_counter(), time.process_time()])


@torch.no_grad()
def one_by_one(net: Supernet, batches: Batches, widths: np.ndarray, device: str) -> tuple[np.ndarray, np.ndarray]:
    """Seconds per widths with all sides, on both clocks, and the losses (sides, n)."""
    images = sum(len(y) for _, y in batches)
    losses = np.zeros((len(net.sides), len(widths)))
    start = clocks(device)
    for k, row in enumerate(widths):
        for i, side in enumerate(net.sides):
            for x, y in batches:
                losses[i, k] += F.cross_entropy(net(x, row, side).float(), y, reduction="sum").item() / images
    return (clocks(device) - start) / len(widths), losses


def subspace(net: Supernet) -> list[tuple[int, ...]]:
    """1,024 widths: two candidates (half and full) of the first four variables, all four of the other three."""
    variables = net.space.variables
    return [v.candidates[1::2] for v in variables[:4]] + [v.candidates for v in variables[4:]]


def how(args: argparse.Namespace) -> Options:
    cuda = args.device == "cuda"
    bf16 = cuda and args.precision == "bf16"
    memory = int((args.memory or (64 if cuda else 8)) * 2**30)
    return Options(memory=memory, bf16=bf16, fused=bf16 and not args.plain, average=args.average, overlap=args.overlap)


def measure(name: str, args: argparse.Namespace) -> dict[str, Any]:
    net, cuda = supernet(name, args.device), args.device == "cuda"
    batches = data(args.images or (10_000 if cuda else 512), args.batch, args.device)
    candidates = [v.candidates for v in net.space.variables] if cuda else subspace(net)
    options = how(args)
    widths = np.array(list(itertools.product(*candidates)))
    sample = np.random.default_rng(1).permutation(len(widths))[: args.sample]
    if cuda:
        warm_up(net, batches, candidates, options)
        if args.warm:
            return {}
        torch.cuda.reset_peak_memory_stats()
    else:
        one_by_one(net, batches, widths[-1:], args.device)
    start = clocks(args.device)
    scores = score_all(net, batches, candidates, options)
    seconds = clocks(args.device) - start
    torch.backends.cudnn.benchmark = False  # each of these shapes comes only once
    each, losses = one_by_one(net, batches, widths[sample], args.device)
    torch.backends.cudnn.benchmark = True
    return {
        "widths": len(widths),
        "sides": len(net.sides),
        "images": sum(len(y) for _, y in batches),
        "batch": args.batch,
        "seconds": round(seconds[0], 3),
        "cpu_seconds": round(seconds[1], 3),
        "one_by_one_sampled": len(sample),
        "one_by_one_seconds_each": round(each[0], 4),
        "one_by_one_cpu_seconds_each": round(each[1], 4),
        "one_by_one_seconds": round(each[0] * len(widths), 1),
        "speedup": round(each[0] * len(widths) / seconds[0], 1),
        "cpu_speedup": round(each[1] * len(widths) / seconds[1], 1),
        "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2) if cuda else None,
        **agreement(scores, losses, sample),
    }


def agreement(scores: AllScores, losses: np.ndarray, sample: np.ndarray) -> dict[str, float]:
    """How far the losses of the sampled widths are from those found one by one (in float32)."""
    difference = np.abs(scores.loss[:, sample] - losses)
    return {"worst_loss_difference": float(difference.max()), "spread_of_losses": float(losses.std())}


def warm_up(net: Supernet, batches: Batches, candidates: list[tuple[int, ...]], options: Options) -> None:
    """Every shape once, for every size of batch: libraries choose their algorithms and kernels are compiled."""
    for x, y in {len(y): (x, y) for x, y in batches}.values():
        for i in range(len(candidates)):
            few = [row if k in (0, 4, i) else row[-1:] for k, row in enumerate(candidates)]
            score_all(net, [(x, y)], few, options)


def profile(name: str, args: argparse.Namespace) -> None:
    """The operators that take most of the GPU's time."""
    net = supernet(name, args.device)
    batches = data(args.batch, args.batch, args.device)
    options = how(args)
    candidates = [v.candidates[-1:] if i < 3 else v.candidates for i, v in enumerate(net.space.variables)]
    score_all(net, batches, candidates, options)
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CUDA, torch.profiler.ProfilerActivity.CPU]
    ) as found:
        score_all(net, batches, candidates, options)
        torch.cuda.synchronize()
    print(found.key_averages().table(sort_by="self_cuda_time_total", row_limit=25, max_name_column_width=70))


def main() -> None:
    args = parse()
    if args.device == "cuda" and not torch.cuda.is_available():
        sys.exit("error: this machine has no CUDA device: leave out --device cuda")
    if args.threads:
        torch.set_num_threads(args.threads)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = args.precision == "tf32"
    torch.backends.cudnn.benchmark = True
    results: dict[str, Any] = {
        **provenance(args.device),
        "precision": args.precision if args.device == "cuda" else "fp32",
        "fused": how(args).fused,
    }
    for name in args.spaces or (list(NETWORKS) if args.device == "cuda" else ["mobilenet"]):
        try:
            results[name] = measure(name, args)
        except (BcnetError, RuntimeError) as error:  # one space that fails must not hide the other's figures
            results[name] = {"error": str(error)[:2000]}
        print(f"{name}: {json.dumps(results[name])}", flush=True)
        if args.out is not None:
            args.out.write_text(json.dumps(results, indent=2) + "\n")
        if args.profile and args.device == "cuda":
            profile(name, args)


if __name__ == "__main__":
    main()
