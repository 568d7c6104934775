"""What the Triton kernels compile to for a GPU, which needs none: whether a change of their source changed the code.

    python benchmarks/kernel_binaries.py --out before.json
    python benchmarks/kernel_binaries.py --out after.json --against before.json

A training step and a scoring of whole spaces run on a CPU with every launch noted and none made; each kernel is then
compiled as it was asked for, and the digest of its PTX, without names and lines of the source, is written down. What
was launched, in which grid and with which numbers, has a digest too, so that a change of what launches kernels is held
against what it was.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

os.environ |= {"TRITON_DISABLE_LINE_INFO": "1", "TRITON_DEFAULT_FP_FUSION": "1"}

import torch
import triton
from torch import Tensor, nn
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.autotuner import Autotuner
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

from bcnet import Supernet, trace
from bcnet.accel.enumeration.score_all import Options, score_all
from bcnet.accel.fused_step import FusedEngine
from bcnet.accel.kernels import enum_conv, values
from bcnet.models import build
from bcnet.models.channel_bench import channel_bench_mobilenet, channel_bench_resnet
from bcnet.utils.provenance import provenance

TARGET = GPUTarget("cuda", 90, 32)
TYPES = {torch.bfloat16: "bf16", torch.float32: "fp32", torch.int64: "i64", torch.float64: "fp64"}
LAUNCH = ("num_warps", "num_stages")

Asked = dict[str, tuple[JITFunction[Any], ASTSource, dict[str, Any]]]


@contextmanager
def noted() -> Iterator[tuple[Asked, Any]]:
    """Launches are noted, each with what it would be compiled from, and all of them in a digest."""
    asked: Asked = {}
    launched = hashlib.sha256()

    def note(function: Any, *args: Any, grid: Any, warmup: bool, **given: Any) -> None:
        options = {name: given.pop(name) for name in LAUNCH if name in given}
        source = _source(function, dict(zip(function.arg_names, args, strict=False)) | given)
        key = f"{function.module}.{function.__name__} {source.signature} {source.constants} {source.attrs} {options}"
        asked[key] = function, source, options
        numbers = [value for value in (*args, *given.values()) if isinstance(value, (int, float))]
        launched.update(repr((key, grid, numbers)).encode())

    def each_choice(tuner: Any, *args: Any, **given: Any) -> None:
        for choice in tuner.configs:
            tuner.fn.run(*args, **given, **choice.all_kwargs())

    with patch.object(JITFunction, "run", note), patch.object(Autotuner, "run", each_choice):
        yield asked, launched


def _source(function: Any, given: dict[str, Any]) -> ASTSource:
    """As Triton specialises a launch: on constants, on ones, and on what 16 divides."""
    signature, constants, attributes = {}, {}, {}
    for parameter in function.params:
        value, place = given[parameter.name], (parameter.num,)
        if (
            parameter.is_constexpr
            or value is None
            or (type(value) is int and value == 1 and not parameter.do_not_specialize)
        ):
            signature[parameter.name], constants[place] = "constexpr", value
        else:
            signature[parameter.name] = _type(value, parameter.annotation_type)
            address = isinstance(value, Tensor)
            if address or (type(value) is int and not parameter.do_not_specialize and value % 16 == 0):
                attributes[place] = [["tt.divisibility", 16]]
    return ASTSource(function, signature, constants, attributes)


def _type(value: Any, annotation: str) -> str:
    if isinstance(value, TensorDescriptor):
        return f"tensordesc<{TYPES[value.base.dtype]}{list(value.block_shape)}>"
    if isinstance(value, Tensor):
        return f"*{TYPES[value.dtype]}"
    return annotation or ("fp32" if isinstance(value, float) else "i32" if abs(value) < 2**31 else "i64")


class Mixed(nn.Module):
    """Depthwise convolutions of all kinds, between 1x1 convolutions."""

    def __init__(self) -> None:
        super().__init__()
        forms = ((32, 3, 1), (48, 3, 2), (64, 5, 1), (24, 3, 2))
        widths = [16, *(width for width, _, _ in forms)]
        self.stem = self.block(3, 16, 3)
        self.blocks = nn.ModuleList(
            nn.Sequential(self.block(before, width, 1), self.block(width, width, kernel, stride, width))
            for before, (width, kernel, stride) in zip(widths, forms, strict=False)
        )
        self.head = nn.Linear(24, 10)

    @staticmethod
    def block(inputs: int, outputs: int, kernel: int, stride: int = 1, groups: int = 1) -> nn.Sequential:
        convolution = nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, groups=groups, bias=False)
        return nn.Sequential(convolution, nn.BatchNorm2d(outputs), nn.SiLU())

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((2, 3)))


def steps() -> None:
    """Training steps of both sides of a supernet, and an answer by running statistics."""
    for network, size in ((Mixed(), 14), (build("mobilenetv2_cifar"), 32), (channel_bench_resnet(), 32)):
        net = Supernet(trace(network, torch.randn(2, 3, size, size), groups=4, check=False))
        for given in (net, net.to(memory_format=torch.channels_last)):
            engine = FusedEngine(given)
            x, y, wide = torch.randn(4, 3, size, size), torch.zeros(4, dtype=torch.int64), net.space.max
            engine.step(x, y, [(wide, "left"), (wide, "right")], smoothing=0.1)
            engine.step(x, y, [(wide, "left"), (net.space.min, "right")], teachers=[None, 0])
            engine.logits(x, wide)


def scorings() -> None:
    """A few configurations of Channel-Bench's spaces, all at once."""
    for network in (channel_bench_mobilenet(), channel_bench_resnet()):
        net = Supernet(trace(network, torch.randn(2, 3, 32, 32), groups=4, check=False))
        data = [(torch.randn(128, 3, 32, 32), torch.zeros(128, dtype=torch.int64))]
        first = [v.candidates[-1:] for v in net.space.variables[:-3]]
        few = [*first, *((v.max // 2, v.max) for v in net.space.variables[-3:])]
        score_all(net, data, few, Options(memory=2**40, bf16=True, fused=True))


def digest(function: Any, source: ASTSource, options: dict[str, Any]) -> str:
    text = triton.compile(source, target=TARGET, options=options).asm["ptx"].replace(function.__name__, "kernel")
    lines = [line for line in text.splitlines() if not re.match(r"\s*(//|\.loc|\.file|$)", line)]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def _changed(before: dict[str, str], after: dict[str, str]) -> list[str]:
    return [key for key in sorted(before | after) if before.get(key) != after.get(key)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--against", type=Path)
    given = parser.parse_args()
    far = patch.object(values, "distance", lambda tensors: 0)  # between addresses, which no two runs have in common
    roomy, programs = patch.object(enum_conv, "_roomy", lambda: True), patch.object(enum_conv, "_programs", lambda: 132)
    with far, roomy, programs, noted() as (asked, launched):
        steps()
        scorings()
    found = {"all launches": launched.hexdigest()[:16]}
    found |= {key: digest(*what) for key, what in sorted(asked.items())}
    kernels = sorted({f"{function.module}.{function.__name__}" for function, _, _ in asked.values()})
    changed = _changed(json.loads(given.against.read_text())["digests"], found) if given.against else []
    given.out.write_text(json.dumps({"kernels": kernels, "digests": found, **provenance()}, indent=1) + "\n")
    print(f"{len(asked)} binaries of {len(kernels)} kernels{', changed:' if changed else ''}", *changed, sep="\n")
    sys.exit(bool(changed))


if __name__ == "__main__":
    main()
