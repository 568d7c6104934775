"""The fused step on plain networks, on a CPU with the reference kernels: it is what autograd computes."""

from __future__ import annotations

import copy
from types import ModuleType
from typing import Any, ClassVar

import pytest
import reference_kernels as reference
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bcnet.accel.fused_step import PlainStep, choose, plain_step
from bcnet.accel.fused_step.program import Unsupported
from bcnet.accel.fused_step.teacher import FusedAnswers, Teacher
from bcnet.data.source import LoaderSource
from bcnet.models.channel_bench import channel_bench_mobilenet
from bcnet.training.optim import Optimisation
from bcnet.training.retraining import Distillation, Retraining, retrain


class Mixed(nn.Module):
    """Operators with kernels and without: bias, max-pooling, a norm after pooling, a gate, dropout, a shared input."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, 1, 1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2))
        self.norm = nn.BatchNorm2d(8, momentum=0.3)
        self.depthwise = nn.Sequential(nn.Conv2d(8, 8, 3, 1, 1, groups=8, bias=False), nn.BatchNorm2d(8), nn.ReLU6())
        self.gate = nn.Conv2d(8, 8, 1)
        self.drop = nn.Dropout(0.0)
        self.last = nn.Linear(8, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.stem(x))
        y = self.depthwise(x)
        y = y * torch.sigmoid(self.gate(y.mean((2, 3), keepdim=True))) + x
        return self.last(self.drop(y.mean((2, 3))))


NETWORKS = {"mixed": Mixed, "mobilenet": lambda: channel_bench_mobilenet((8, 23, 16, 24, 12, 20, 15))}


def batches(count: int, size: int = 16) -> list[tuple[Tensor, Tensor]]:
    rng = torch.Generator().manual_seed(3)
    return [
        (torch.randn(size, 3, 16, 16, generator=rng), torch.randint(0, 10, (size,), generator=rng))
        for _ in range(count)
    ]


def loss(output: Any, y: Tensor, taught: Any) -> Tensor:
    assert taught is None
    return F.cross_entropy(output, y) + 0.1 * output.square().mean()


@pytest.mark.parametrize("network", NETWORKS)
def test_steps_are_those_of_autograd(network: str) -> None:
    """Losses, weights, running statistics and counters after some steps, on batches of two sizes."""
    torch.manual_seed(0)
    plain_network = NETWORKS[network]().train()
    fused_network = copy.deepcopy(plain_network)
    given = batches(2) + batches(1, 12)
    step = PlainStep(fused_network, given[0][0], loss, None, reference, torch.float32)
    optimizers = [torch.optim.SGD(n.parameters(), 0.01, 0.9) for n in (plain_network, fused_network)]
    for x, y in given:
        optimizers[0].zero_grad()
        expected = loss(plain_network(x), y, None)
        expected.backward()
        found = step(x, y)
        torch.testing.assert_close(found, expected.detach()[None], rtol=1e-4, atol=1e-5)
        for optimizer in optimizers:
            optimizer.step()
    wanted = plain_network.state_dict()
    for name, tensor in fused_network.state_dict().items():
        torch.testing.assert_close(tensor, wanted[name], rtol=1e-3, atol=1e-4, msg=lambda m, n=name: f"{n}: {m}")
    x = given[0][0]
    answers = step.engine.logits(x, step.engine.net.space.max)
    torch.testing.assert_close(answers, plain_network.eval()(x), rtol=1e-3, atol=1e-4)


def test_a_network_that_is_another_in_training_is_left_to_autograd() -> None:
    class Other(Mixed):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * (2 if self.training else 1)

    with pytest.raises(Unsupported, match="its answers in training are not those of its traced graph"):
        PlainStep(Other(), batches(1)[0][0], loss, None, reference, torch.float32)


def test_a_network_that_drops_whole_branches_is_left_to_autograd() -> None:
    """Its graph, captured in evaluation mode, knows nothing of them, and a comparison may miss what is rare."""

    class Dropping(Mixed):
        def forward(self, x: Tensor) -> Tensor:
            if self.training:
                x = x * (torch.rand(len(x), 1, 1, 1) > 1e-9)
            return super().forward(x)

    with pytest.raises(Unsupported, match="it draws random numbers in training beside dropout's"):
        PlainStep(Dropping(), batches(1)[0][0], loss, None, reference, torch.float32)


def test_networks_without_fused_kernels_are_left_to_autograd() -> None:
    network = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 10))
    with pytest.raises(Unsupported, match="no batch norm of it has a fused kernel"):
        PlainStep(network, batches(1)[0][0], loss, None, reference, torch.float32)


def test_the_choice_says_why_it_is_plain() -> None:
    x = batches(1)[0][0]
    assert plain_step(Mixed(), x, loss) == (None, "plain, not fused: it is on cpu, not on cuda")


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda n: n.last.bias.requires_grad_(False), "last.bias is frozen"),
        (lambda n: n.double(), "its parameters are not float32"),
        (lambda n: setattr(n.norm, "momentum", None), "a batch norm averages its statistics over all batches"),
    ],
)
def test_what_cannot_be_fused_is_named(spoil: Any, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton", reason="Triton comes with torch for CUDA only")
    network = Mixed()
    spoil(network)
    x = batches(1)[0][0]
    on_gpu = type("OnGpu", (Tensor,), {"device": torch.device("cuda")})
    assert choose.why_not_plain(network, x.as_subclass(on_gpu)) == reason


def test_retraining_with_it_is_retraining_without() -> None:
    """With a teacher; and it is asked for once, for networks in bf16 alone."""
    torch.manual_seed(1)
    start, teacher = Mixed(), Mixed().eval()
    source, asked = LoaderSource(batches(3)), []

    def fast(network: nn.Module, x: Tensor, own: Any, teacher: nn.Module | None) -> PlainStep:
        asked.append(network)
        return PlainStep(network, x, own, teacher, reference, torch.float32)

    found = {}
    for name, maker, bf16 in (("autograd", None, False), ("unasked", fast, False), ("fused", fast, True)):
        network = copy.deepcopy(start)
        config = Retraining(Optimisation(epochs=2, lr=0.01, bf16=bf16), Distillation(alpha=0.5, temperature=2.0))
        retrain(network, source, config, teacher=teacher, fast=maker)
        found[name] = network.state_dict()
    assert len(asked) == 1
    for name, tensor in found["autograd"].items():
        assert torch.equal(found["unasked"][name], tensor)
        torch.testing.assert_close(found["fused"][name], tensor, rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("network", NETWORKS)
def test_a_teacher_answers_as_it_is_in_evaluation(network: str) -> None:
    """Batches of two sizes by turns, as a recorded step goes on to use what it knows of its own; tracing it again for
    another network is not needed, its weights are those of the day, and it has no gradients."""
    torch.manual_seed(0)
    teacher, given = NETWORKS[network](), batches(1)[0][0]
    teacher(given)  # running statistics of its own
    teacher.eval()
    for _ in range(2):
        answers = FusedAnswers(teacher, given, reference, torch.float32)
        for x in (given, given[:5], given):
            torch.testing.assert_close(answers(x), teacher(x).detach(), rtol=1e-4, atol=1e-5)
        with torch.no_grad():
            for p in teacher.parameters():
                p.mul_(1.2)
    assert all(p.grad is None for p in teacher.parameters())


def test_a_teacher_without_a_fused_way_teaches_as_it_is() -> None:
    layers = nn.Conv2d(3, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 10)
    teacher = nn.Sequential(*layers)
    x = batches(1)[0][0]
    with pytest.warns(UserWarning, match=r"^the teacher answers without fused kernels: no batch norm of it has a"):
        made = Teacher(teacher, x, reference, torch.float32)
    assert torch.equal(made.ask(x), teacher(x))


def test_answers_of_a_wrong_kernel_are_not_taught() -> None:
    wrong = ModuleType("kernels")
    vars(wrong).update(vars(reference))

    def halved(*given: Any) -> Any:
        found = reference.conv1x1_forward(*given)
        found.base.mul_(0.5)
        return found

    wrong.conv1x1_forward = halved  # type: ignore[attr-defined]
    teacher, x = NETWORKS["mobilenet"](), batches(1)[0][0]
    for _ in range(20):
        teacher(x)  # its running statistics are those of its activations
    with pytest.raises(Unsupported, match="its answers by fused kernels are not its own"):
        FusedAnswers(teacher, x, wrong, torch.float32)


def test_a_run_says_once_how_plain_networks_are_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    from bcnet.run.session import Run
    from bcnet.run.stages import common

    notes: list[str] = []

    class Pretended:
        """A run on a GPU, as far as the choice is concerned."""

        recipe = type("Recipe", (), {"engine": "auto"})
        device = torch.device("cuda")
        listener = type("Listener", (), {"note": staticmethod(notes.append)})
        _told: ClassVar[set[str]] = set()
        tell_once = Run.tell_once

    x = batches(1)[0][0]
    for _ in range(2):  # as two stages do
        make = common.fast_step(Pretended())  # type: ignore[arg-type]
        assert make is not None
        assert make(Mixed(), x, loss, None) is None
        assert make(Mixed(), x, loss, None) is None
    assert notes == ["the engine of plain networks is plain, not fused: it is on cpu, not on cuda"]
    Pretended.recipe.engine = "plain"
    assert common.fast_step(Pretended()) is None  # type: ignore[arg-type]
