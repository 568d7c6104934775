"""Times single kernels of the fused engine at several block sizes on a GPU, to choose its ``tuning``.

python benchmarks/kernel_blocks.py
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from triton.testing import do_bench

from bcnet.accel.kernels import fused as kernels
from bcnet.accel.kernels.values import Affine, Rows, Window

BLOCKS = {
    "reduce": [(32, 64, 4), (64, 64, 4), (16, 128, 4), (32, 128, 4), (64, 32, 4), (32, 64, 8), (16, 64, 4)],
    "apply": [(64, 64, 4), (32, 64, 4), (16, 128, 4), (32, 128, 4), (128, 64, 4)],
    "rows": [(16, 32, 2), (16, 64, 4), (16, 32, 4), (32, 32, 4), (8, 32, 2)],
    "rows_back": [(16, 32, 4), (16, 32, 2), (16, 64, 8), (8, 32, 2), (8, 64, 4), (16, 16, 2)],
    "half_back": [(16, 32, 4), (16, 64, 4), (16, 32, 2), (8, 64, 4), (16, 64, 8)],
}  # fmt: skip
"""Blocks that are tried: rows, channels, warps."""


def main() -> None:
    """Single kernels on the largest layers of the MobileNet space at average widths, against the copy's bandwidth."""
    if not torch.cuda.is_available():
        sys.exit("error: this machine has no CUDA device, which the kernels need")
    source = torch.randn(2**28, device="cuda", dtype=torch.bfloat16)
    copy_ms = float(do_bench(source.clone, warmup=10, rep=30, return_mode="median"))
    print(f"a copy: {2 * source.numel() * 2 / copy_ms / 1e9:.2f} TB/s", flush=True)
    del source
    rows, channels, sides = 65536, 480, 2
    one = sides * rows * channels * 2
    y, d = (torch.randn(sides, rows, channels, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    value, grad = Rows.whole(y), Rows.whole(d)
    ones, zeros = torch.ones(sides * channels, device="cuda"), torch.zeros(sides * channels, device="cuda")
    norm = Affine(ones, zeros, *(torch.zeros(sides, 2, channels, device="cuda") for _ in range(2)), 1e-5, 1)
    window, half = (Window(256, 16, 16, 3, stride, (1, 1)) for stride in (1, 2))
    quarter = Rows.whole(d[:, : rows // 4].contiguous())
    weight = torch.randn(sides * 9 * channels, device="cuda")
    found = torch.zeros(sides, 9, channels, device="cuda")
    calls: dict[str, tuple[str, float, Callable[[], Any]]] = {
        "statistics": ("reduce", 1, lambda: kernels.statistics(value, norm)),
        "norm sums": ("reduce", 2, lambda: kernels.norm_sums([grad], value, norm, None, False)),
        "normalise": ("apply", 2, lambda: kernels.normalise(value, norm, None)),
        "norm gradient": ("apply", 3, lambda: kernels.norm_gradient([grad], value, norm)),
        "depthwise": ("rows", 2, lambda: kernels.depthwise_forward(value, weight, window, norm, norm)),
        "depthwise back": (
            "rows_back", 3, lambda: kernels.depthwise_backward(grad, value, weight, window, norm, found),
        ),
        "depthwise back, halved": (
            "half_back", 2.25, lambda: kernels.depthwise_backward(quarter, value, weight, half, norm, found),
        ),
    }  # fmt: skip
    standard = kernels.tuning
    for name, (which, moved, call) in calls.items():
        for block in BLOCKS[which]:
            for programs in (8,) if which == "apply" else (4, 8, 16):
                kernels.tuning = replace(standard, **{which: block, "programs": 132 * programs})
                key = f"{name}, rows {block[0]} channels {block[1]} warps {block[2]} programs {programs}"
                try:
                    ms = float(do_bench(call, warmup=3, rep=12, return_mode="median"))
                except RuntimeError as error:  # a block that does not fit into the GPU
                    print(f"{key:75s} {error}", flush=True)
                else:
                    print(f"{key:75s} {ms:8.4f} ms {moved * one / ms / 1e9:6.2f} TB/s", flush=True)


if __name__ == "__main__":
    main()
