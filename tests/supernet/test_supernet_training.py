"""Training a supernet: what a step does, that it learns, and what is said where it cannot."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import reference_kernels as reference
import torch
import torch.nn.functional as F
import toy
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from bcnet import models as zoo
from bcnet.data import LoadOptions, from_loaders, load_data
from bcnet.data.source import LoaderSource
from bcnet.errors import BcnetError
from bcnet.space.network import trace
from bcnet.supernet.paths import METHODS, PathSampling
from bcnet.supernet.scoring import Evaluator
from bcnet.supernet.supernet import Supernet
from bcnet.supernet.training import SupernetTraining, train_supernet
from bcnet.training import checkpoint
from bcnet.training.optim import Optimisation
from bcnet.training.task import Task, soft_cross_entropy

pytestmark = pytest.mark.usefixtures("one_thread")


def one_step(net: Supernet, sampling: PathSampling, task: Task | None = None, **settings: Any) -> list[Tensor]:
    """What one step of plain SGD with lr 1 takes from the weights: the gradient."""
    before = [p.detach().clone() for p in net.parameters()]
    x, y = toy.images(16)
    dtype = next(net.parameters()).dtype
    backward, engine = settings.pop("backward", "path"), settings.pop("engine", None)
    recipe = Optimisation(**{"epochs": 1, "lr": 1.0, "momentum": 0.0, **settings})
    training = SupernetTraining(sampling, recipe, seed=5, backward=backward)
    train_supernet(net, LoaderSource([(x.to(dtype), y)]), training, task, engine=engine)
    return [a - p.detach() for a, p in zip(before, net.parameters(), strict=True)]


def double(principle: str) -> Supernet:
    net = toy.supernet(principle, dropout=0.0)
    return net.double()


@pytest.mark.parametrize("name", METHODS)
def test_a_step_is_the_gradient_of_the_strategys_loss(name: str) -> None:
    """The mean over the paths of cross entropy; for AutoSlim, of distillation from the widest."""
    method = METHODS[name]
    net, x, y = double(method.principle), *toy.images(16)
    x = x.double()
    paths = method.sampling.paths(0, 5, net.space, net.principle)
    total, teacher = torch.zeros((), dtype=torch.float64), None
    for path in paths:
        output = net(x, path.widths, path.side)
        if path.learns == "teacher":
            assert teacher is not None
            loss = -(teacher.softmax(1) * output.log_softmax(1)).sum(1).mean()
        else:
            teacher, loss = output.detach(), F.cross_entropy(output, y)
        total = total + loss / len(paths)
    wanted = torch.autograd.grad(total, list(net.parameters()))
    for backward in ("path", "step"):
        found = one_step(double(method.principle), method.sampling, backward=backward)
        for mine, theirs in zip(found, wanted, strict=True):
            # Losses are computed in float32.
            torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-7)


def test_every_side_of_a_sandwich_learns_from_its_own_side() -> None:
    seen: list[tuple[Tensor, Tensor]] = []

    def distil(output: Tensor, teacher: Tensor) -> Tensor:
        seen.append((output.detach(), teacher))
        return soft_cross_entropy(output, teacher)

    net = toy.supernet(dropout=0.0)
    x, _ = toy.images(16)
    widest = {side: net(x, net.space.max, side).detach() for side in net.sides}
    one_step(net, PathSampling(complement=False, sandwich=True), Task(F.cross_entropy, toy_score, distil=distil))
    assert len(seen) == 1 + 4  # the first is a trial of the task
    for number, (_, teacher) in enumerate(seen[1:]):
        torch.testing.assert_close(teacher, widest[net.sides[number % 2]])


def toy_score(output: Tensor, target: Tensor) -> Tensor:
    return (output.argmax(1) == target).float()


def test_both_ways_backward_train_the_same() -> None:
    nets = []
    for backward in ("path", "step"):
        net = double("bcv2")
        source = LoaderSource([(x.double(), y) for x, y in zip(*(t.split(16) for t in toy.images()), strict=True)])
        train_supernet(net, source, SupernetTraining(optimisation=Optimisation(epochs=1), backward=backward))  # type: ignore[arg-type]
        nets.append(net)
    for a, b in zip(nets[0].parameters(), nets[1].parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def test_clipping_bounds_the_gradient() -> None:
    free = torch.cat([g.flatten() for g in one_step(toy.supernet(dropout=0.0), PathSampling())])
    clipped = torch.cat([g.flatten() for g in one_step(toy.supernet(dropout=0.0), PathSampling(), clip=0.01)])
    assert float(free.norm()) > 0.02
    assert float(clipped.norm()) == pytest.approx(0.01, rel=1e-3)
    torch.testing.assert_close(clipped / clipped.norm(), free / free.norm(), rtol=1e-3, atol=1e-4)


def test_label_smoothing_is_the_recipes() -> None:
    smooth = one_step(toy.supernet(dropout=0.0), PathSampling(), label_smoothing=0.2)
    task = Task(lambda o, y: F.cross_entropy(o, y, label_smoothing=0.2), toy_score)
    given = one_step(toy.supernet(dropout=0.0), PathSampling(), task)
    for mine, theirs in zip(smooth, given, strict=True):
        torch.testing.assert_close(mine, theirs)


def test_bf16_on_a_cpu() -> None:
    half = one_step(toy.supernet(dropout=0.0), PathSampling(), bf16=True)
    full = one_step(toy.supernet(dropout=0.0), PathSampling())
    assert all(gradient.dtype == torch.float32 for gradient in half)
    a, b = (torch.cat([g.flatten() for g in gradients]) for gradients in (half, full))
    assert 0 < float((a - b).norm() / b.norm()) < 0.1


def test_the_log_holds_the_losses_of_the_steps_paths() -> None:
    net = toy.supernet(dropout=0.0)
    x, y = toy.images(16)
    paths = PathSampling().paths(0, 5, net.space, net.principle)
    wanted = [F.cross_entropy(net(x, path.widths, path.side), y).item() for path in paths]
    trained = train_supernet(net, LoaderSource([(x, y)]), SupernetTraining(optimisation=Optimisation(epochs=1), seed=5))
    assert trained.log.losses.tolist() == pytest.approx(wanted, rel=1e-5)
    assert trained.log.widths.tolist() == [list(path.widths) for path in paths]
    assert trained.log.steps.tolist() == [0] * 4
    assert trained.history == [(1, pytest.approx(np.mean(wanted), rel=1e-5), 0.1)]


def test_ema_ends_in_the_networks_weights(tmp_path: Path) -> None:
    net, _ = toy.train(tmp_path)
    tree = checkpoint.unpack(*checkpoint.load(tmp_path))
    for (name, parameter), value in zip(net.named_parameters(), tree["average"]["values"], strict=True):
        assert torch.equal(parameter, value)
        assert not torch.equal(parameter, tree["net"][name])


def test_regression_with_a_loss_and_score_of_ones_own() -> None:
    """A user's DataLoader whose targets are numbers: the brightest quarter's place."""
    x, labels = toy.images(256)
    target = torch.stack([labels // 2, labels % 2], 1).float()
    data = from_loaders(DataLoader(TensorDataset(x, target), 32, shuffle=True, drop_last=True), [(x, target)])
    task = Task(F.mse_loss, lambda output, y: -(output - y).square().mean(1))
    net = toy.supernet(dropout=0.0, outputs=2)
    before = Evaluator(net, data.val, task).measure(net.space.max)
    training = SupernetTraining(optimisation=Optimisation(epochs=10, lr=0.1))
    trained = train_supernet(net, data.train, training, task)
    after = Evaluator(net, data.val, task).measure(net.space.max)
    assert after.score[0] > before.score[0]
    assert after.score[0] == pytest.approx(-after.loss[0], rel=1e-5)
    assert trained.history[-1][1] < 0.5 * trained.history[0][1]
    assert after.extra == {}


def test_digits_are_learnt() -> None:
    torch.manual_seed(0)
    data = load_data("digits", options=LoadOptions(batch_size=64, crop=0))
    space = trace(zoo.build("digits_cnn", (16, 16, 32, 24, 32)), torch.zeros(2, 1, 8, 8), groups=4, base=2)
    net = Supernet(space)
    train_supernet(net, data.train, SupernetTraining(optimisation=Optimisation(epochs=5, lr=0.5)))
    widest, narrowest = Evaluator(net, data.val).measure([space.max, space.min]).score
    assert widest > 0.9
    assert narrowest > 0.8


def test_memory_that_ends(tmp_path: Path, monkeypatch: Any) -> None:
    """A batch that does not fit is run in parts, with a warning; where one image does not fit, a sentence says so."""
    room = 8
    run = Supernet.run

    def limited(self: Supernet, plan: Any, x: Tensor, *rest: Any, **more: Any) -> Any:
        if torch.is_grad_enabled() and len(x) > room:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return run(self, plan, x, *rest, **more)

    monkeypatch.setattr(Supernet, "run", limited)
    with pytest.warns(UserWarning, match="does not fit") as caught:
        toy.train(tmp_path)
    assert [str(w.message) for w in caught] == [
        "a batch of 16 does not fit into the memory of cpu: it is run in 2 parts of 8, whose batch norm sees fewer "
        "images"
    ]
    room = 0
    warnings.simplefilter("ignore")
    with pytest.raises(BcnetError) as error:
        train_supernet(toy.supernet(), toy.source(), toy.config(), folder=tmp_path / "other")
    assert str(error.value) == (
        "1 of 16 images do not fit into the memory of cpu: lower the batch size, use bf16, or train fewer paths a "
        "step; nothing was saved yet"
    )


def test_parts_of_a_batch_add_up_to_the_whole(monkeypatch: Any) -> None:
    """Without batch norm, a step in parts is the step on the whole batch."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64, 4))
    space = trace(model, torch.zeros(2, 1, 6, 6), groups=4)
    torch.manual_seed(1)
    wanted = one_step(Supernet(space), PathSampling())
    run = Supernet.run

    def limited(self: Supernet, plan: Any, x: Tensor, *rest: Any, **more: Any) -> Any:
        if torch.is_grad_enabled() and len(x) > 3:
            raise torch.OutOfMemoryError
        return run(self, plan, x, *rest, **more)

    monkeypatch.setattr(Supernet, "run", limited)
    torch.manual_seed(1)
    warnings.simplefilter("ignore")
    found = one_step(Supernet(space), PathSampling())
    for mine, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-6)


