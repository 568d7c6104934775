"""A trained network as a supernet without any training: its channels in order of importance, so that every path is the
network cut to these widths. What scores paths of a supernet, all of a space at once included, then scores cuts.
"""

from __future__ import annotations

import numpy as np
from torch import nn

from bcnet.errors import BcnetError
from bcnet.space.importance import Keep, importance
from bcnet.space.network import NetworkSpace
from bcnet.supernet.supernet import Supernet


def cut_supernet(space: NetworkSpace, network: nn.Module, keep: Keep = "l2") -> Supernet:
    """A ``ua`` supernet with the weights of ``network``, the most important channels of every variable first.

    ``keep`` names a criterion or holds the scores of every variable's units. Its widest path is ``network`` itself.
    """
    scores = importance(space, network, keep) if isinstance(keep, str) else keep
    for name, axes in space.coupling.axes.items():
        if any(axis.mixed or axis.numbers is not None for axis in axes):
            raise BcnetError(
                f"channels of {name!r} cannot be put in another order: score cut networks one by one (score: cut)"
            )
    net = Supernet(space, "ua").to(next(network.parameters()).device)
    space.copy_weights(net, space.max, network, kept=[np.argsort(-np.asarray(row), kind="stable") for row in scores])
    return net
