"""Training plain networks: it learns, it is taught, it resumes bit for bit, and the paper's random baseline."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import toy
from torch import Tensor, nn

from bcnet.data import DeviceData, LoadOptions
from bcnet.data.source import Data, Source, from_loaders
from bcnet.errors import BcnetError
from bcnet.training import checkpoint
from bcnet.training.loop import Progress
from bcnet.training.optim import Optimisation
from bcnet.training.retraining import Distillation, RandomBaseline, Retraining, evaluate, learnt, retrain, train_random
from bcnet.training.task import Task

EPOCHS = 3


pytestmark = pytest.mark.usefixtures("one_thread")


def data() -> Data:
    x, y = toy.images()
    held = DeviceData(x, y, mean=(0.0,), std=(1.0,), classes=4)
    options = LoadOptions(batch_size=16)
    return Data("toy", held.train(options), held.plain(options), held.plain(options))


def network(seed: int = 0, dropout: float = 0.2) -> nn.Module:
    torch.manual_seed(seed)
    return toy.network(dropout)


def config(**more: Any) -> Retraining:
    settings = {"epochs": EPOCHS, "lr": 0.1, "weight_decay": 5e-4} | more
    return Retraining(Optimisation(**settings), checkpoint_minutes=1e-9)


def same(a: nn.Module, b: nn.Module) -> bool:
    pairs = zip(a.state_dict().values(), b.state_dict().values(), strict=True)
    return all(torch.equal(x, y) for x, y in pairs)


def test_a_network_learns() -> None:
    net, images = network(), data()
    before = evaluate(net, images.val)
    history = retrain(net, images.train, config(epochs=8))
    after = evaluate(net, images.val)
    assert [epoch for epoch, _, _ in history] == list(range(1, 9))
    assert after["score"] > max(0.9, before["score"])
    assert after["loss"] < before["loss"]
    assert after["top5"] == 1


def test_evaluation_is_the_mean_over_all_images() -> None:
    net, images = network(), data()
    x, y = next(iter(images.val.batches(0)))
    net.eval()
    expected = F.cross_entropy(net(x), y).detach()
    found = evaluate(net.train(), images.val)
    assert found["loss"] == pytest.approx(float(expected), rel=1e-6)
    assert found["count"] == len(y)
    assert net.training


@pytest.mark.parametrize("look", [evaluate, learnt])
def test_what_is_frozen_in_evaluation_mode_stays_so(look: Any) -> None:
    """A network in training may have parts that are not, such as the norms of a backbone."""
    net = network().train()
    frozen = next(module for module in net.modules() if isinstance(module, nn.BatchNorm2d)).eval()
    look(net, data().val)
    assert net.training
    assert not frozen.training


@pytest.mark.parametrize("more", [{}, {"ema": 0.9}, {"optimizer": "rmsprop", "lr": 0.01, "clip": 1.0}])
@pytest.mark.parametrize("at", [1, 6, 17])
def test_a_stopped_training_ends_as_if_it_had_not_stopped(tmp_path: Path, more: dict[str, Any], at: int) -> None:
    straight = network()
    history = retrain(straight, data().train, config(**more), folder=tmp_path / "a")
    stopped = network()
    with pytest.raises(toy.Stopped):
        retrain(stopped, data().train, config(**more), folder=tmp_path / "b", progress=toy.stop_at(at))
    again = network(seed=5)
    if at == 1:  # the callback comes before the first checkpoint, so this one begins anew
        again = network()
    assert retrain(again, data().train, config(**more), folder=tmp_path / "b") == history
    assert same(straight, again)


def test_who_asks_to_stop_loses_nothing(tmp_path: Path) -> None:
    def interrupt(now: Progress) -> None:
        if now.step == 4:
            raise KeyboardInterrupt

    rarely = Retraining(config().optimisation, checkpoint_minutes=60)
    with pytest.raises(KeyboardInterrupt):
        retrain(network(), data().train, rarely, folder=tmp_path, progress=interrupt)
    assert checkpoint.unpack(*checkpoint.load(tmp_path))["step"] == 4


def test_a_finished_training_is_not_repeated(tmp_path: Path) -> None:
    first, second = network(), network(seed=9)
    retrain(first, data().train, config(ema=0.9), folder=tmp_path)
    steps: list[int] = []
    retrain(second, data().train, config(ema=0.9), folder=tmp_path, progress=lambda p: steps.append(p.step))
    assert steps == []
    assert same(first, second)


def test_a_checkpoint_of_another_network_is_refused(tmp_path: Path) -> None:
    retrain(network(), data().train, config(epochs=1), folder=tmp_path)
    with pytest.raises(BcnetError) as caught:
        retrain(toy.network(outputs=7), data().train, config(epochs=1), folder=tmp_path)
    assert str(caught.value).startswith(f"the checkpoint in {tmp_path} is of another network")


def test_the_average_of_weights_takes_their_statistics_along() -> None:
    plain, averaged = network(dropout=0), network(dropout=0)
    retrain(plain, data().train, config())
    retrain(averaged, data().train, config(ema=0.99))
    mine, other = plain.state_dict(), averaged.state_dict()
    assert not torch.equal(mine["0.weight"], other["0.weight"])
    assert not torch.equal(mine["1.running_mean"], other["1.running_mean"])
    assert torch.equal(mine["1.num_batches_tracked"], other["1.num_batches_tracked"])


def test_bf16_learns_too() -> None:
    net = network()
    retrain(net, data().train, config(epochs=8, bf16=True))
    assert evaluate(net, data().val, bf16=True)["score"] > 0.9


def test_the_teachers_part_of_the_loss() -> None:
    task = Task.classification()
    output, teacher = torch.randn(6, 4), torch.randn(6, 4)
    target = torch.arange(6) % 4
    alone = Distillation(alpha=0).loss(task, output, target, teacher)
    assert alone == pytest.approx(float(F.cross_entropy(output, target)))
    t = 3.0
    taught = Distillation(alpha=1, temperature=t).loss(task, output, target, teacher)
    entropy = -((teacher / t).softmax(1) * (teacher / t).log_softmax(1)).sum(1).mean()
    divergence = F.kl_div((output / t).log_softmax(1), (teacher / t).softmax(1), reduction="batchmean")
    assert float(taught) == pytest.approx(float(t * t * (divergence + entropy)), rel=1e-5)
    half = Distillation(alpha=0.5, temperature=t).loss(task, output, target, teacher)
    assert float(half) == pytest.approx(float(alone + taught) / 2, rel=1e-6)


def test_answers_of_any_structure_are_softened() -> None:
    def loss(output: dict[str, torch.Tensor], target: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(output["box"], target)

    def distil(output: dict[str, torch.Tensor], teacher: dict[str, torch.Tensor]) -> torch.Tensor:
        return F.mse_loss(output["box"], teacher["box"]) + (output["more"][0] - teacher["more"][0]).abs().mean()

    task = Task(loss, lambda output, target: -(output["box"] - target).abs().mean(1), distil=distil)
    ones, twos = ({"box": torch.full((3, 2), n), "more": (torch.full((3,), n),)} for n in (1.0, 2.0))
    found = Distillation(alpha=1, temperature=2.0).loss(task, ones, torch.zeros(3, 2), twos)
    assert float(found) == pytest.approx(4 * (0.25 + 0.5))


def test_a_network_is_taught_without_labels_that_mean_anything() -> None:
    teacher = network()
    retrain(teacher, data().train, config(epochs=8))
    kept = {k: v.clone() for k, v in teacher.state_dict().items()}

    class NoLabels:
        def __init__(self) -> None:
            self.inner = data().train

        def __len__(self) -> int:
            return len(self.inner)

        def batches(self, epoch: int, start: int = 0, device: Any = None) -> Iterator[tuple[Tensor, Tensor]]:
            for x, y in self.inner.batches(epoch, start, device):
                yield x, torch.zeros_like(y)

    student = network(seed=3, dropout=0)
    taught = Retraining(Optimisation(epochs=16), Distillation(alpha=1.0, temperature=2.0))
    retrain(student, NoLabels(), taught, teacher=teacher)
    assert evaluate(student, data().val)["score"] > 0.9
    assert all(torch.equal(v, kept[k]) for k, v in teacher.state_dict().items())


def test_distillation_asks_for_what_it_needs() -> None:
    taught = Retraining(Optimisation(epochs=1), Distillation())
    with pytest.raises(BcnetError, match=r"^distillation needs a teacher: give the trained full network$"):
        retrain(network(), data().train, taught)
    task = Task(lambda o, t: F.cross_entropy(o, t), lambda o, t: (o.argmax(1) == t).float())
    with pytest.raises(BcnetError) as caught:
        retrain(network(), data().train, taught, task, teacher=network())
    sentence = "distillation needs a task with a `distil` loss: give it, or leave distillation out"
    assert str(caught.value) == sentence


class Answers(nn.Module):
    """Its inputs are its answers, (n, classes)."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.one


