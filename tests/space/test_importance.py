"""Channels kept by importance: networks cut anywhere are exact, and criteria say what they should."""

from __future__ import annotations

import copy
from functools import cache

import numpy as np
import pytest
import torch
from architectures import ARCHITECTURES, example, with_statistics
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny_networks import NETWORKS, X, traced
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from bcnet.errors import BcnetError
from bcnet.space.importance import CRITERIA, KeptUnits, importance, taylor
from bcnet.space.network import NetworkSpace, trace
from bcnet.space.resize import selected
from bcnet.training.recalibration import recalibrate

pytestmark = pytest.mark.filterwarnings("ignore:.* itself does not run at other widths")
ALL = [*NETWORKS, *ARCHITECTURES]
# Norms, attention and standardised weights over channels see how many there are, zeros or not.
NOT_ZEROS = {
    "LayerScale", "GroupNormed", "GroupDeviation", "Standardized", "Attention", "ChannelAttention",
    "layer_norm", "transposed",
}  # fmt: skip
ORDERED = {"ChannelAttention"}
"""A convolution along the channels: their order matters."""


@cache
def case(name: str) -> tuple[nn.Module, NetworkSpace, Tensor]:
    if name in NETWORKS:
        return *traced(name), X
    torch.manual_seed(0)
    model, x = ARCHITECTURES[name]().double(), example(name)
    with_statistics(model)
    return model, trace(model, x), x


def draw_widths(space: NetworkSpace, seed: int) -> tuple[np.ndarray, KeptUnits]:
    """Random widths, candidates or not, and random units for them."""
    rng = np.random.default_rng(seed)
    counts = [v.count for v in space.coupling.variables]
    units = [int(rng.integers(1, n + 1)) for n in counts]
    kept = [rng.permutation(n)[:k] for n, k in zip(counts, units, strict=True)]
    return np.array([k * v.unit for k, v in zip(units, space.variables, strict=True)]), kept


@torch.no_grad()
def zeroed(model: nn.Module, space: NetworkSpace, kept: KeptUnits) -> nn.Module:
    """The original with all that belongs to dropped units set to zero."""
    network = copy.deepcopy(model)
    full = [v.count for v in space.coupling.variables]
    for name, tensor in network.named_parameters():
        for dim, axis in enumerate(space.coupling.axes.get(name, ())):
            dropped = torch.ones(tensor.shape[dim], dtype=torch.bool)
            dropped[torch.from_numpy(axis.indices(kept, full))] = False
            tensor.index_fill_(dim, dropped.nonzero()[:, 0], 0.0)
    return network.eval()


@torch.no_grad()
def permuted(model: nn.Module, space: NetworkSpace, order: KeptUnits) -> nn.Module:
    network = copy.deepcopy(model)
    full = [v.count for v in space.coupling.variables]
    for name, tensor in [*network.named_parameters(), *network.named_buffers()]:
        if name in space.coupling.axes:
            tensor.copy_(selected(tensor, space.coupling.axes[name], order, full))
    return network.eval()


@pytest.mark.parametrize("name", ALL)
@settings(max_examples=5, deadline=None, suppress_health_check=list(HealthCheck))
@given(seed=st.integers(0, 2**32 - 1))
def test_any_units_may_stay(name: str, seed: int) -> None:
    """What is built costs what it should, equals the original with zeros where that is the same, and the leftmost part
    of the original with those channels first, which computes what the original does."""
    model, space, x = case(name)
    widths, kept = draw_widths(space, seed)
    network = space.build(widths, weights_of=model, keep=kept).eval()
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH), torch.no_grad():
        found = network(x)
    assert counter.get_total_flops() == 2 * len(x) * space.costs["flops"](widths)[0]
    assert sum(p.numel() for p in network.parameters()) == space.costs["params"](widths)[0]
    if name not in NOT_ZEROS:
        torch.testing.assert_close(found, zeroed(model, space, kept)(x), rtol=1e-8, atol=1e-8)
    if name not in ORDERED:
        first = [np.sort(row) for row in kept]
        order = [
            np.append(row, np.setdiff1d(np.arange(v.count), row))
            for row, v in zip(first, space.coupling.variables, strict=True)
        ]
        twin = permuted(model, space, order)
        torch.testing.assert_close(twin(x), model(x), rtol=1e-8, atol=1e-8)
        torch.testing.assert_close(space.build(widths, weights_of=twin).eval()(x), found, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("name", ALL)
def test_all_units_are_the_original(name: str) -> None:
    model, space, x = case(name)
    for keep in ("l2", "random", [np.arange(v.count) for v in space.coupling.variables]):
        network = space.build(space.max, weights_of=model, keep=keep).eval()
        assert torch.equal(network(x), model(x))
        assert all(torch.equal(a, model.state_dict()[n]) for n, a in network.state_dict().items())


@pytest.mark.parametrize("criterion", [c for c in CRITERIA if c != "taylor"])
@pytest.mark.parametrize("name", ALL)
def test_scores_of_every_network(name: str, criterion: str) -> None:
    model, space, _ = case(name)
    if criterion == "bn-scale" and not any(isinstance(m, nn.BatchNorm2d) for m in model.modules()):
        with pytest.raises(BcnetError) as raised:
            importance(space, model, criterion)
        assert str(raised.value) == (
            "the criterion bn-scale needs batch norms with scales, but this network has none: take l2"
        )
        return
    scores = importance(space, model, criterion)
    assert [row.shape for row in scores] == [(v.count,) for v in space.coupling.variables]
    assert all(np.isfinite(row).all() and (row >= 0).all() for row in scores)
    if criterion != "lamp":
        assert [row.mean() for row in scores] == pytest.approx([1.0] * len(scores))
    assert all(np.array_equal(a, b) for a, b in zip(scores, importance(space, model, criterion), strict=True))


def plain() -> tuple[nn.Module, NetworkSpace]:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3, bias=False),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(16, 5),
    )
    nn.init.uniform_(model[1].weight)
    return model, trace(model, torch.randn(2, 3, 8, 8))


