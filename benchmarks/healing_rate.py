"""What a few steps of healing at several rates make of a trained network cut to uniform widths.

    python benchmarks/healing_rate.py --data DIR --base DIR --out docs/results/healing-rate.json

``--base`` holds mobilenetv2_cifar as rivals_base.py leaves it. Channels go by L2, layers make up for dropped ones, the
network as given teaches; loss and accuracy are of held-out images. The file is written after each rate.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from parts import Images, provenance, space_of, uniform
from rivals_base import load_base

from bcnet.data import LoadOptions
from bcnet.run.stages.scoring import RATES
from bcnet.training.inherit import CutScorer, Healing

STEPS, BATCH, HELD_OUT, FLOPS = 30, 128, 1000, 44e6


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--base", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--quick", action="store_true", help="a tiny network and synthetic images")
    args = parser.parse_args(arguments)
    images = Images.synthetic("cpu") if args.quick else Images.cifar10(args.data, "cpu")
    model = load_base(args.base, "mobilenetv2_cifar", args.quick)
    space = space_of(model, images)
    widths = uniform(space, 0.5 * float(space.costs["flops"](space.max[None])[0]) if args.quick else FLOPS)
    options = LoadOptions(batch_size=BATCH, crop=images.crop, flip=True)
    batches = images.training.train(options, 1000, images.index).batches(0, 0, torch.device("cpu"))
    train = [batch for batch, _ in zip(batches, range(STEPS), strict=False)]
    x, y = (torch.cat(parts)[:HELD_OUT] for parts in zip(*images.val, strict=True))
    scorer = CutScorer(space, model, "l2", train, [(x, y)], teacher=model, healing=Healing(), reconstruct=True)
    rows: list[dict[str, Any]] = []
    for steps, lr in ((0, RATES[0]), *((STEPS, rate) for rate in RATES)):
        scorer.heal_by(steps, lr)
        loss, accuracy = (float(scorer.parts(widths, by).mean()) for by in ("loss", "score"))
        rows.append({"steps": steps, "lr": lr if steps else None, "loss": -loss, "accuracy": 100 * accuracy})
        print(rows[-1], flush=True)
        about = {"batch": BATCH, "images": len(x), "widths": widths.tolist()}
        args.out.write_text(json.dumps({"provenance": provenance("cpu"), **about, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
