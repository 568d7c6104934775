"""Layers make up for dropped channels: exactly where the others tell them, and never for the worse."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from bcnet.space.network import NetworkSpace, trace
from bcnet.training import reconstruction
from bcnet.training.recalibration import recalibrate
from bcnet.training.reconstruction import inherited


class Residual(nn.Module):
    """A stream that two blocks add to, with batch norm and without biases."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.expand, self.norm = nn.Conv2d(8, 16, 1, bias=False), nn.BatchNorm2d(16)
        self.project, self.scale = nn.Conv2d(16, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        x = x + self.scale(self.project(torch.relu(self.norm(self.expand(x)))))
        return self.head(x.mean((2, 3)))


def space_of(network: nn.Module) -> NetworkSpace:
    return trace(network, torch.randn(2, 3, 8, 8), groups=100)


def batches(seed: int = 0) -> list[tuple[Tensor, None]]:
    generator = torch.Generator().manual_seed(seed)
    return [(torch.randn(64, 3, 8, 8, generator=generator), None) for _ in range(2)]


@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 2**16))
def test_channels_that_others_tell_are_not_missed(seed: int) -> None:
    """Of a layer in which every channel is there twice, half is enough; the dropped half is not the last one."""
    torch.manual_seed(seed)
    network = nn.Sequential(
        nn.Conv2d(3, 12, 3, padding=1), nn.ReLU(), nn.Conv2d(12, 4, 1), nn.Flatten(), nn.Linear(256, 3)
    ).eval()
    order = torch.randperm(12)
    with torch.no_grad():
        network[0].weight[order[6:]] = network[0].weight[order[:6]]
        network[0].bias[order[6:]] = network[0].bias[order[:6]]
    space = space_of(network)
    keep = [np.sort(order[:6].numpy()), np.arange(4)]
    x = torch.randn(8, 3, 8, 8)
    expected = network(x)
    rebuilt = inherited(space, network, [6, 4], keep, batches()).eval()
    cut = inherited(space, network, [6, 4], keep).eval()
    spread = expected.std()
    assert (rebuilt(x) - expected).abs().max() < 0.02 * spread  # the ridge takes a little
    assert (cut(x) - expected).abs().max() > 0.1 * spread


def test_nothing_changes_where_nothing_is_cut() -> None:
    torch.manual_seed(0)
    network = Residual()
    recalibrate(network, [(torch.cat([x for x, _ in batches()]), None)])
    space = space_of(network)
    before = copy.deepcopy(network.state_dict())
    same = inherited(space, network, space.max, "l2", batches()).state_dict()
    assert network.training
    assert all(torch.equal(network.state_dict()[name], before[name]) for name in before)
    for name in before:
        torch.testing.assert_close(same[name], before[name], rtol=1e-3, atol=1e-4)


@settings(max_examples=8, deadline=None)
@given(seed=st.integers(0, 2**16), widths=st.tuples(st.integers(3, 7), st.integers(4, 15)))
def test_the_head_is_what_least_squares_say(seed: int, widths: tuple[int, int]) -> None:
    """On the batches it was given, the slim network's output is nearer to the given one's than any that a head of other
    weights would give, but for the ridge."""
    torch.manual_seed(seed)
    network = Residual()
    recalibrate(network.eval(), batches(seed))
    space = space_of(network)
    slim = inherited(space, network, widths, "l2", batches(seed)).eval()
    x = torch.cat([x for x, _ in batches(seed)])
    read: list[Tensor] = []
    slim.head.register_forward_pre_hook(lambda _, given: read.append(given[0]))
    with torch.no_grad():
        away, expected = slim(x) - network(x), network(x)
        features = torch.cat([read[0], torch.ones(len(x), 1)], 1).double()
        best = features @ torch.linalg.lstsq(features, expected.double()).solution - expected
    assert away.square().sum() <= 1.05 * best.square().sum() + 1e-6