def unit_weights(model: nn.Module) -> tuple[Tensor, Tensor, Tensor]:
    """Filters, scales and readers of each unit of :func:`plain`."""
    return (
        model[0].weight.detach().double().flatten(1),
        model[1].weight.detach().double()[:, None],
        model[5].weight.detach().double().reshape(5, 4, 4).transpose(0, 1).flatten(1),
    )


def test_what_the_criteria_say() -> None:
    model, space = plain()
    parts = unit_weights(model)
    every = torch.cat(parts, 1)
    squares = every.square().sum(1)
    rank = squares.sort()
    remaining = rank.values.flip(0).cumsum(0).flip(0)
    lamp = torch.empty(4, dtype=torch.float64).scatter_(0, rank.indices, rank.values / remaining)
    fpgm = sum((p[:, None] - p[None]).square().sum(2).sqrt().sum(1) for p in (parts[0], parts[2]))
    wanted = {
        "l1": every.abs().sum(1) / every.abs().sum(1).mean(),
        "l2": squares / squares.mean(),
        "bn-scale": parts[1][:, 0].abs() / parts[1].abs().mean(),
        "fpgm": fpgm / fpgm.mean(),
        "lamp": lamp,
    }
    for criterion, scores in wanted.items():
        (found,) = importance(space, model, criterion)
        assert found == pytest.approx(scores.numpy(), rel=1e-4), criterion
    assert float(lamp.max()) == 1.0


def test_taylor_sums_weights_times_gradients_and_leaves_the_network_alone() -> None:
    model, space = plain()
    model.train()
    model[0].weight.requires_grad_(False)
    batches = [(torch.randn(6, 3, 8, 8), torch.randint(0, 5, (6,))) for _ in range(3)]
    before, random = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    (found,) = taylor(space, model, batches, nn.functional.cross_entropy)
    assert torch.equal(torch.get_rng_state(), random)
    assert model.training
    assert all(p.grad is None for p in model.parameters())
    assert all(torch.equal(a, b) for a, b in zip(before.values(), model.state_dict().values(), strict=True))
    twin = copy.deepcopy(model).eval().requires_grad_()
    sum(nn.functional.cross_entropy(twin(x), y) for x, y in batches).backward()
    products = copy.deepcopy(twin)
    for mine, theirs in zip(products.parameters(), twin.parameters(), strict=True):
        mine.data = theirs.detach() * theirs.grad
    wanted = torch.cat(unit_weights(products), 1).abs().sum(1)
    assert found == pytest.approx((wanted / wanted.mean()).numpy(), rel=1e-4)


def test_the_most_important_stay_in_their_order() -> None:
    model, space = plain()
    scores = [np.array([0.3, 2.0, 0.1, 2.0])]
    for keep in (scores, [np.array([3, 1])], [[1, 3]]):
        network = space.build([2], weights_of=model, keep=keep)
        assert torch.equal(network[0].weight, model[0].weight[[1, 3]])
        assert torch.equal(network[1].running_mean, model[1].running_mean[[1, 3]])
        assert torch.equal(network[5].weight, model[5].weight.reshape(5, 4, 4)[:, [1, 3]].reshape(5, 8))
    equal = space.build([2], weights_of=model, keep=[np.ones(4)])
    assert torch.equal(equal[0].weight, model[0].weight[:2])


def test_a_random_choice_has_a_seed() -> None:
    model, space = plain()
    first, again, other = (importance(space, model, "random", seed=s)[0] for s in (3, 3, 4))
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)


