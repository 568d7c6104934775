"""Scores of widths: those of the plain networks, the mean of both sides, every widths once."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import toy
from torch import Tensor, nn

from bcnet.data import DeviceData, LoadOptions
from bcnet.errors import BcnetError
from bcnet.supernet.scoring import Evaluator
from bcnet.supernet.supernet import Supernet
from bcnet.supernet.training import SupernetTraining, train_supernet
from bcnet.training.optim import Optimisation
from bcnet.training.task import Task, top5

SIDES = ("left", "right")


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def net() -> Supernet:
    """A supernet that was trained a little, so that widths and sides differ."""
    supernet = toy.supernet(dropout=0.3)
    train_supernet(supernet, toy.source(), SupernetTraining(optimisation=Optimisation(epochs=2)))
    return supernet


def validation(sizes: list[int]) -> list[tuple[Tensor, Tensor]]:
    x, y = toy.images(sum(sizes))
    return list(zip(x.split(sizes), y.split(sizes), strict=True))


def plain_network(net: Supernet, widths: Any, side: Any) -> nn.Module:
    """The path as a plain network in training mode, without dropout."""
    network = net.space.build(widths, weights_of=net, side=side)
    for module in network.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return network.train()


def test_scores_are_those_of_the_plain_network(net: Supernet) -> None:
    """With the statistics of the scoring batches, which differ in size and count by it."""
    batches = validation([40, 24])
    widths = toy.some_widths(net)
    scores = Evaluator(net, batches).measure(widths)
    for k, row in enumerate(widths):
        for s, side in enumerate(SIDES):
            network = plain_network(net, row, side)
            with torch.no_grad():
                outputs = [(network(x), y) for x, y in batches]
            hits = sum(int((o.argmax(1) == y).sum()) for o, y in outputs)
            loss = sum(float(F.cross_entropy(o, y, reduction="sum")) for o, y in outputs)
            assert scores.by_side["score"][k, s] == pytest.approx(hits / 64)
            assert scores.by_side["loss"][k, s] == pytest.approx(loss / 64, rel=1e-5)


def test_the_score_is_the_mean_of_both_sides(net: Supernet) -> None:
    scores = Evaluator(net, validation([32])).measure(toy.some_widths(net, 8))
    assert scores.score.shape == scores.loss.shape == (8,)
    assert scores.by_side["score"].shape == (8, 2)
    assert scores.score.tolist() == scores.by_side["score"].mean(1).tolist()
    assert scores.loss.tolist() == scores.by_side["loss"].mean(1).tolist()
    assert (scores.by_side["loss"][:, 0] != scores.by_side["loss"][:, 1]).any()


def test_it_ranks_by_score_or_by_loss(net: Supernet) -> None:
    widths = toy.some_widths(net, 4)
    by_score, by_loss = (Evaluator(net, validation([32]), by=by) for by in ("score", "loss"))
    found = by_score.measure(widths)
    assert by_score.score_many(widths).tolist() == found.score.tolist()
    assert by_loss.score_many(widths).tolist() == (-found.loss).tolist()
    assert by_loss.score(widths[1]) == -found.loss[1]


def test_scoring_keeps_its_memory_also_where_nothing_was_trained_before(net: Supernet, monkeypatch: Any) -> None:
    calls = []
    monkeypatch.setattr("bcnet.supernet.scoring.tune_allocator", lambda: calls.append(1))  # without it, 2.4 x slower
    Evaluator(net, validation([32]))
    assert calls == [1]


def test_one_side_where_the_principle_has_one() -> None:
    scores = Evaluator(toy.supernet("ua"), validation([32])).measure(toy.space().max)
    assert scores.by_side["score"].shape == (1, 1)


def test_duplicates_are_scored_once(net: Supernet, monkeypatch: Any) -> None:
    runs = []
    run = Supernet.run

    def counted(self: Supernet, *given: Any, **more: Any) -> Any:
        runs.append(1)
        return run(self, *given, **more)

    monkeypatch.setattr(Supernet, "run", counted)
    evaluator = Evaluator(net, validation([32]))
    a, b = net.space.max, net.space.min
    first = evaluator.measure([a, b, a, a])
    assert evaluator.evaluations == 2
    assert len(runs) == 4
    assert first.score[0] == first.score[2] == first.score[3]
    assert evaluator.score(a) == first.score[0]
    assert evaluator.score_many([b, a]).tolist() == [first.score[1], first.score[0]]
    assert evaluator.evaluations == 2
    assert len(runs) == 4


def test_recalibrated_statistics_are_the_mean_of_the_training_batches(net: Supernet) -> None:
    training = list(toy.source().batches(0))[:3]
    batches = validation([30])
    widths = toy.some_widths(net, 2)
    scores = Evaluator(net, batches, recalibrate=training).measure(widths)
    for k, row in enumerate(widths):
        for s, side in enumerate(SIDES):
            network = plain_network(net, row, side)
            norms = [m for m in network.modules() if isinstance(m, nn.BatchNorm2d)]
            for norm in norms:
                norm.momentum = None  # a plain mean of all batches
                norm.reset_running_stats()
            with torch.no_grad():
                for x, _ in training:
                    network(x)
                (x, y) = batches[0]
                loss = F.cross_entropy(network.eval()(x), y).item()
            assert scores.by_side["loss"][k, s] == pytest.approx(loss, rel=1e-4)
    assert scores.loss.tolist() != Evaluator(net, batches).measure(widths).loss.tolist()


def test_with_recalibration_an_image_is_scored_apart_from_its_batch(net: Supernet) -> None:
    training = list(toy.source().batches(0))[:2]
    together = Evaluator(net, validation([32]), recalibrate=training).measure(net.space.max)
    apart = Evaluator(net, validation([8, 8, 16]), recalibrate=training).measure(net.space.max)
    assert together.loss[0] == pytest.approx(apart.loss[0], rel=1e-5)
    batchwise = Evaluator(net, validation([8, 8, 16])).measure(net.space.max)
    assert batchwise.loss[0] != pytest.approx(Evaluator(net, validation([32])).measure(net.space.max).loss[0], rel=1e-5)


def test_top5() -> None:
    logits = torch.tensor([[9.0, 8, 7, 6, 5, 4, 3], [1, 2, 3, 4, 5, 6, 7]])
    assert top5(logits, torch.tensor([4, 1])).tolist() == [1, 0]
    assert top5(logits[:, :3], torch.tensor([2, 0])).tolist() == [1, 1]
    net = toy.supernet(outputs=8)
    scores = Evaluator(net, validation([64])).measure(net.space.max)
    assert scores.score[0] < scores.extra["top5"][0] <= 1


def test_a_source_is_loaded_anew_and_many_widths_share_a_batch(net: Supernet) -> None:
    x, y = toy.images(64)
    data = DeviceData(x, y, mean=(0.0,), std=(1.0,), classes=4)
    source = data.plain(LoadOptions(eval_batch_size=24))
    asked = []

    class Counted:
        def __len__(self) -> int:
            return len(source)

        def batches(self, *given: Any) -> Any:
            asked.append(given)
            return source.batches(*given)

    widths = toy.some_widths(net, 5)
    evaluator = Evaluator(net, Counted())
    scores = evaluator.measure(widths)
    assert len(asked) == 1
    assert scores.loss.tolist() == Evaluator(net, source.batches()).measure(widths).loss.tolist()


def test_more_widths_than_are_run_together(net: Supernet, monkeypatch: Any) -> None:
    widths = np.unique(toy.some_widths(net, 20), axis=0)
    wanted = Evaluator(net, validation([16])).measure(widths)
    monkeypatch.setattr(Evaluator, "together", 3)
    told: list[tuple[int, int]] = []
    evaluator = Evaluator(net, validation([16]))
    evaluator.measure(widths[:2])
    scores = evaluator.measure(widths, lambda done, all_: told.append((done, all_)))
    assert scores.loss.tolist() == wanted.loss.tolist()
    assert told[-1] == (len(widths), len(widths))
    assert [done for done, _ in told] == sorted(done for done, _ in told)


@pytest.mark.parametrize("training", [True, False])
def test_scoring_leaves_no_trace(training: bool) -> None:
    net = toy.supernet()
    net.train(training)
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    state = torch.get_rng_state()
    Evaluator(net, validation([16]), recalibrate=validation([8])).measure(net.space.min)
    assert net.training == training
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(before[name], tensor) for name, tensor in net.state_dict().items())
    assert all(p.grad is None for p in net.parameters())


def test_bf16_is_close(net: Supernet) -> None:
    full = Evaluator(net, validation([64])).measure(net.space.max)
    half = Evaluator(net, validation([64]), bf16=True).measure(net.space.max)
    assert half.loss[0] == pytest.approx(full.loss[0], rel=0.02)
    assert half.loss[0] != full.loss[0]


def test_what_cannot_be_scored(net: Supernet) -> None:
    for batches, task, sentence in (
        ([], None, "there is nothing to score on: the validation set is empty"),
        (
            validation([8]),
            Task.classification(classes=7),
            "the network gives 4 logits, but the data has 7 classes: change its last layer",
        ),
    ):
        with pytest.raises(BcnetError) as error:
            Evaluator(net, batches, task).measure(net.space.max)
        assert str(error.value) == sentence
    with pytest.raises(BcnetError) as error:
        Evaluator(net, validation([8])).measure(np.zeros((0, len(net.space)), dtype=np.int64))
    assert str(error.value) == "there are no widths to score"
