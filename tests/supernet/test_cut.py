"""A trained network as a supernet: its paths are the networks that cutting by importance gives."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from odd_networks import Picked
from torch import nn

from bcnet.accel.enumeration.score_all import score_all
from bcnet.errors import BcnetError
from bcnet.models.channel_bench import channel_bench_mobilenet, channel_bench_resnet
from bcnet.space.network import trace
from bcnet.supernet.cut import cut_supernet

NETWORKS = {
    "mobilenet": lambda: channel_bench_mobilenet([8, 16, 16, 16, 8, 16, 16]),
    "resnet": lambda: channel_bench_resnet([8] * 7),
}


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("keep", ["l2", "bn-scale"])
def test_paths_are_the_cut_networks(name: str, keep: str) -> None:
    torch.manual_seed(0)
    space = trace(NETWORKS[name](), torch.randn(2, 3, 16, 16), groups=4)
    full = space.build(space.max)
    for module in full.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.weight)
    net = cut_supernet(space, full, keep)
    x = torch.randn(4, 3, 16, 16)
    for widths in (space.min, space.max, *space.sample(np.random.default_rng(0), 3)):
        network = space.build(widths, weights_of=full, keep=keep).train()
        torch.testing.assert_close(net(x, widths), network(x), rtol=1e-4, atol=1e-5)


def test_all_cuts_are_scored_at_once() -> None:
    torch.manual_seed(0)
    space = trace(NETWORKS["resnet"](), torch.randn(2, 3, 16, 16), groups=2)
    full = space.build(space.max)
    x, y = torch.randn(16, 3, 16, 16), torch.randint(0, 10, (16,))
    found = score_all(cut_supernet(space, full).eval(), [(x, y)])
    network = space.build(found.widths[5], weights_of=full, keep="l2").train()
    loss = nn.functional.cross_entropy(network(x), y)
    assert len(found.widths) == 2 ** len(space)
    assert found.loss[0, 5] == pytest.approx(loss.item(), rel=1e-4)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_channels_that_are_numbered_cannot_be_sorted() -> None:
    network = Picked()
    space = trace(network, torch.randn(2, 3, 16, 16), groups=4)
    with pytest.raises(BcnetError, match=r"^channels of '.+' cannot be put in another order: .* \(score: cut\)$"):
        cut_supernet(space, network)
