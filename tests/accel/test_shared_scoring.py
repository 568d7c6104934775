"""Configurations that share their prefixes get the scores they get alone, whoever else is asked for."""

from __future__ import annotations

import gc

import numpy as np
import pytest
import test_enumeration as networks
import torch
import toy
from torch import nn

from bcnet.accel import SharedEvaluator
from bcnet.accel.enumeration import shared
from bcnet.accel.enumeration.allocations import Allocations
from bcnet.search import SearchConfig, search
from bcnet.space.network import trace
from bcnet.supernet.scoring import Evaluator
from bcnet.supernet.supernet import Supernet

pytestmark = pytest.mark.usefixtures("one_thread")


def some(net: Supernet, count: int = 12) -> np.ndarray:
    return net.space.sample(np.random.default_rng(3), count)


@pytest.mark.parametrize("principle", ["ua", "bcv2"])
@pytest.mark.parametrize("name", networks.NETWORKS)
def test_equals_one_by_one_wherever_configurations_part(
    name: str, principle: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    net, data = networks.supernet(name, principle), networks.batches(name, 12, 7)
    widths = some(net)
    wanted = Evaluator(net, data).measure(widths)
    for tail in range(len(net.space) + 1):
        monkeypatch.setattr(shared, "best_tail", lambda *_, tail=tail: tail)
        evaluator = SharedEvaluator(net, data)
        assert evaluator.shares
        found = evaluator.measure(widths)
        np.testing.assert_allclose(found.loss, wanted.loss, rtol=2e-4)
        assert np.mean(np.abs(found.by_side["score"] - wanted.by_side["score"]) > 1e-9) < 0.05  # logits may tie


def test_a_score_does_not_depend_on_what_else_is_asked_for() -> None:
    net, data = networks.supernet("digits", "bcv2"), networks.batches("digits", 16)
    widths = some(net, 20)
    together = SharedEvaluator(net, data, by="loss").score_many(widths)
    halves = SharedEvaluator(net, data, by="loss")
    assert [*halves.score_many(widths[1::2]), *halves.score_many(widths[::2])] == [*together[1::2], *together[::2]]
    alone = SharedEvaluator(net, data, by="loss")
    assert [alone.score(row) for row in widths[::-1]] == together[::-1].tolist()


class Drawn(nn.Module):
    """A chain of convolutions of random widths, kernels and strides, some with a bias, a norm or a shortcut."""

    def __init__(self, seed: int):
        super().__init__()
        rng = np.random.default_rng(seed)
        channels, layers = 2, []
        for _ in range(rng.integers(2, 5)):
            kernel, width = int(rng.choice([1, 3])), int(rng.integers(4, 20))
            stride, bias = int(rng.integers(1, 3)), bool(rng.integers(2))
            layers += [nn.Conv2d(channels, width, kernel, stride, kernel // 2, bias=bias)]
            layers += [nn.BatchNorm2d(width)] if rng.integers(4) else []
            layers += [nn.ReLU()]
            channels = width
        self.body = nn.Sequential(*layers)
        self.same = nn.Conv2d(channels, channels, 1) if rng.integers(2) else None
        self.classifier = nn.Linear(channels, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.body(x)
        return self.classifier((y if self.same is None else y + self.same(y)).mean((2, 3)))


@pytest.mark.parametrize("seed", range(12))
def test_networks_of_any_shape_score_as_one_by_one_whoever_else_is_asked_for(seed: int) -> None:
    torch.manual_seed(seed)
    net = Supernet(trace(Drawn(seed), torch.randn(2, 2, 6, 6), groups=4))
    data = [(torch.randn(n, 2, 6, 6), torch.arange(n) % 3) for n in (9, 16)]
    widths = np.unique(some(net, 16), axis=0)
    evaluator = SharedEvaluator(net, data, by="loss")
    assert evaluator.shares
    together = evaluator.score_many(widths)
    np.testing.assert_allclose(together, Evaluator(net, data, by="loss").score_many(widths), rtol=2e-4)
    for row, score in zip(widths[::-1], together[::-1], strict=True):
        assert SharedEvaluator(net, data, by="loss").score(row) == score


def test_widths_that_are_no_candidates_run_alone() -> None:
    net, data = networks.supernet("digits", "bcv2"), networks.batches("digits", 16)
    between = np.array([7, 5, 9, 7, 13])
    assert not all(c in v.candidates for v, c in zip(net.space.variables, between, strict=True))
    found = SharedEvaluator(net, data).measure([between, net.space.max])
    wanted = Evaluator(net, data).measure([between, net.space.max])
    assert found.loss[0] == wanted.loss[0]
    assert found.loss[1] == pytest.approx(wanted.loss[1], rel=1e-5)


def test_what_cannot_be_shared_is_scored_one_by_one() -> None:
    torch.manual_seed(0)
    normed = Supernet(trace(networks.Normed(), torch.randn(2, 3, 4, 4), groups=2))
    data = [(torch.randn(8, 3, 4, 4), torch.arange(8) % 3)]
    evaluator = SharedEvaluator(normed, data)
    assert not evaluator.shares
    assert evaluator.measure(some(normed)).loss.tolist() == Evaluator(normed, data).measure(some(normed)).loss.tolist()
    net = toy.supernet()
    recalibrated = SharedEvaluator(net, [toy.images(16)], recalibrate=[toy.images(8)])
    assert not recalibrated.shares
    wanted = Evaluator(net, [toy.images(16)], recalibrate=[toy.images(8)]).measure(some(net))
    assert recalibrated.measure(some(net)).loss.tolist() == wanted.loss.tolist()


def test_memory_is_bounded() -> None:
    net, data = networks.supernet("mobilenet", "bcv2"), networks.batches("mobilenet", 32)
    cap = 2 << 20
    evaluator = SharedEvaluator(net, data, memory=cap)
    assert evaluator.shares
    with Allocations() as allocations:
        evaluator.measure(some(net, 40))
    assert allocations.peak <= cap
    assert not SharedEvaluator(net, data, memory=1 << 16).shares


class Counting(SharedEvaluator):
    asked: list[int]

    def score_many(self, widths: np.ndarray) -> np.ndarray:
        self.asked.append(len(widths))
        return super().score_many(widths)


def test_a_search_hands_over_whole_generations() -> None:
    net = toy.supernet()
    evaluator = Counting(net, [toy.images(32)], by="loss")
    evaluator.asked = []
    result = search(net.space, evaluator, ["flops=80%"], config=SearchConfig(evaluations=8, population=4))
    assert max(evaluator.asked) >= 4
    for trial in result.trials:
        assert trial.score == evaluator.score(np.array(trial.widths))


def test_networks_of_one_layer() -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Conv2d(1, 6, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(1), nn.Linear(6, 4))
    net = Supernet(trace(plain, torch.zeros(2, 1, 6, 6), groups=3))
    found = SharedEvaluator(net, [toy.images(16)]).measure(some(net, 3))
    wanted = Evaluator(net, [toy.images(16)]).measure(some(net, 3))
    np.testing.assert_allclose(found.loss, wanted.loss, rtol=1e-5)


def test_what_is_kept_goes_with_the_evaluator() -> None:
    """Hundreds of megabytes: they do not wait for Python to look for reference cycles."""
    net, data = networks.supernet("digits", "bcv2"), networks.batches("digits", 16)
    gc.collect()
    with Allocations() as allocations:
        evaluator = SharedEvaluator(net, data, by="loss")
        evaluator.score_many(some(net, 20))
        held = allocations.live
        gc.disable()
        try:
            del evaluator
            assert allocations.live < held / 2
        finally:
            gc.enable()