@pytest.mark.parametrize(("right", "knows"), [(54, True), (45, True), (35, False), (25, False)])
def test_a_hundred_images_tell_what_was_learnt_from_chance(right: int, knows: bool) -> None:
    y = torch.arange(100) % 4
    answered = torch.where(torch.randperm(100, generator=torch.Generator().manual_seed(0)) < right, y, (y + 1) % 4)
    assert learnt(Answers(), _answered(answered, y)) is knows
    assert not learnt(Answers(), _answered(torch.zeros_like(y), y))


def _answered(answers: Tensor, y: Tensor) -> Source:
    batches = [(F.one_hot(answers[at], 4).float(), y[at]) for at in torch.arange(len(y)).split(40)]
    return from_loaders(batches, batches).val


def test_losses_beside_a_teacher_read_as_one_loss() -> None:
    """What is minimised is 14.5 times as much at temperature 4: 20 where guessing has a cross entropy of 1.4."""
    told: list[float] = []
    taught = Retraining(Optimisation(epochs=1, lr=1e-6), Distillation(alpha=0.9, temperature=4.0))
    history = retrain(network(), data().train, taught, teacher=network(), progress=lambda p: told.append(p.loss))
    guessing = math.log(4)
    assert all(0.8 * guessing < loss < 1.4 * guessing for loss in [*told, history[0][1]])
    assert history[0][1] == pytest.approx(sum(told) / len(told), rel=1e-4)


