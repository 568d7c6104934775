"""Times the fused step's kernels on every layer of MobileNetV2 (CIFAR-10) at several block sizes, and checks them.

    python benchmarks/kernel_blocks.py --out FILE.json [--scale 0.4] [--tiny]

For each kernel and block: the milliseconds that all layers of the network take, and the bandwidth of the bytes it must
move. Some layers, on few images, are first compared with the plain reference on the same GPU. ``--tiny`` tries the
script on a CPU.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from parts import provenance
from torch import Tensor
from without_gpu import reference

from bcnet.accel.kernels import fused
from bcnet.accel.kernels.values import Affine, Rows, Window

HIDDEN = [(32, 32), (32, 96), (32, 144), (32, 144), (32, 192), (16, 384), (16, 384), (16, 384), (16, 384), (16, 576),
          (16, 576), (8, 960), (8, 960), (8, 960)]  # fmt: skip
"""Size of images and channels of the depthwise convolutions that keep the size, with what is narrow beside them:"""
NARROW = [16, 24, 24, 32, 32, 64, 64, 64, 96, 96, 96, 160, 160, 160]
BLOCKS: dict[str, list[dict[str, Any]]] = {
    "depthwise": [{"rows": t} for t in ((8, 64, 4), (16, 32, 4))],
    "depthwise back": [{"rows_back": t} for t in ((16, 32, 4), (8, 64, 4))],
    "project back": [
        {"conv1x1_back": t, "programs": 132 * p} for t, p in (((64, 32, 4), 8), ((64, 32, 4), 6), ((128, 32, 8), 4))
    ],
    "expand": [{"conv1x1": t} for t in ((128, 64, 4), (128, 64, 8), (256, 64, 8))],
    "project": [{"conv1x1": t} for t in ((128, 64, 4), (256, 64, 8))],
}
"""Settings of ``fused.tuning`` that are tried."""


class Layer(NamedTuple):
    """A depthwise layer between two 1x1 convolutions: activations (M, C) and (M, N), and norms of both."""

    x: Rows
    d: Rows
    narrow: Rows
    norm: Affine
    after: Affine
    small: Affine
    taps: Tensor
    matrix: Tensor
    window: Window
    found: Tensor


def layer(size: int, channels: int, narrow: int, images: int, device: str) -> Layer:
    rows, kind = images * size * size, {"device": device}
    half = torch.bfloat16

    def affine(width: int) -> Affine:
        room = [torch.zeros(2 * width, **kind) for _ in range(2)]
        return Affine(torch.rand(width, **kind) + 0.5, torch.randn(width, **kind), *room, 1e-5, 2)

    x, d = (Rows.whole(torch.randn(1, rows, channels, **kind).to(half)) for _ in range(2))
    slim = Rows.whole(torch.randn(1, rows, narrow, **kind).to(half))
    matrix = (torch.randn(channels * narrow, **kind) / narrow**0.5).to(half)
    found = torch.zeros(max(9, narrow) * channels, **kind)
    made = Layer(x, d, slim, affine(channels), affine(channels), affine(narrow), torch.randn(9 * channels, **kind),
                 matrix, Window(images, size, size, 3, 1, (1, 1)), found)  # fmt: skip
    for value, norm in ((x, made.norm), (d, made.after), (slim, made.small)):
        reference.statistics(value, norm)
    reference.norm_sums([x], d, made.after, None, False)
    return made


def calls(kernels: Any) -> dict[str, tuple[float, Callable[[Layer], Any]]]:
    """By kernel: passes over a wide tensor that it needs, and how it is called."""
    return {
        "depthwise": (2, lambda t: kernels.depthwise_forward(t.x, t.taps, t.window, t.norm, t.after)),
        "depthwise back": (3, lambda t: kernels.depthwise_backward(t.d, t.x, t.taps, t.window, t.norm, t.found)),
        "expand": (1, lambda t: kernels.conv1x1_forward(t.narrow, t.matrix, t.x.channels, None, t.norm)),
        "project": (1, lambda t: kernels.conv1x1_forward(t.d, t.matrix, t.narrow.channels, t.after, t.small)),
        "project back": (2, lambda t: kernels.conv1x1_backward(t.narrow, t.d, t.matrix, t.after, t.found)),
        "statistics": (1, lambda t: kernels.statistics(t.x, t.norm)),
        "norm sums": (2, lambda t: kernels.norm_sums([t.x], t.d, t.after, None, False)),
        "normalise": (2, lambda t: kernels.normalise(t.d, t.after, None)),
        "norm gradient": (3, lambda t: kernels.norm_gradient([t.x], t.d, t.after)),
    }  # fmt: skip


def errors(name: str, one: Layer) -> list[float]:
    """How far a kernel's result and its sums are from the reference's."""
    found = []
    for kernels in (fused, reference):
        mine = _fresh(one, name)
        result = calls(kernels)[name][1](mine)
        sums = [mine.norm.sums, mine.norm.found, mine.after.sums, mine.after.found, mine.small.sums, mine.found]
        found.append([*([] if result is None else [result.dense().float()]), *sums])
    return [float((a - b).norm() / b.norm().clamp_min(1e-6)) for a, b in zip(*found, strict=True)]


def _fresh(one: Layer, name: str) -> Layer:
    """With zeros where the kernel ``name`` adds."""

    def again(norm: Affine, sums: bool, found: bool) -> Affine:
        new = [torch.zeros_like(t) if zero else t.clone() for t, zero in ((norm.sums, sums), (norm.found, found))]
        return norm._replace(sums=new[0], found=new[1])

    return one._replace(
        norm=again(one.norm, name in {"expand", "statistics"}, name == "depthwise back"),
        after=again(one.after, name == "depthwise", name in {"project back", "norm sums"}),
        small=again(one.small, name == "project", False),
        found=torch.zeros_like(one.found),
    )


def milliseconds(call: Callable[[], Any], device: str) -> float:
    """Of a replayed graph of all layers, the median of seven."""
    if device == "cpu":
        start = time.perf_counter()
        call()
        return 1e3 * (time.perf_counter() - start)
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    found = []
    for _ in range(7):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        found.append(begin.elapsed_time(end))
    return sorted(found)[3]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--scale", type=float, default=1.0, help="of all channels, rounded to eights")
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args(arguments)
    device, images = ("cpu", 1) if args.tiny else ("cuda", 256)
    torch.manual_seed(0)
    shapes = [(s, max(8, round(c * args.scale / 8) * 8), max(8, round(n * args.scale / 8) * 8))
              for (s, c), n in zip(HIDDEN, NARROW, strict=True)]  # fmt: skip
    layers = [layer(s, c, n, images, device) for s, c, n in (shapes[-1:] if args.tiny else shapes)]
    torch.backends.cudnn.allow_tf32 = False
    checked = [layer(s, c, n, 1 if args.tiny else 8, device) for s, c, n in shapes[-1 if args.tiny else 0 :: 6]]
    out: dict[str, Any] = {"provenance": provenance(), "scale": args.scale, "shapes": shapes, "rows": []}
    standard, wide = fused.tuning, sum(2 * t.x.rows * t.x.channels for t in layers)
    for name, (passes, call) in calls(fused).items():
        for change in BLOCKS.get(name, [])[: 1 if args.tiny else None]:
            fused.tuning = replace(standard, **change)
            row: dict[str, Any] = {"kernel": name, **{k: str(v) for k, v in change.items()}}
            try:
                row["errors"] = [errors(name, one) for one in checked]
                row["error"] = max(max(some) for some in row["errors"])
                ms = milliseconds(lambda call=call: [call(one) for one in layers], device)
                row |= {"ms": ms, "TB/s": passes * wide / ms / 1e9}
                print(f"{name:15s} {ms:7.3f} ms {row['TB/s']:5.2f} TB/s error {row['error']:.1e} {change}", flush=True)
            except Exception as problem:  # a block that does not fit into the GPU
                row["failed"] = str(problem)[:300]
                print(f"{name:15s} {change} {row['failed']}", flush=True)
            out["rows"].append(row)
            args.out.write_text(json.dumps(out, indent=1))
    fused.tuning = standard


if __name__ == "__main__":
    main()
