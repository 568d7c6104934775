"""What a fused step must move and compute, from the program of a network: the floors of its time on an H200.

    python benchmarks/speed_floor.py [--batch 256]

Counts the elements that every kernel of a step reads and writes, once each, in bf16; weights are left out. Writes
docs/results/speed-floor.json: bytes and products of the way forwards and of the whole step, the milliseconds that they
take at what the GPU reaches, and which passes the bytes are.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Any

import torch
from speed_base import Bench
from speed_work import mobilenet_and_cut

from bcnet.accel.fused_step.program import Conv, Linear, Norm, Program, compile_program
from bcnet.space.network import NetworkSpace, trace
from bcnet.utils.provenance import provenance

OUT = Path(__file__).parents[1] / "docs" / "results" / "speed-floor.json"
BANDWIDTH, RATE = 4.1e12, 600e12
"""Bytes that a copy moves in a second, and multiply-adds and additions of bf16 that large products reach."""
Pass = tuple[str, str, int]
"""Forwards or backwards, a pass by name, and its elements."""


def shapes(space: NetworkSpace, program: Program) -> dict[int, int]:
    """Elements of each value, for one image; a value of the program is the first of the graph with its number."""
    found, number = {program.input: prod(space.example[0].shape[1:])}, {}
    nodes = [n for n in space.graph.graph.nodes if isinstance(n.meta.get("val"), torch.Tensor)]
    for node in nodes:
        number[node.name] = prod(node.meta["val"].shape[1:])
    weights = {space.graph.state_of.get(a.name): n for n in nodes for a in n.all_input_nodes}
    for layer in program.layers:
        if isinstance(layer, (Conv, Linear)):
            found[layer.out] = number[weights[layer.weight].name]
        else:
            found[layer.out] = found[layer.x] if isinstance(layer, Norm) else 0
    return found


def passes(program: Program, size: dict[int, int]) -> Iterator[Pass]:
    """What the kernels read and write, as bcnet/accel/fused_step/tape.py launches them."""
    for layer in program.layers:
        if isinstance(layer, Norm):
            y, folded = size[layer.x], layer.out in program.folded
            residual = 0 if layer.residual is None else y
            if layer.x not in program.counted:
                yield "forwards", "statistics", y
            if not folded:
                yield "forwards", "normalise", 2 * y + residual
                yield "backwards", "sums of a norm", 2 * y
            yield "backwards", "gradient of a norm", 3 * y
        elif isinstance(layer, Conv):
            x, y = size[layer.x], size[layer.out]
            kind = "depthwise" if layer.depthwise else "1x1" if layer.product else "dense"
            yield "forwards", kind, x + y
            together = layer.weight in program.summed  # input and weight in one kernel
            first = layer.x == program.input
            yield "backwards", kind, y + x + (0 if first else x if together else y + x)


def floors(space: NetworkSpace, batch: int) -> dict[str, Any]:
    program = compile_program(space)
    found = list(passes(program, shapes(space, program)))
    flops = 2.0 * batch * float(space.costs["flops"](space.max[None])[0])
    result: dict[str, Any] = {}
    for name, ways, times in (("forwards", ("forwards",), 1), ("step", ("forwards", "backwards"), 3)):
        kinds = Counter[str]()
        for way, kind, elements in found:
            if way in ways:
                kinds[f"{way}, {kind}"] += 2 * batch * elements
        moved = sum(kinds.values())
        result[name] = {
            "gigabytes": moved / 1e9,
            "bytes_ms": 1e3 * moved / BANDWIDTH,
            "gigaflops": times * flops / 1e9,
            "flops_ms": 1e3 * times * flops / RATE,
            "gigabytes_by_pass": {kind: count / 1e9 for kind, count in kinds.most_common()},
        }
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=256)
    args = parser.parse_args()
    space, cut = mobilenet_and_cut(Bench("cuda"))
    slim = trace(space.build(cut), torch.randn(2, 3, 32, 32), groups=1000, check=False)
    found = {"whole": floors(space, args.batch), "44M": floors(slim, args.batch)}
    given = {"batch": args.batch, "bytes_per_second": BANDWIDTH, "flops_per_second": RATE}
    OUT.write_text(json.dumps({"provenance": provenance(), **given, **found}, indent=1) + "\n")
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
