"""The fused engine against autograd: float32 on CPU with the reference kernels, which are what Triton's compute."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial

import numpy as np
import pytest
import reference_kernels as reference
import torch
import torch.nn.functional as F
from torch import nn
from traced import space_of

from bcnet.accel.fused_step import FusedEngine, choose, choose_engine
from bcnet.accel.fused_step.program import Unsupported, compile_program
from bcnet.data.source import LoaderSource
from bcnet.errors import BcnetError
from bcnet.models import MODELS
from bcnet.models.channel_bench import channel_bench_mobilenet, channel_bench_resnet
from bcnet.models.load import load_model
from bcnet.space.network import NetworkSpace, trace
from bcnet.supernet.paths import METHODS
from bcnet.supernet.supernet import Supernet
from bcnet.supernet.training import SupernetTraining, train_supernet
from bcnet.training.optim import Optimisation
from bcnet.training.task import Task

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


class Autograd:
    """The step as autograd computes it, one path at a time."""

    def __init__(self, net: Supernet):
        self.net = net

    def step(
        self, x: torch.Tensor, y: torch.Tensor, paths: list, weights: list[float], smoothing: float
    ) -> torch.Tensor:
        losses = []
        for (widths, side), weight in zip(paths, weights, strict=True):
            loss = F.cross_entropy(self.net(x, widths, side), y, label_smoothing=smoothing)
            (loss * weight).backward()
            losses.append(loss.detach())
        return torch.stack(losses)


def gradients(net: Supernet, engine: Autograd | FusedEngine, paths: list) -> tuple[torch.Tensor, dict]:
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
    losses, expected = gradients(net, Autograd(net), paths)
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
    monkeypatch.setattr(
        choose, "why_not_here", lambda net, bf16: "" if bf16 else "it computes in bf16, which was not asked for"
    )
    monkeypatch.setattr(choose, "FusedEngine", engine)
    monkeypatch.setattr(choose, "why_no_kernels", lambda device: "")


@pytest.mark.usefixtures("fused_on_cpu")
@pytest.mark.parametrize("method", ["bcv2", "autoslim"])
def test_training_is_the_same_with_both_engines(method: str) -> None:
    rng = torch.Generator().manual_seed(2)
    data = [(torch.randn(8, 3, 16, 16, generator=rng), torch.randint(0, 10, (8,), generator=rng)) for _ in range(3)]
    nets, logs = [], []
    for bf16, engine in ((False, "plain, not fused: it computes in bf16, which was not asked for"), (True, "fused")):
        net = make("mobilenet", METHODS[method].principle)
        recipe = Optimisation(epochs=2, lr=0.01, label_smoothing=0.1, weight_decay=1e-4, bf16=bf16)
        training = SupernetTraining(METHODS[method].sampling, recipe)
        choice = choose_engine(net, bf16=bf16)
        assert choice.words == engine
        trained = train_supernet(net, LoaderSource(data), training, engine=choice.engine)
        nets.append(net)
        logs.append(trained.history)
    np.testing.assert_allclose(logs[0], logs[1], rtol=1e-4)
    for (name, a), b in zip(nets[0].named_parameters(), nets[1].parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=2e-5, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"own_distillation": True}, "paths teach each other by a loss of your own"),
        ({}, "it is on cpu, not on cuda"),
    ],
)
def test_the_choice_of_engine_is_explained(settings: dict, reason: str) -> None:
    net = make("mobilenet")
    assert choose_engine(net, **settings) == (None, f"plain, not fused: {reason}")
    assert choose_engine(net, "plain", **settings) == (None, "plain, as asked for")
    with pytest.raises(BcnetError) as error:
        choose_engine(net, "fused", **settings)
    assert str(error.value) == f"the fused engine cannot train this: {reason}; use the plain engine"


def test_bf16_must_be_asked_for() -> None:
    reason = choose.why_not_here(make("mobilenet"), False, torch.device("cuda"))
    assert reason == "it computes in bf16, which was not asked for"


def test_an_unknown_engine() -> None:
    with pytest.raises(BcnetError) as error:
        choose_engine(make("mobilenet"), "fast")
    assert str(error.value) == "engine is 'fast', but it must be auto, plain or fused"


class Gated(nn.Module):
    """Squeeze-and-excitation, a concatenation, a layer scale, activations and additions without a batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 8, 3, 2, 1, bias=False), nn.BatchNorm2d(8)
        self.squeeze, self.excite = nn.Conv2d(8, 4, 1), nn.Conv2d(4, 8, 1)
        self.a, self.b = nn.Conv2d(8, 6, 3, padding=1), nn.Conv2d(8, 4, 1, bias=False)
        self.join, self.joined = nn.Conv2d(10, 8, 1, bias=False), nn.BatchNorm2d(8)
        self.scale = nn.Parameter(torch.rand(8, 1, 1))
        self.classifier = nn.Linear(8, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.silu(self.norm(self.stem(x)))
        y = y * torch.sigmoid(self.excite(F.silu(self.squeeze(y.mean((2, 3), keepdim=True)))))
        y = self.scale * y + F.relu(self.joined(self.join(torch.cat([F.gelu(self.a(y)), self.b(y)], 1))))
        return self.classifier(y.mean((2, 3)))


OPERATORS: dict[str, Callable[[], nn.Module]] = {
    "bias and pooling": lambda: nn.Sequential(
        *(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(8, 12, 3, padding=1), nn.ReLU(), nn.AvgPool2d(2), nn.Conv2d(12, 6, 1, bias=False)),
        *(nn.BatchNorm2d(6), nn.Hardswish(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 10)),
    ),
    "gate and concatenation": Gated,
    "classifier of two": lambda: nn.Sequential(
        *(nn.Conv2d(3, 8, 3, 2, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten()),
        *(nn.Linear(32, 12), nn.ReLU(), nn.Dropout(0.0), nn.Linear(12, 10)),
    ),
    "convolutions classify": lambda: nn.Sequential(
        *(nn.Conv2d(3, 8, 3, 2, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU6()),
        *(nn.Conv2d(8, 8, 3, padding=1, groups=8, bias=False), nn.BatchNorm2d(8), nn.ReLU6()),
        *(nn.Conv2d(8, 10, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten()),
    ),
}


def any_supernet(build: Callable[[], nn.Module], principle: str = "bcv2") -> Supernet:
    torch.manual_seed(0)
    net = Supernet(trace(build(), torch.randn(2, 3, 16, 16), groups=4), principle)
    for p in net.parameters():
        if p.dim() == 1:
            nn.init.uniform_(p, 0.5, 1.5)
    return net


def close(found: dict, expected: dict) -> None:
    assert found.keys() == expected.keys()
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], rtol=1e-3, atol=2e-5, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("principle", ["bcv2", "ua"])
@pytest.mark.parametrize("network", OPERATORS)
def test_what_has_no_kernel_runs_under_autograd(network: str, principle: str) -> None:
    net = any_supernet(OPERATORS[network], principle)
    assert compile_program(net.space).eager
    first, second = net.space.sample(np.random.default_rng(0), 2)
    paths = [(first, "left"), (second, "right"), (first, "right"), (net.space.max, "left")]
    losses, expected = gradients(net, Autograd(net), paths)
    found_losses, found = gradients(net, FusedEngine(net, kernels=reference, dtype=torch.float32), paths)
    torch.testing.assert_close(found_losses, losses)
    close(found, expected)


@pytest.mark.parametrize("network", ["mobilenet", "gate and concatenation"])
def test_a_loss_of_ones_own(network: str) -> None:
    net = any_supernet({**NETWORKS, **OPERATORS}[network])
    x, y = torch.randn(3, 3, 16, 16), torch.rand(3, 10)
    first, second = net.space.sample(np.random.default_rng(0), 2)
    paths = [(first, "left"), (first, "right"), (second, "left")]
    losses = [F.binary_cross_entropy_with_logits(net(x, widths, side), y) for widths, side in paths]
    (losses[0] * 0.5 + losses[1] * 0.25 + losses[2]).backward()
    expected = {name: p.grad.clone() for name, p in net.named_parameters()}
    net.zero_grad(set_to_none=True)
    engine = FusedEngine(net, kernels=reference, dtype=torch.float32)
    found = engine.step(x, y, paths, [0.5, 0.25, 1.0], loss=F.binary_cross_entropy_with_logits)
    torch.testing.assert_close(found, torch.stack(losses).detach())
    close({name: p.grad for name, p in net.named_parameters()}, expected)


@pytest.mark.usefixtures("fused_on_cpu")
def test_a_task_of_ones_own_trains_the_same_with_both_engines() -> None:
    rng = torch.Generator().manual_seed(2)
    data = [(torch.randn(8, 3, 16, 16, generator=rng), torch.rand(8, 10, generator=rng)) for _ in range(3)]
    task = Task(F.binary_cross_entropy_with_logits, lambda o, y: -(o.sigmoid() - y).abs().mean(1))
    nets = []
    for engine in ("plain", "fused"):
        net = any_supernet(OPERATORS["gate and concatenation"])
        recipe = SupernetTraining(optimisation=Optimisation(epochs=2, lr=0.01))
        train_supernet(net, LoaderSource(data), recipe, task, engine=choose_engine(net, engine).engine)
        nets.append(dict(net.named_parameters()))
    close(nets[1], nets[0])


@pytest.mark.parametrize("name", MODELS)
def test_every_network_of_the_zoo_has_a_program(name: str) -> None:
    """Most of its layers have kernels."""
    program = compile_program(space_of(load_model(f"zoo:{name}")))
    assert len(program.layers) > 2 * len(program.eager)


@pytest.mark.parametrize("name", ["vgg19_cifar", "resnet18_imagenet", "efficientnet_b0_imagenet"])
def test_networks_of_the_zoo_train_as_with_autograd(name: str) -> None:
    """Those with operators that have no kernel, on both sides of some widths."""
    space = space_of(load_model(f"zoo:{name}"))
    torch.manual_seed(0)
    net = Supernet(space)
    net.eval()  # without dropout
    x, y = torch.randn(2, *space.example[0].shape[1:]), torch.arange(2)
    widths = space.sample(np.random.default_rng(0), 1)[0]
    paths = [(widths, side) for side in net.sides]
    losses = Autograd(net).step(x, y, paths, [0.5, 0.5], 0.1)
    expected = {name: p.grad.clone() for name, p in net.named_parameters()}
    net.zero_grad(set_to_none=True)
    found = FusedEngine(net, kernels=reference, dtype=torch.float32).step(x, y, paths, [0.5, 0.5], 0.1)
    torch.testing.assert_close(found, losses, rtol=1e-3, atol=1e-4)
    largest = max(grad.norm() for grad in expected.values())
    for name, p in net.named_parameters():
        assert (p.grad - expected[name]).norm() <= 2e-2 * expected[name].norm() + 1e-4 * largest, name


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 4, 1)), "its only output must be logits"),
    ],
)
def test_unsupported_networks_say_why(model: nn.Module, reason: str) -> None:
    with pytest.raises(Unsupported) as error:
        compile_program(trace(model, torch.randn(2, 3, 16, 16), groups=4))
    assert str(error.value) == reason
