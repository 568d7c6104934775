"""The fused engine against autograd: float32 on CPU with the reference kernels, which are what Triton's compute."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial

import numpy as np
import pytest
import torch
from torch import nn

from bcnet.data.source import LoaderSource
from bcnet.errors import BcnetError
from bcnet.optim import Optimisation
from bcnet.space.network import NetworkSpace, trace
from bcnet.supernet import fused
from bcnet.supernet.fused import FusedEngine, PlainEngine, get_engine, reference
from bcnet.supernet.fused.program import Unsupported, compile_program
from bcnet.supernet.strategy import METHODS
from bcnet.supernet.supernet import Supernet
from bcnet.supernet.train import SupernetTraining, train_supernet
from bcnet.zoo.channel_bench import channel_bench_mobilenet, channel_bench_resnet

NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "mobilenet": lambda: channel_bench_mobilenet((8, 23, 16, 24, 12, 20, 15)),
    "resnet": lambda: channel_bench_resnet((8, 12, 16, 23, 12, 20, 15)),
    "depthwise": lambda: nn.Sequential(
        *(nn.Conv2d(3, 8, 3, 2, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU6()),
        *(nn.Conv2d(8, 8, 5, 2, 2, groups=8, bias=False), nn.BatchNorm2d(8), nn.SiLU()),
        *(nn.Conv2d(8, 12, 1, bias=False), nn.BatchNorm2d(12), nn.Hardswish()),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(12, 10)),
    ),
}


@cache
def space(network: str) -> NetworkSpace:
    return trace(NETWORKS[network](), torch.randn(2, 3, 16, 16), groups=4)


def make(network: str, principle: str = "bcv2") -> Supernet:
    torch.manual_seed(0)
    net = Supernet(space(network), principle)
    for p in net.parameters():
        if p.dim() == 1:
            nn.init.uniform_(p, 0.5, 1.5)
    return net


def gradients(net: Supernet, engine: PlainEngine | FusedEngine, paths: list) -> tuple[torch.Tensor, dict]:
    rng = torch.Generator().manual_seed(1)
    x, y = torch.randn(3, 3, 16, 16, generator=rng), torch.randint(0, 10, (3,), generator=rng)
    net.zero_grad(set_to_none=True)
    losses = engine.step(x, y, paths, [0.5, 0.25, 1.0, 0.125], smoothing=0.1)
    return losses, {name: p.grad.clone() for name, p in net.named_parameters()}


@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize("principle", ["bcv2", "ua"])
@pytest.mark.parametrize("network", NETWORKS)
def test_losses_and_gradients_are_those_of_autograd(network: str, principle: str, together: bool) -> None:
    net = make(network, principle)
    first, second = net.space.sample(np.random.default_rng(0), 2)
    paths = [(first, "left"), (second, "right"), (first, "right"), (net.space.max, "left")]
    losses, expected = gradients(net, PlainEngine(net), paths)
    engine = FusedEngine(net, kernels=reference, dtype=torch.float32, together=together)
    found_losses, found = gradients(net, engine, paths)
    torch.testing.assert_close(found_losses, losses)
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], rtol=1e-3, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")


def test_gradients_are_added_to_those_that_are_there() -> None:
    net = make("mobilenet")
    paths = [(net.space.max, "left")] * 4
    engine = FusedEngine(net, kernels=reference, dtype=torch.float32)
    _, once = gradients(net, engine, paths)
    net.zero_grad(set_to_none=True)
    for p in net.parameters():
        p.grad = torch.ones_like(p)
    rng = torch.Generator().manual_seed(1)
    x, y = torch.randn(3, 3, 16, 16, generator=rng), torch.randint(0, 10, (3,), generator=rng)
    engine.step(x, y, paths, [0.5, 0.25, 1.0, 0.125], smoothing=0.1)
    for name, p in net.named_parameters():
        torch.testing.assert_close(p.grad, once[name] + 1)


@pytest.fixture
def fused_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Training takes the fused engine with the reference kernels in float32."""
    engine = partial(FusedEngine, kernels=reference, dtype=torch.float32)
    monkeypatch.setattr(fused, "why_not_fused", lambda net: "")
    monkeypatch.setattr(fused, "FusedEngine", engine)


@pytest.mark.usefixtures("fused_on_cpu")
@pytest.mark.parametrize("method", ["bcv2", "autoslim"])
def test_training_is_the_same_with_both_engines(method: str) -> None:
    rng = torch.Generator().manual_seed(2)
    data = [(torch.randn(8, 3, 16, 16, generator=rng), torch.randint(0, 10, (8,), generator=rng)) for _ in range(3)]
    nets, logs = [], []
    for bf16, engine in ((False, "plain, not fused: it computes in bf16, which was not asked for"), (True, "fused")):
        net = make("mobilenet", METHODS[method].principle)
        recipe = Optimisation(epochs=2, lr=0.01, label_smoothing=0.1, weight_decay=1e-4, bf16=bf16)
        training = SupernetTraining(METHODS[method].strategy, recipe)
        trained = train_supernet(net, LoaderSource(data), training)
        assert trained.engine == engine
        nets.append(net)
        logs.append(trained.history)
    np.testing.assert_allclose(logs[0], logs[1], rtol=1e-4)
    for (name, a), b in zip(nets[0].named_parameters(), nets[1].parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=2e-5, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({}, "it computes in bf16, which was not asked for"),
        ({"bf16": True}, "it is on cpu, not on cuda"),
    ],
)
def test_a_forced_engine_says_why_it_cannot_train(settings: dict, reason: str) -> None:
    training = SupernetTraining(optimisation=Optimisation(epochs=1, **settings), engine="fused")
    with pytest.raises(BcnetError) as error:
        train_supernet(make("mobilenet"), LoaderSource([(torch.zeros(2, 3, 16, 16), torch.zeros(2).long())]), training)
    assert str(error.value) == f"the fused engine cannot train this: {reason}; use the plain engine"


def test_the_choice_of_engine_is_explained() -> None:
    net = make("mobilenet")
    engine = get_engine(net)
    assert (engine.name, engine.reason) == ("plain", "it is on cpu, not on cuda")
    with pytest.raises(BcnetError) as error:
        get_engine(net, "fused")
    assert str(error.value) == (
        "the fused engine cannot run this network: it is on cpu, not on cuda; use the plain engine"
    )
    with pytest.raises(BcnetError) as error:
        get_engine(net, "fast")
    assert str(error.value) == "engine is 'fast', but it must be auto, plain or fused"


@pytest.mark.parametrize(
    ("layers", "reason"),
    [
        ([nn.Conv2d(3, 8, 3)], "it has a convolution with a bias"),
        ([nn.Conv2d(3, 8, 3, bias=False), nn.ReLU()], "it has an activation that does not follow a batch norm"),
        ([nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.MaxPool2d(2)], "it has a layer 'max_pool2d'"),
    ],
)
def test_unsupported_networks_say_why(layers: list[nn.Module], reason: str) -> None:
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10))
    with pytest.raises(Unsupported) as error:
        compile_program(trace(model, torch.randn(2, 3, 16, 16), groups=4))
    assert str(error.value) == reason
