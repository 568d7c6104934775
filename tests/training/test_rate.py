"""The learning rate of fine-tuning: which rates are probed, which one is taken, and how long a probe is."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from bcnet.data.source import Data, from_loaders
from bcnet.errors import BcnetError
from bcnet.training.optim import Optimisation
from bcnet.training.rate import FIRST, RATES, choose_rate, probe_length, probe_loss
from bcnet.training.retraining import Retraining

LOSSES = st.lists(st.floats(-10, 10) | st.just(math.inf), min_size=len(RATES), max_size=len(RATES))


@given(losses=LOSSES)
def test_the_highest_rate_near_the_best_of_what_was_probed_is_taken(losses: list[float]) -> None:
    table = dict(zip(RATES, losses, strict=True))
    asked: list[float] = []

    def loss(rate: float) -> float:
        asked.append(rate)
        return table[rate]

    if all(math.isinf(table[rate]) for rate in RATES):
        with pytest.raises(BcnetError, match=r"fine-tuning diverges at every rate from 0\.1 to 0\.001"):
            choose_rate(loss)
        return
    best, found = choose_rate(loss)
    assert found == {rate: table[rate] for rate in asked}
    assert len(asked) == len(set(asked))
    assert asked[0] == FIRST
    least = min(found.values())
    assert table[best] <= least + 0.01 * abs(least)
    assert all(table[rate] > least + 0.01 * abs(least) for rate in asked if rate > best)


@given(where=st.sampled_from(RATES), slope=st.floats(0.1, 5))
def test_a_valley_is_found_wherever_it_lies(where: float, slope: float) -> None:
    best, found = choose_rate(lambda rate: 1 + slope * abs(math.log(rate / where)))
    assert best == where
    assert len(found) <= 3 + abs(RATES.index(where) - RATES.index(FIRST))


@given(last=st.sampled_from(RATES[RATES.index(FIRST) :]))
def test_rates_that_diverge_are_passed_by(last: float) -> None:
    """Every rate above ``last`` diverges; the lower, the worse."""
    best, _ = choose_rate(lambda rate: math.inf if rate > last else 1 - math.log(rate))
    assert best == last


@pytest.mark.parametrize(
    ("losses", "best", "probed"),
    [
        ({0.1: 1.639, 0.05: 1.415, 0.03: 1.419}, 0.05, 3),  # the first is the best
        ({0.1: 1.322, 0.05: 1.322, 0.03: 1.3215}, 0.1, 3),  # all alike: the highest
        ({0.1: 9.0, 0.05: 2.0, 0.03: 1.0, 0.01: 0.5, 0.003: 0.6}, 0.01, 5),
    ],
)
def test_what_is_probed(losses: dict[float, float], best: float, probed: int) -> None:
    chosen, found = choose_rate(lambda rate: losses[rate])
    assert (chosen, len(found)) == (best, probed)


@given(epochs=st.integers(1, 400), batches=st.integers(1, 2000))
def test_a_probe_is_a_tenth_of_the_training_and_never_too_short_to_tell(epochs: int, batches: int) -> None:
    short, each = probe_length(epochs, batches)
    assert 1 <= each <= batches
    assert 1 <= short <= epochs
    wanted = max(epochs * batches / 10, min(30, epochs * batches))
    assert wanted <= short * each < wanted + 1 + short


@pytest.fixture
def data() -> Data:
    torch.manual_seed(0)
    x = torch.randn(192, 3, 4, 4)
    made = TensorDataset(x, (x.mean((1, 2, 3)) > 0).long())
    return from_loaders(DataLoader(made, batch_size=16), DataLoader(made, batch_size=64), None, classes=2, seed=0)


def network() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(32, 2))


def test_a_probe_learns_with_the_whole_schedule_in_small(data: Data) -> None:
    steps: list[tuple[float, int]] = []
    config = Retraining(Optimisation(epochs=20, lr=None, warmup=5.0, schedule="step", milestones=(10,)))
    loss = probe_loss(network(), 0.1, data, config, progress=lambda now: steps.append((now.rate, now.steps)))
    untrained = probe_loss(network(), 1e-9, data, config)
    assert len(steps) == steps[0][1] == 30  # three epochs of ten batches: a tenth would be 24 steps
    rates = [rate for rate, _ in steps]
    assert max(rates) == pytest.approx(0.1)
    assert rates[0] < 0.05
    assert rates[-1] < 0.01
    assert loss < 0.9 * untrained


def test_a_probe_that_diverges_has_an_infinite_loss_and_other_errors_are_told(data: Data) -> None:
    config = Retraining(Optimisation(epochs=10, lr=None, warmup=0))
    assert probe_loss(network(), 1e30, data, config) == math.inf
    frozen = network().requires_grad_(False)
    with pytest.raises(BcnetError, match="all parameters of the network are frozen"):
        probe_loss(frozen, 0.1, data, config)


def test_a_rate_that_nobody_chooses_is_refused() -> None:
    with pytest.raises(BcnetError, match="lr is null, but only a run that fine-tunes a trained network can choose it"):
        Optimisation(lr=None).rate(0, 10)
    with pytest.raises(BcnetError, match="final_lr needs an lr that is known: name both, or leave both out"):
        Optimisation(lr=None, final_lr=0.001)
