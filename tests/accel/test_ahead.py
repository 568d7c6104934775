"""Kernels compiled ahead of the first step: which they are, side by side, and that a failure ends nothing."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("triton", reason="Triton comes with torch for CUDA only")

from bcnet.accel.fused_step import FusedEngine, ahead
from bcnet.accel.kernels import launch
from bcnet.models.channel_bench import channel_bench_mobilenet
from bcnet.space.network import trace
from bcnet.supernet.supernet import Supernet

SHAPE = (4, 3, 8, 8)


@pytest.fixture(scope="module")
def engine() -> FusedEngine:
    model = channel_bench_mobilenet((8, 16, 16, 16, 24, 16, 24))
    return FusedEngine(Supernet(trace(model, torch.randn(2, *SHAPE[1:]), groups=2, check=False)).train())


def keys(requests: list[launch.Request]) -> set[Any]:
    return {(request.kernel, request.key(0)) for request in requests}


def test_a_dry_run_asks_for_the_kernels_of_a_step(engine: FusedEngine) -> None:
    """Of the same types: a binary made for a whole number takes no other (seen with label smoothing)."""
    widths = engine.net.space.max
    found = ahead.dry_run(engine, SHAPE, [widths])
    x, y, paths = torch.randn(SHAPE), torch.zeros(SHAPE[0], dtype=torch.int64), [(widths, "left"), (widths, "right")]
    with launch.noting() as noted:
        engine.ready = True
        engine.step(x, y, paths, smoothing=0.1)
    assert keys(found) == keys(noted)
    assert len(keys(found)) > 15
    dry, real = ([[type(a) for a in request.arguments] for request in some] for some in (found, noted))
    assert dry == real


def test_a_dry_run_of_a_supernet_draws_widths_and_leaves_all_as_it_was(engine: FusedEngine) -> None:
    torch.manual_seed(0)
    before = [p.clone() for p in engine.net.parameters()]
    found = keys(ahead.dry_run(engine, SHAPE))
    drawn = torch.rand(1)
    torch.manual_seed(0)
    assert drawn == torch.rand(1)
    assert found > keys(ahead.dry_run(engine, SHAPE, [engine.net.space.max]))
    assert all(torch.equal(a, b) for a, b in zip(before, engine.net.parameters(), strict=True))


class Function:
    """Stands for a jitted function: the second constant it is compiled for must wait for the first."""

    def __init__(self) -> None:
        self.__name__ = "function"
        self.device_caches = {0: ()}
        self.together = threading.Barrier(2, timeout=20)
        self.compiled: list[Any] = []

    def warmup(self, *arguments: Any, grid: Any, **options: int) -> Any:
        self.together.wait()
        self.compiled.append((arguments, options))
        return arguments


def test_binaries_are_compiled_side_by_side_and_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "DIRECT", True)
    monkeypatch.setattr(launch, "_binary", lambda compiled: (compiled, ()))
    monkeypatch.setattr(launch.os, "sched_getaffinity", lambda process: range(4))
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    kernel = launch.Kernel(function := Function())
    with launch.noting() as noted:
        for constant in (1, 2, 1):
            kernel((1, 1, 1), (torch.zeros(2), 7), (constant,), warps=8)
    assert [launch.compile_all(noted, 0) for _ in range(2)] == [2, 0]
    expected = [((torch.float32, 7, constant), {"num_warps": 8}) for constant in (1, 2)]
    assert sorted(function.compiled, key=repr) == expected


def test_what_cannot_be_compiled_ahead_is_a_notice(engine: FusedEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(requests: Any, device: int) -> int:
        raise ValueError("ptxas: too many registers\nand more")

    monkeypatch.setattr(launch, "compile_all", fails)
    engine.ready = False
    x: Any = SimpleNamespace(is_cuda=True, device=torch.device("cuda", 0), shape=SHAPE)
    with pytest.warns(UserWarning, match=r"^kernels are compiled one by one.*not ahead: ptxas: too many registers$"):
        ahead.compile_ahead(engine, x)
    assert engine.ready


def test_nothing_is_compiled_for_a_cpu(engine: FusedEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ahead, "dry_run", lambda *given: pytest.fail("there is nothing to compile"))
    engine.ready = False
    ahead.compile_ahead(engine, torch.randn(SHAPE))
    assert engine.ready


def test_operators_without_a_kernel_run_dry_too() -> None:
    """Dropout, a bias and max pooling, under autograd."""
    layers = [nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Dropout(0.5)]
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10))
    net = Supernet(trace(model, torch.randn(2, *SHAPE[1:]), groups=2, check=False)).train()
    found = {request.kernel.function.__name__ for request in ahead.dry_run(FusedEngine(net), SHAPE)}
    assert {"statistics", "normalise", "norm_sums", "norm_gradient", "unpack"} <= found
