"""Scores of networks cut out of a trained one: exact, deterministic, and better after healing."""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import toy
from torch import nn

from bcnet.data.source import Batch
from bcnet.errors import BcnetError
from bcnet.space.network import trace
from bcnet.training.inherit import CutScorer, Healing
from bcnet.training.optim import Optimisation
from bcnet.training.recalibration import recalibrate
from bcnet.training.retraining import Distillation
from bcnet.training.task import Task

SPACE = toy.space()
SMALL = np.array([2, 2])


@cache
def batches() -> tuple[list[Batch], list[Batch]]:
    x, y = toy.images()
    pairs = list(zip(x.split(16), y.split(16), strict=True))
    return pairs[:4], pairs[4:]


@cache
def trained() -> nn.Module:
    """The toy network after some steps on the training batches; not to be changed."""
    torch.manual_seed(0)
    network = toy.network()
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9)
    for _ in range(20):
        for x, y in batches()[0]:
            optimizer.zero_grad()
            F.cross_entropy(network(x), y).backward()
            optimizer.step()
    return network.eval()


def scorer(keep: Any = "l2", teacher: nn.Module | None = None, task: Task | None = None, **healing: Any) -> CutScorer:
    train, val = batches()
    return CutScorer(SPACE, trained(), keep, train, val, task, teacher=teacher, healing=Healing(**healing))


def held_out_loss(network: nn.Module) -> float:
    val = batches()[1]
    with torch.no_grad():
        return float(torch.stack([F.cross_entropy(network.eval()(x), y).double() for x, y in val]).mean())


@pytest.mark.parametrize("widths", [SMALL, SPACE.max, np.array([3, 8])])
def test_the_cut_is_the_loss_of_the_built_network(widths: np.ndarray) -> None:
    network = SPACE.build(widths, weights_of=trained(), keep="l2")
    recalibrate(network, batches()[0][:3])
    assert scorer(calibration=3).score(widths) == pytest.approx(-held_out_loss(network), rel=1e-6)


def test_scores_are_fixed_and_leave_everything_alone() -> None:
    widths = SPACE.sample(np.random.default_rng(0), 3)
    before, state = copy.deepcopy(trained().state_dict()), torch.get_rng_state()
    one, other = scorer(steps=5), scorer(steps=5)
    first = one.score_many(widths)
    torch.rand(1)
    torch.set_rng_state(state)
    assert [other.score(row) for row in widths[::-1]] == first[::-1].tolist()
    assert torch.equal(torch.get_rng_state(), state)
    assert not trained().training
    assert all(torch.equal(a, b) for a, b in zip(before.values(), trained().state_dict().values(), strict=True))
    assert scorer(steps=5, seed=1).score(widths[0]) != first[0]
    assert one.evaluations == len({row.tobytes() for row in widths})
    assert one.score_many(widths).tolist() == first.tolist()
    assert one.evaluations == len({row.tobytes() for row in widths})


def test_healing_helps() -> None:
    cut, healed, taught = (
        s.score(SMALL)
        for s in (scorer(), scorer(steps=30), scorer(steps=30, teacher=trained(), distillation=Distillation(0.9)))
    )
    assert cut < healed
    assert cut < taught != healed


def test_the_rate_follows_the_whole_schedule() -> None:
    """Twenty epochs of warmup and decay, drawn together over the steps, end at a rate of nothing."""
    recipe = Optimisation(epochs=20, lr=0.05, warmup=2)
    rates = [recipe.rate(step, 10 / recipe.epochs) for step in range(10)]
    assert rates[0] == pytest.approx(0.05)
    assert rates[-1] == pytest.approx(0.05 * (1 + np.cos(np.pi * 16 / 18)) / 2)
    assert scorer(steps=10, optimisation=recipe).score(SMALL) > scorer().score(SMALL)


def test_other_opinions() -> None:
    network = scorer().network(SMALL)
    val = batches()[1]
    with torch.no_grad():
        right = sum(int((network(x).argmax(1) == y).sum()) for x, y in val) / sum(len(x) for x, _ in val)
        soft = [(trained()(x).softmax(1) * network(x).log_softmax(1)).sum(1).mean() for x, _ in val]
    assert scorer(by="score").score(SMALL) == pytest.approx(right)
    assert scorer(by="distil", teacher=trained()).score(SMALL) == pytest.approx(float(torch.stack(soft).mean()))


def test_scores_of_one_s_own_say_which_channels_stay() -> None:
    keep = [np.arange(6.0), np.arange(8.0)]
    network = scorer(keep).network(SMALL)
    assert torch.equal(network[0].weight, trained()[0].weight[[4, 5]])
    assert torch.equal(network[3].weight, trained()[3].weight[[6, 7]][:, [4, 5]])


def test_a_network_without_batch_norm() -> None:
    model = nn.Sequential(nn.Conv2d(1, 6, 3), nn.ReLU(), nn.Flatten(), nn.Linear(96, 4))
    space = trace(model, torch.zeros(2, 1, 6, 6))
    found = CutScorer(space, model, "l1", *batches(), healing=Healing(steps=2)).score([3])
    assert np.isfinite(found)


def test_bf16() -> None:
    wide, narrow = scorer(), scorer(optimisation=Optimisation(epochs=1, lr=0.02, bf16=True))
    assert narrow.score(SMALL) == pytest.approx(wide.score(SMALL), rel=0.05)
    assert narrow.score(SMALL) != wide.score(SMALL)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu() -> None:
    train, val = batches()
    network = copy.deepcopy(trained()).cuda()
    state = torch.cuda.get_rng_state()
    for steps in (0, 5):
        found = CutScorer(SPACE, network, "l2", train, val, healing=Healing(steps=steps), teacher=network)
        expected = scorer(steps=steps, teacher=trained()).score(SMALL)
        assert found.score(SMALL) == pytest.approx(expected, rel=0.2 if steps else 0.02)
    assert torch.equal(torch.cuda.get_rng_state(), state)


NO_LOGITS = nn.Conv2d(1, 2, 1)
UNTAUGHT = Task(Task.classification().loss, Task.classification().score)
ASKED = {
    "a teacher that gives no logits": (
        {"teacher": NO_LOGITS},
        "the teacher does not suit the task: the network gives a tensor of float32 of shape (8, 2, 6, 6), but "
        "classification needs logits (n, classes): give a Task with a loss and a score of your own",
    ),
    "a teacher without a loss": (
        {"teacher": NO_LOGITS, "task": UNTAUGHT},
        "a teacher needs a task with a `distil` loss: give it, or leave the teacher out",
    ),
    "distil without a teacher": (
        {"by": "distil"},
        "scores by distil need a teacher: give the trained network, or score by loss",
    ),
    "steps": ({"steps": -1}, "steps is -1, but it must be at least 0"),
    "calibration": ({"calibration": 0}, "calibration is 0, but it must be at least 1"),
    "by": ({"by": "luck"}, "by is 'luck', but it must be loss, score or distil"),
}


@pytest.mark.parametrize("case", ASKED)
def test_one_sentence(case: str) -> None:
    options, sentence = ASKED[case]
    with pytest.raises(BcnetError) as raised:
        scorer(**options)
    assert str(raised.value) == sentence


def test_nothing_to_score_on() -> None:
    with pytest.raises(BcnetError) as raised:
        CutScorer(SPACE, trained(), "l2", batches()[0], [])
    assert str(raised.value) == (
        "scores of cut networks need training and validation batches, but there is none of one"
    )
