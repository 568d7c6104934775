"""Layers make up for dropped channels: exactly where the others tell them, and never for the worse."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from bcnet.errors import BcnetError
from bcnet.space.importance import kept_units
from bcnet.space.network import NetworkSpace, trace
from bcnet.training.recalibration import recalibrate
from bcnet.training.reconstruction import Reconstruction, inherited


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
    rebuilt = inherited(space, network, [6, 4], keep, Reconstruction(space, network, batches())).eval()
    cut = inherited(space, network, [6, 4], keep).eval()
    spread = expected.std()
    assert (rebuilt(x) - expected).abs().max() < 0.02 * spread  # the ridge takes a little
    assert (cut(x) - expected).abs().max() > 0.1 * spread


@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 2**16), widths=st.tuples(st.integers(1, 7), st.integers(1, 15)))
def test_what_layers_compute_is_nearer_to_what_they_did(seed: int, widths: tuple[int, int]) -> None:
    """On the batches it was measured on, every adjusted layer is nearer to the given network's than the plain cut."""
    torch.manual_seed(seed)
    network = Residual().eval()
    space = space_of(network)
    assert [v.name for v in space.variables] == ["stem", "expand"]
    given = batches(seed)
    kept = kept_units(space, list(widths), "l2", network)
    source = Reconstruction(space, network, given).source(kept)
    read: dict[str, Tensor] = {}
    for name in ("expand", "project", "head"):
        layer = network.get_submodule(name)
        layer.register_forward_pre_hook(lambda _, x, name=name: read.update({name: x[0]}))
    network(torch.cat([x for x, _ in given]))
    for name, variable in (("expand", 0), ("project", 1), ("head", 0)):
        x, stay = read[name], torch.from_numpy(kept[variable])
        plain = torch.zeros_like(x)
        plain[:, stay] = x[:, stay]
        expected, cut, rebuilt = (
            copy.deepcopy(of.get_submodule(name))(y).transpose(0, 1).flatten(1)
            for of, y in ((network, x), (network, plain), (source, plain))
        )

        def error(found: Tensor, expected: Tensor = expected) -> Tensor:
            away = found - expected
            return (away - away.mean(1, keepdim=True)).square().sum()  # a norm's statistics take constants up

        assert error(rebuilt) <= error(cut) * 1.001


def test_nothing_changes_where_nothing_is_cut() -> None:
    torch.manual_seed(0)
    network = Residual()
    space = space_of(network)
    before = copy.deepcopy(network.state_dict())
    reconstruction = Reconstruction(space, network, batches())
    assert network.training
    for state in (network.state_dict(), reconstruction.source([np.arange(8), np.arange(16)]).state_dict()):
        assert all(torch.equal(state[name], before[name]) for name in before)


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
    for name, reconstruction in (("cut", None), ("rebuilt", Reconstruction(space, network, batches()))):
        slim = inherited(space, network, [8, 8], "l2", reconstruction)
        recalibrate(slim, batches())
        away[name] = (slim.eval()(x) - expected).square().mean()
    assert away["rebuilt"] < 0.9 * away["cut"]


def test_no_batch_is_one_sentence() -> None:
    network = Residual()
    with pytest.raises(BcnetError, match=r"^dropped channels are made up for by what layers read: give at least one"):
        Reconstruction(space_of(network), network, [])
