"""Schedules, optimizers and averages: exact values, and sentences for settings that cannot be."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from bcnet.errors import BcnetError
from bcnet.training.optim import Average, Optimisation, make_optimizer, set_rate


def test_cosine_falls_from_lr_to_final_lr() -> None:
    config = Optimisation(epochs=4, lr=0.5, final_lr=0.1)
    assert config.rate(0, 10) == 0.5
    assert config.rate(20, 10) == pytest.approx(0.3, abs=1e-15)
    assert config.rate(10, 10) == pytest.approx(0.1 + 0.4 * (1 + math.cos(math.pi / 4)) / 2, abs=1e-15)
    assert config.rate(40, 10) == pytest.approx(0.1, abs=1e-15)
    assert config.rate(400, 10) == pytest.approx(0.1, abs=1e-15)


def test_step_multiplies_at_milestones() -> None:
    config = Optimisation(epochs=10, lr=1.0, schedule="step", milestones=(2, 5), gamma=0.1)
    rates = [config.rate(step, 3) for step in (0, 5, 6, 14, 15, 29)]
    assert rates == pytest.approx([1, 1, 0.1, 0.1, 0.01, 0.01], rel=1e-12)


def test_exponential_multiplies_every_so_many_epochs() -> None:
    config = Optimisation(epochs=20, lr=1.0, schedule="exponential", gamma=0.5, every=2.5, warmup=1)
    rates = [config.rate(step, 2) for step in (2, 6, 7, 11, 12)]
    assert rates == [1, 1, 0.5, 0.5, 0.25]


@pytest.mark.parametrize("schedule", ["cosine", "step", "exponential"])
def test_warm_up_rises_linearly_to_lr(schedule: Any) -> None:
    config = Optimisation(epochs=10, lr=0.8, warmup=2, schedule=schedule)
    assert [config.rate(step, 4) for step in range(8)] == pytest.approx([0.1 * n for n in range(1, 9)], rel=1e-12)
    assert config.rate(8, 4) == 0.8


@given(
    st.sampled_from(["cosine", "step", "exponential"]),
    st.integers(1, 30),
    st.integers(1, 50),
    st.floats(0, 0.99),
    st.floats(1e-6, 10),
)
def test_rates_stay_between_zero_and_lr(schedule: Any, epochs: int, steps: int, warmup: float, lr: float) -> None:
    config = Optimisation(epochs=epochs, lr=lr, warmup=warmup * epochs, schedule=schedule, milestones=(1, 7))
    rates = [config.rate(step, steps) for step in range(epochs * steps)]
    assert all(0 <= rate <= lr * (1 + 1e-12) for rate in rates)
    rising = sum(step / steps < config.warmup for step in range(epochs * steps))
    assert all(a <= b * (1 + 1e-12) for a, b in pairwise(rates[:rising]))
    assert all(a >= b * (1 - 1e-12) for a, b in pairwise(rates[rising:]))


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 2, 1), nn.BatchNorm2d(2))


def groups_of(config: Optimisation, net: nn.Module) -> dict[float, list[str]]:
    names = {id(p): name for name, p in net.named_parameters()}
    groups = make_optimizer(net, config).param_groups
    return {group["weight_decay"]: [names[id(p)] for p in group["params"]] for group in groups}


def test_weight_decay_spares_biases_and_batch_norm() -> None:
    net = network()
    assert groups_of(Optimisation(weight_decay=0.1), net) == {0.1: ["0.weight", "0.bias", "1.weight", "1.bias"]}
    assert groups_of(Optimisation(weight_decay=0.1, decay_all=False), net) == {
        0.1: ["0.weight"],
        0.0: ["0.bias", "1.weight", "1.bias"],
    }


def one_step(config: Optimisation, gradients: list[float], start: float = 1.0) -> list[float]:
    net = nn.Linear(1, 1, bias=False).double()
    nn.init.constant_(net.weight, start)
    optimizer = make_optimizer(net, config)
    set_rate(optimizer, 0.1)
    values = []
    for gradient in gradients:
        net.weight.grad = torch.full((1, 1), gradient, dtype=torch.float64)
        optimizer.step()
        values.append(net.weight.item())
    return values


def test_the_rate_of_the_last_linear_layer_falls_with_its_inputs() -> None:
    net = nn.Sequential(nn.Conv2d(1, 2, 1), nn.Flatten(), nn.Linear(2, 8), nn.Linear(8, 2))

    def rates(head: float) -> dict[str, float]:
        optimizer = make_optimizer(net, Optimisation(lr=0.4, head=head))
        set_rate(optimizer, 0.2)
        of = {id(p): group["lr"] for group in optimizer.param_groups for p in group["params"]}
        return {name: of[id(p)] for name, p in net.named_parameters() if of[id(p)] != 0.2}

    assert rates(0.8) == {"3.weight": pytest.approx(0.05)}  # a peak of 0.8 / 8 instead of 0.4
    assert rates(3.2) == rates(100) == rates(0) == {}


def test_sgd_with_and_without_nesterov() -> None:
    # v1 = 2, v2 = 0.5 * 2 + 2 = 3; Nesterov steps by g + 0.5 v.
    plain = one_step(Optimisation(momentum=0.5, nesterov=False), [2.0, 2.0])
    assert plain == pytest.approx([1 - 0.2, 1 - 0.2 - 0.3])
    ahead = one_step(Optimisation(momentum=0.5), [2.0, 2.0])
    assert ahead == pytest.approx([1 - 0.3, 1 - 0.3 - 0.35])
    assert one_step(Optimisation(momentum=0.0), [2.0]) == pytest.approx([0.8])
    decayed = one_step(Optimisation(momentum=0.0, weight_decay=0.5), [2.0])
    assert decayed == pytest.approx([1 - 0.1 * 2.5])


def test_rmsprop_divides_by_the_root_mean_square() -> None:
    # square = 0.1 * 4; the step is 0.1 * 2 / (sqrt(0.4) + sqrt(0.001)).
    found = one_step(Optimisation(optimizer="rmsprop", momentum=0.0), [2.0])
    assert found == pytest.approx([1 - 0.2 / (0.4**0.5 + 0.001**0.5)])


def test_average_follows_the_weights() -> None:
    net = nn.Linear(1, 1, bias=False)
    nn.init.constant_(net.weight, 1.0)
    average = Average(net.parameters(), 0.5)
    values, kept = [], 1.0
    for n, weight in enumerate([2.0, 3.0, 5.0, 8.0, 9.0, 11.0, 12.0, 12.0, 13.0], 1):
        nn.init.constant_(net.weight, weight)
        average.update()
        decay = min(0.5, (1 + n) / (10 + n))
        kept = decay * kept + (1 - decay) * weight
        values.append(kept)
        assert float(average.values[0]) == pytest.approx(kept, rel=1e-6)
    average.swap()
    assert net.weight.item() == pytest.approx(kept, rel=1e-6)
    average.swap()
    assert net.weight.item() == 13.0
    assert float(average.values[0]) == pytest.approx(kept, rel=1e-6)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"epochs": 0}, "epochs is 0, but it must be at least 1"),
        ({"epochs": 2.5}, "epochs is 2.5, but it must be a whole number"),
        ({"optimizer": "adam"}, "optimizer is 'adam', but it must be sgd or rmsprop"),
        ({"schedule": "linear"}, "schedule is 'linear', but it must be cosine, step or exponential"),
        ({"lr": 0.0}, "lr is 0.0, but it must be above 0"),
        ({"lr": math.nan}, "lr is nan, but it must be a finite number"),
        ({"lr": math.inf}, "lr is inf, but it must be a finite number"),
        ({"final_lr": 0.2}, "final_lr is 0.2, but it must be at most lr, 0.1"),
        ({"momentum": 1.0}, "momentum is 1.0, but it must be below 1"),
        ({"weight_decay": -1.0}, "weight_decay is -1.0, but it must be at least 0"),
        ({"milestones": (3, 2)}, "milestones is (3, 2), but it must be rising epochs above 0"),
        ({"gamma": 1.5}, "gamma is 1.5, but it must be at most 1"),
        ({"every": 0.0}, "every is 0.0, but it must be above 0"),
        ({"warmup": 20}, "warmup is 20.0, but it must be shorter than the epochs, 20"),
        ({"label_smoothing": 1.0}, "label_smoothing is 1.0, but it must be below 1"),
        ({"ema": 1.0}, "ema is 1.0, but it must be below 1"),
        ({"clip": -1.0}, "clip is -1.0, but it must be at least 0"),
    ],
)
def test_settings_that_cannot_be(change: dict[str, Any], sentence: str) -> None:
    with pytest.raises(BcnetError) as error:
        Optimisation(**change)
    assert str(error.value) == sentence
