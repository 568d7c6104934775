"""Rank correlations of all methods on Channel-Bench-Macro, one experiment after the other.

    python benchmarks/channel_bench.py --data cifar10:DIR --table DIR --out FILE mobilenet:bcv2:26:0 resnet:ua:12:0 ...

An experiment is SPACE:METHOD:EPOCHS:SEED, with further settings as in ``mobilenet:bcv2:26:0:lr=0.2:ema=0.99``.
Results are added to FILE (a JSON list) as they come; experiments already in it are skipped, and none is begun
after ``--limit`` seconds.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import torch

from bcnet.bench.rank import RankConfig, rank
from bcnet.bench.table import ChannelBench
from bcnet.data import LoadOptions, load_data
from bcnet.errors import BcnetError


def parse(text: str) -> RankConfig:
    space, method, epochs, seed, *settings = text.split(":")
    given: dict[str, Any] = {"space": space, "method": method, "epochs": int(epochs), "seed": int(seed)}
    for setting in settings:
        name, _, value = setting.partition("=")
        if name not in {f.name for f in fields(RankConfig)}:
            raise BcnetError(f"unknown setting {name!r} in {text!r}")
        given[name] = json.loads(value) if value in ("true", "false") or value[0].isdigit() else value
    return RankConfig(**given)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("experiments", nargs="+", type=parse)
    parser.add_argument("--data", required=True)
    parser.add_argument("--table", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--folder", type=Path, help="for the scores of all widths and scatter plots")
    parser.add_argument("--limit", type=float, default=float("inf"))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--batch", type=int, default=256)
    args = parser.parse_args()
    started = time.perf_counter()
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    options = LoadOptions(batch_size=args.batch, channels_last=True)
    data = load_data(args.data, device=args.device, options=options)
    print(f"data ready after {time.perf_counter() - started:.0f} s", flush=True)
    tables = {name: ChannelBench.load(name, args.table) for name in {c.space for c in args.experiments}}
    results = json.loads(args.out.read_text()) if args.out.exists() else []
    for config in args.experiments:
        if any(all(r.get(k) == v for k, v in asdict(config).items()) for r in results):
            continue
        if time.perf_counter() - started > args.limit:
            print(f"skipped {config.name}: the time is up", flush=True)
            continue
        try:
            report = rank(config, data, tables[config.space], args.device, args.folder)
        except Exception as error:
            print(f"{config.name} failed: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
            continue
        results.append(report)
        args.out.write_text(json.dumps(results, indent=2) + "\n")
        print(
            f"{config.name}: Kendall {report['kendall']:.3f} Pearson {report['pearson']:.3f}, test "
            f"{report.get('test', {}).get('accuracy', {}).get('kendall', float('nan')):.3f}, by loss "
            f"{report.get('held_out', {}).get('loss', {}).get('kendall', float('nan')):.3f}; mean "
            f"{report.get('held_out', {}).get('mean')}; train "
            f"{report.get('train_seconds', 0):.0f} s, score {report.get('score_seconds', 0):.0f} s",
            flush=True,
        )


if __name__ == "__main__":
    main()