def test_a_cut_network_is_nearer_to_the_given_one() -> None:
    """With redundant channels, as trained networks have them, also after batch norm is recalibrated."""
    torch.manual_seed(0)
    network = Residual()
    with torch.no_grad():
        network.expand.weight.copy_((torch.randn(16, 4) @ torch.randn(4, 8))[:, :, None, None])
    recalibrate(network.eval(), batches())
    space = space_of(network)
    x = batches(1)[0][0]
    expected = network(x)
    away = {}
    for name, made_of in (("cut", []), ("rebuilt", batches())):
        slim = inherited(space, network, [8, 8], "l2", made_of)
        recalibrate(slim, batches())
        away[name] = (slim.eval()(x) - expected).square().mean()
    assert away["rebuilt"] < 0.9 * away["cut"]


class Odd(nn.Module):
    """Two uses of one layer, groups, a transposed convolution, a functional convolution and layer norm."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.twice = nn.Conv2d(8, 8, 3, padding=1)
        self.grouped = nn.Conv2d(8, 16, 3, padding=1, groups=4)
        self.up = nn.ConvTranspose2d(16, 12, 2, stride=2)
        self.weight = nn.Parameter(torch.randn(10, 12, 1, 1))
        self.norm, self.head = nn.LayerNorm(10), nn.Linear(10, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.twice(torch.relu(self.twice(torch.relu(self.stem(x))))))
        x = torch.relu(nn.functional.conv2d(torch.relu(self.up(self.grouped(x))), self.weight))
        return self.head(self.norm(x.mean((2, 3))))


def test_what_cannot_be_adjusted_is_cut_as_it_is() -> None:
    torch.manual_seed(0)
    network = Odd().eval()
    space = space_of(network)
    widths = space.floor((space.max * 0.6).astype(np.int64)[None])[0]
    plain, rebuilt = (inherited(space, network, widths, "l2", made_of).eval() for made_of in ([], batches()))
    for name in ("twice.weight", "grouped.weight", "up.weight"):
        assert torch.equal(plain.get_parameter(name), rebuilt.get_parameter(name))
    assert not torch.equal(plain.get_parameter("weight"), rebuilt.get_parameter("weight"))
    x = batches()[0][0]
    away = [(slim(x) - network(x)).square().mean() for slim in (plain, rebuilt)]
    assert away[1] < away[0]


@pytest.mark.parametrize("room", [2**30, 2**12])
def test_many_widths_at_once_are_each_alone(room: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether what the full network's layers read is kept or, for want of room, read again."""
    monkeypatch.setattr(reconstruction, "ROOM", room)
    torch.manual_seed(0)
    network = Residual()
    recalibrate(network.eval(), batches())
    space = space_of(network)
    inherit = reconstruction.Inheritance(space, network, batches())
    for widths in space.sample(np.random.default_rng(1), 3):
        alone = inherited(space, network, widths, "l2", batches()).state_dict()
        for name, tensor in inherit(widths, "l2").state_dict().items():
            assert torch.equal(tensor, alone[name]), name


class Separable(nn.Module):
    """Depthwise and grouped convolutions, and biases."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.depth = nn.Conv2d(3, 12, 3, 2, 1), nn.Conv2d(12, 12, 3, padding=1, groups=12)
        self.point, self.grouped = nn.Conv2d(12, 16, 1), nn.Conv2d(16, 16, 3, padding=1, groups=4, bias=False)
        self.norm, self.head = nn.BatchNorm2d(16), nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.point(torch.relu(self.depth(torch.relu(self.stem(x)))))
        return self.head(torch.relu(self.norm(self.grouped(torch.relu(x)))).mean((2, 3)))


@pytest.mark.parametrize("kind", [Residual, Separable])
def test_convolutions_among_zeros_are_the_same(kind: type[nn.Module], monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, where every shape that is new costs time."""
    torch.manual_seed(0)
    network = kind()
    recalibrate(network.eval(), batches())
    space = space_of(network)
    for widths in space.sample(np.random.default_rng(1), 3):
        expected = inherited(space, network, widths, "l2", batches()).state_dict()
        with monkeypatch.context() as patch:
            patch.setattr(reconstruction, "AT_FULL_SIZE", ("cpu",))
            found = inherited(space, network, widths, "l2", batches()).state_dict()
        for name, tensor in found.items():
            torch.testing.assert_close(tensor, expected[name], rtol=1e-4, atol=1e-5, msg=name)
