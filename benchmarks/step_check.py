"""Do networks learn by the fused step what they learn by autograd? Both ways on a GPU, the same weights and batches.

    python benchmarks/step_check.py --data cifar10:DIR --out FILE.json [--epochs 2] [--seconds 70]

Channel-Bench's ResNet, and MobileNetV2 at odd widths; the file has their held-out loss and accuracy either way.
"""

from __future__ import annotations

import argparse
import copy
import json
import time
from pathlib import Path
from typing import Any

import torch
from parts import provenance

from bcnet.accel import plain_step
from bcnet.data import LoadOptions, load_data
from bcnet.models.load import load_model
from bcnet.training.optim import Optimisation
from bcnet.training.retraining import Retraining, evaluate, retrain

NETWORKS = {"channel_bench_resnet": 1.0, "mobilenetv2_cifar": 0.37, "channel_bench_mobilenet": 1.0}
"""By name: the share of its widths."""


def both_ways(name: str, share: float, data: Any, args: argparse.Namespace) -> dict[str, Any]:
    space = load_model(f"zoo:{name}").space(groups=1000)
    torch.manual_seed(0)
    first = space.build(space.floor((share * space.max).astype(int))).to(args.device)
    recipe = Optimisation(epochs=args.epochs, lr=0.1, warmup=0.5, weight_decay=5e-4, bf16=True)
    row: dict[str, Any] = {"network": name, "epochs": args.epochs}
    for way in ("autograd", "fused"):
        network, said = copy.deepcopy(first), []

        def fast(net: Any, x: Any, loss: Any, teacher: Any, said: list[str] = said) -> Any:
            step, words = plain_step(net, x, loss, teacher)
            said.append(words)
            return step

        start = time.perf_counter()
        retrain(network, data.train, Retraining(recipe), fast=fast if way == "fused" else None)
        found = evaluate(network, data.val, bf16=True)
        row[way] = {**found, "seconds": time.perf_counter() - start, "engine": (said or ["autograd"])[0]}
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=70.0, help="no network is begun after half of them")
    parser.add_argument("--device", default="cuda")
    args = parser.parse_args()
    start, rows = time.perf_counter(), []
    data = load_data(args.data, device=args.device, options=LoadOptions(batch_size=256, channels_last=True))
    for name, share in NETWORKS.items():
        if time.perf_counter() - start < args.seconds / 2:
            rows.append(both_ways(name, share, data, args))
            print(json.dumps(rows[-1]), flush=True)
            args.out.write_text(json.dumps({"provenance": provenance(args.device), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
