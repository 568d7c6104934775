"""A trained network as a supernet without any training: its channels in order of importance, so that every path is the
network cut to these widths. What scores paths of a supernet, all of a space at once included, then scores cuts.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

from bcnet.errors import BcnetError
from bcnet.space.importance import Keep, importance
from bcnet.space.network import NetworkSpace
from bcnet.space.resize import selected
from bcnet.supernet.supernet import Supernet


@torch.no_grad()
def cut_supernet(space: NetworkSpace, network: nn.Module, keep: Keep = "l2") -> Supernet:
    """A ``ua`` supernet with the weights of ``network``, the most important channels of every variable first.

    ``keep`` names a criterion or holds the scores of every variable's units. Its widest path is ``network`` itself.
    """
    scores = importance(space, network, keep) if isinstance(keep, str) else keep
    orders = [np.argsort(-np.asarray(row), kind="stable") for row in scores]
    net = Supernet(space, "ua").to(next(network.parameters()).device)
    state = network.state_dict()
    for name, place in net.state_dict().items():
        axes = space.coupling.axes.get(name, ())
        if any(axis.mixed or axis.numbers is not None for axis in axes):
            raise BcnetError(f"channels of {name!r} cannot be put in another order: score cut networks one by one")
        place.copy_(selected(state[name], axes, orders, [len(order) for order in orders]))
    return net