class Two(nn.Module):
    """A network with two outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.a, self.b = nn.Conv2d(1, 4, 3), nn.Conv2d(4, 2, 1), nn.Conv2d(4, 2, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = torch.relu(self.body(x))
        return self.a(y), self.b(y)


OWN = "give a Task with a loss and a score of your own"
LOGITS = "but classification needs logits (n, classes)"


@pytest.mark.parametrize(
    ("model", "sentence"),
    [
        (Two(), f"the network gives a tuple, {LOGITS}: {OWN}"),
        (
            nn.Sequential(nn.Conv2d(1, 4, 3), nn.Conv2d(4, 2, 3)),
            f"the network gives a tensor of float32 of shape (16, 2, 2, 2), {LOGITS}: {OWN}",
        ),
        (toy.network(outputs=3), "the network gives 3 logits, but there is a label 3"),
    ],
)
def test_a_network_that_gives_no_logits_of_the_classes(model: nn.Module, sentence: str) -> None:
    net = Supernet(trace(model, torch.zeros(2, 1, 6, 6), groups=2))
    with pytest.raises(BcnetError) as error:
        train_supernet(net, toy.source(), toy.config())
    assert str(error.value) == sentence


@pytest.mark.parametrize(
    ("task", "sentence"),
    [
        (
            Task.classification(classes=10),
            "the network gives 4 logits, but the data has 10 classes: change its last layer",
        ),
        (
            Task(lambda o, y: F.cross_entropy(o, y, reduction="none"), toy_score),
            "the task's loss gives a tensor of float32 of shape (16,), but it must be one number, the mean over the "
            "batch",
        ),
        (
            Task(F.cross_entropy, lambda o, y: (o.argmax(1) == y).float().mean()),
            "the task's score gives a tensor of float32 of shape (), but it must be one value for each of 16 examples",
        ),
        (
            Task(F.cross_entropy, lambda o, y: o.nothing),
            "the task's score fails on outputs a tensor of float32 of shape (16, 4) and targets a tensor of int64 of "
            "shape (16,): 'Tensor' object has no attribute 'nothing'",
        ),
    ],
)
def test_a_task_that_does_not_fit(task: Task, sentence: str) -> None:
    with pytest.raises(BcnetError) as error:
        train_supernet(toy.supernet(), toy.source(), toy.config(), task)
    assert str(error.value) == sentence


def test_data_that_do_not_fit() -> None:
    x, y = toy.images(32)
    for batch, sentence in (
        (
            (x.expand(-1, 3, -1, -1), y),
            "the network was traced on inputs of shape (1, 6, 6), but the data gives (3, 6, 6): trace it on an example "
            "of this data, or change its first layer",
        ),
        (
            (x, y.float()),
            "the targets are a tensor of float32 of shape (32,), but classification needs labels (n,) of int64: make "
            f"them targets.long(), or {OWN}",
        ),
    ):
        with pytest.raises(BcnetError) as error:
            train_supernet(toy.supernet(), LoaderSource([batch]), toy.config())
        assert str(error.value) == sentence
    with pytest.raises(BcnetError) as error:
        train_supernet(
            toy.supernet(), toy.source(), toy.config(PathSampling(sandwich=True)), Task(F.cross_entropy, toy_score)
        )
    assert str(error.value) == ("in-place distillation needs a task with a `distil` loss: give it, or use no sandwich")


def test_a_loader_that_gives_fewer_batches_than_it_says() -> None:
    class Short:
        def __len__(self) -> int:
            return 3

        def batches(self, epoch: int, start: int = 0, device: Any = None) -> Any:
            return iter(list(zip(*(t.split(48) for t in toy.images()), strict=True)))

    with pytest.raises(BcnetError) as error:
        train_supernet(toy.supernet(), Short(), toy.config())
    assert str(error.value) == "the training loader promised 3 batches an epoch but gave 2"


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"backward": "both"}, "backward is 'both', but it must be path or step"),
        ({"seed": -1}, "seed is -1, but it must be at least 0"),
        ({"checkpoint_minutes": -1.0}, "checkpoint_minutes is -1.0, but it must be at least 0"),
    ],
)
def test_settings_that_cannot_be(change: dict[str, Any], sentence: str) -> None:
    with pytest.raises(BcnetError) as error:
        SupernetTraining(**change)
    assert str(error.value) == sentence


def test_an_engine_that_is_handed_in_takes_the_same_step() -> None:
    """The fused one, with its reference kernels on the CPU."""
    from bcnet.accel.fused_step import FusedEngine

    plain = one_step(toy.supernet(dropout=0.0), PathSampling(), label_smoothing=0.1)
    net = toy.supernet(dropout=0.0)
    engine = FusedEngine(net, kernels=reference, dtype=torch.float32)
    fused = one_step(net, PathSampling(), engine=engine, label_smoothing=0.1)
    for mine, theirs in zip(fused, plain, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-5)