def test_random_trains_many_shortly_and_the_best_to_the_end(tmp_path: Path) -> None:
    built: list[int] = []

    def build(number: int) -> nn.Module:
        built.append(number)
        return network(seed=number)

    told: list[tuple[int, int]] = []
    best, net, scores, history = train_random(
        build,
        RandomBaseline(3, 1),
        data(),
        config(),
        folder=tmp_path,
        progress=lambda number, p: told.append((number, p.step)),
    )
    steps = len(data().train)
    assert scores[best] == max(scores)
    assert built == [0, 1, 2, best]
    assert len(told) == 3 * steps + (EPOCHS - 1) * steps
    assert [epoch for epoch, _, _ in history] == [1, 2, 3]
    straight = network(seed=best)
    retrain(straight, data().train, config())
    assert same(net, straight)


def test_a_stopped_random_ends_the_same(tmp_path: Path) -> None:
    def work(folder: Path, stop: int = -1) -> Any:
        calls = iter(range(10**6))

        def count(*_: Any) -> None:
            if next(calls) == stop:
                raise toy.Stopped

        def build(number: int) -> nn.Module:
            return network(seed=number)

        return train_random(build, RandomBaseline(2, 1), data(), config(), folder=folder, progress=count)

    best, net, scores, history = work(tmp_path / "a")
    for stop in (3, 4, 5):
        with pytest.raises(toy.Stopped):
            work(tmp_path / "b", stop)
    again = work(tmp_path / "b")
    assert (again[0], again[2], again[3]) == (best, scores, history)
    assert same(net, again[1])


def test_a_loss_that_is_no_number_stops_it(tmp_path: Path) -> None:
    broken = Task(lambda o, t: o.sum() * math.nan, lambda o, t: (o.argmax(1) == t).float())
    with pytest.raises(BcnetError, match=r"^the loss became infinite or NaN by step 1 "):
        retrain(network(), data().train, config(), broken, folder=tmp_path)


class Small(nn.Sequential):
    """A network on a device with memory for eight images."""

    def forward(self, x: Tensor) -> Tensor:
        if len(x) > 8:
            raise torch.OutOfMemoryError("CUDA out of memory")
        found: Tensor = super().forward(x)
        return found


def test_batches_are_divided_where_memory_ends() -> None:
    net = Small(*network(dropout=0))
    with pytest.warns(
        UserWarning, match=r"^a batch of 16 does not fit into the memory of cpu: it is run in 2 parts of 8"
    ):
        retrain(net, data().train, config(epochs=8))
    plain = network(dropout=0)
    plain.load_state_dict(net.state_dict())
    assert evaluate(net, data().val)["loss"] == pytest.approx(evaluate(plain, data().val)["loss"], rel=1e-5)
    assert evaluate(net, data().val)["score"] > 0.9


class Nothing:
    """A source that has nothing left to give."""

    def __len__(self) -> int:
        return 1

    def batches(self, epoch: int, start: int = 0, device: Any = None) -> Any:
        return iter(())


def test_what_is_no_number_is_no_result() -> None:
    net = toy.network()
    with pytest.raises(BcnetError) as error:
        evaluate(net, Nothing())
    assert str(error.value) == "there is nothing to evaluate on: the data gave no batches"
    odd = Task(F.cross_entropy, lambda output, target: output[:, 0] * float("nan"))
    with pytest.raises(BcnetError, match=r"^the score of the network on \d+ samples is nan: the data or the weights"):
        evaluate(net, data().val, odd)
    with torch.no_grad():
        net[0].weight.fill_(float("inf"))
    with pytest.raises(BcnetError, match=r"^the loss of the network on \d+ samples is nan: the data or the weights"):
        evaluate(net, data().val)


@pytest.mark.parametrize("answer", range(10))
def test_always_the_same_answer_is_nothing_learnt(answer: int) -> None:
    """However the targets fall that its answers are held against."""
    labels = torch.from_numpy(np.random.default_rng(13).integers(0, 10, 2000))
    batches = [(torch.zeros(1000, 4), part) for part in labels.split(1000)]
    network = nn.Linear(4, 10)
    with torch.no_grad():
        network.bias.copy_(10.0 * (torch.arange(10) == answer))
    assert not learnt(network, from_loaders(batches, batches).val)


def test_a_fast_step_that_fails_gives_way_to_autograd() -> None:
    """Its kernels may be compiled for the first step only; memory that ends is not its fault."""

    def made(error: str) -> Any:
        def step(x: Tensor, y: Tensor) -> Tensor:
            raise RuntimeError(error)

        return lambda net, x, loss, teacher: step

    plain, fallen = network(dropout=0.0), network(dropout=0.0)
    retrain(plain, data().train, config(bf16=True))
    with pytest.warns(UserWarning, match=r"^training goes on by autograd, not by the fused step: too many registers$"):
        retrain(fallen, data().train, config(bf16=True), fast=made("too many registers\nand more"))
    assert same(plain, fallen)