def broken(model: nn.Module) -> nn.Module:
    twin = copy.deepcopy(model)
    twin[0].weight.data[0, 0, 0, 0] = float("nan")
    return twin


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (
            {"keep": "best"},
            "the criterion is 'best', but it must be one of l1, l2, bn-scale, taylor, fpgm, lamp, random",
        ),
        ({"keep": "taylor"}, "the criterion taylor needs gradients: call taylor(space, network, batches, loss)"),
        ({"keep": []}, "keep has 0 arrays, but this space has 1 width variables"),
        ({"keep": [np.ones(3)]}, "the scores of variable '0' must be 4 finite numbers, one for each of its units"),
        (
            {"keep": [np.array([1.0, 2.0, np.nan, 0.0])]},
            "the scores of variable '0' must be 4 finite numbers, one for each of its units",
        ),
        ({"keep": [[1, 1]]}, "variable '0' must keep 2 different units out of 0..3, got array([1, 1])"),
        ({"keep": [[1, 4]]}, "variable '0' must keep 2 different units out of 0..3, got array([1, 4])"),
        ({"keep": [[1]]}, "variable '0' must keep 2 different units out of 0..3, got array([1])"),
        (
            {"keep": "l2", "weights_of": None},
            "keep says which channels of a network stay: give that network as weights_of",
        ),
        (
            {"keep": "l2", "weights_of": nn.Linear(2, 2)},
            "the parameter '0.weight' is missing: importance is judged on the network that was traced",
        ),
        (
            {"keep": "l2", "weights_of": nn.Sequential(nn.Conv2d(3, 5, 3, bias=False))},
            "the parameter '0.weight' has another shape: importance is judged on the network that was traced",
        ),
        (
            {"keep": "l2", "weights_of": broken(plain()[0])},
            "the parameter '0.weight' holds numbers that are not finite: its channels have no importance",
        ),
    ],
)
def test_one_sentence_for_what_cannot_be_kept(options: dict, sentence: str) -> None:
    model, space = plain()
    with pytest.raises(BcnetError) as raised:
        space.build([2], **({"weights_of": model} | options))
    assert str(raised.value) == sentence


def test_taylor_needs_a_batch() -> None:
    model, space = plain()
    with pytest.raises(BcnetError) as raised:
        taylor(space, model, [], nn.functional.cross_entropy)
    assert str(raised.value) == "the criterion taylor needs at least one batch to take gradients on"


def test_recalibration_takes_the_average_of_all_batches() -> None:
    network = nn.Sequential(nn.BatchNorm2d(3, momentum=0.3), nn.Dropout(0.5), nn.Conv2d(3, 2, 1))
    network[1].eval()
    batches = [(torch.randn(8, 3, 4, 4) * (1 + i) + i, None) for i in range(3)]
    random = torch.get_rng_state()
    assert recalibrate(network, batches) == 1
    assert torch.equal(torch.get_rng_state(), random)
    assert network[0].momentum == 0.3
    assert network[0].num_batches_tracked == 3
    assert [m.training for m in network] == [True, False, True]
    mean = torch.stack([x.mean((0, 2, 3)) for x, _ in batches]).mean(0)
    variance = torch.stack([x.var((0, 2, 3)) for x, _ in batches]).mean(0)
    torch.testing.assert_close(network[0].running_mean, mean)
    torch.testing.assert_close(network[0].running_var, variance)


@pytest.mark.parametrize("name", ["Residual", "Dense", "channel_bench_mobilenet"])
def test_recalibration_of_layers_and_of_a_graph_are_the_same(name: str) -> None:
    model, space, x = case(name)
    other = copy.copy(space)
    other._own_class = False
    assert space.own_class
    own, graph = (s.build(space.min, weights_of=model, keep="l2") for s in (space, other))
    layers = sum(isinstance(m, nn.BatchNorm2d) for m in own.modules())
    for network in (own, graph):
        assert recalibrate(network, [(x, None), (2 * x, None)]) == layers
    assert set(own.state_dict()) == set(graph.state_dict())
    for key, tensor in own.state_dict().items():
        torch.testing.assert_close(graph.state_dict()[key], tensor, rtol=1e-10, atol=1e-10)


def test_recalibration_without_batch_norm_runs_nothing() -> None:
    assert recalibrate(nn.Linear(2, 2), iter([("not a batch", None)])) == 0


def test_recalibration_needs_a_batch() -> None:
    network = nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3))
    network[1].running_mean.fill_(7.0)
    with pytest.raises(BcnetError) as raised:
        recalibrate(network, [])
    assert str(raised.value) == "batch norm cannot be recalibrated without a batch: give some training batches"
    assert network[1].running_mean.tolist() == [7.0] * 3
