"""What the first steps of a network of new widths cost on a GPU, by how its convolutions are run.

    python benchmarks/new_shapes.py --out FILE.json [--seconds 60]

A search among inherited networks trains many networks for a few steps each, all of different shapes; whatever a library
prepares for a shape it has not seen is paid for again and again. Each way of running gets networks of its own.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from parts import provenance
from torch import nn
from torch.nn import functional

from bcnet.models import MODELS, build

WAYS: dict[str, dict[str, Any]] = {
    "cudnn bf16 nhwc": {"cudnn": True, "dtype": torch.bfloat16, "last": True},
    "cudnn bf16 nchw": {"cudnn": True, "dtype": torch.bfloat16, "last": False},
    "cudnn fp32 nchw": {"cudnn": True, "dtype": torch.float32, "last": False},
    "cudnn fp32 nhwc": {"cudnn": True, "dtype": torch.float32, "last": True},
    "native bf16 nchw": {"cudnn": False, "dtype": torch.bfloat16, "last": False},
    "native fp32 nchw": {"cudnn": False, "dtype": torch.float32, "last": False},
}
STEPS = 5


def seconds(model: nn.Module, way: dict[str, Any], device: str, batch: int) -> list[float]:
    """Seconds of each of the first steps, forward and backward."""
    layout = torch.channels_last if way["last"] else torch.contiguous_format
    model = model.to(device, memory_format=layout).train()
    x = torch.randn(batch, 3, 32, 32, device=device).contiguous(memory_format=layout)
    y = torch.randint(0, 10, (batch,), device=device)
    found = []
    for _ in range(STEPS):
        start = time.perf_counter()
        with (
            torch.backends.cudnn.flags(enabled=way["cudnn"]),
            torch.autocast(x.device.type, way["dtype"], enabled=way["dtype"] != torch.float32),
        ):
            loss = functional.cross_entropy(model(x).float(), y)
            loss.backward()
        if x.is_cuda:
            torch.cuda.synchronize()
        found.append(time.perf_counter() - start)
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--batch", type=int, default=256)
    args = parser.parse_args(arguments)
    full = np.array(MODELS["mobilenetv2_cifar"].widths)
    rng = np.random.default_rng(0)
    begun, rows = time.perf_counter(), []
    torch.zeros(1, device=args.device)
    for turn in range(3):
        for name, way in WAYS.items():
            if time.perf_counter() - begun > args.seconds:
                break
            widths = np.maximum(4, (full * rng.uniform(0.2, 0.6, len(full))).astype(int))
            found = seconds(build("mobilenetv2_cifar", widths.tolist()), way, args.device, args.batch)
            rows.append({"turn": turn, "way": name, "first": found[0], "later": min(found[1:])})
            print(json.dumps(rows[-1]), flush=True)
    args.out.write_text(json.dumps({"provenance": provenance(args.device), "batch": args.batch, "rows": rows}) + "\n")


if __name__ == "__main__":
    main()
