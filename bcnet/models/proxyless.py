"""ProxylessNAS: inverted residual blocks whose kernels and expansions an architecture search chose."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from bcnet.models import plans
from bcnet.models.inverted import inverted_net
from bcnet.models.registry import MODELS


def proxylessnas_imagenet(widths: Iterable[int] | None = None, classes: int = 1000) -> nn.Module:
    """(n, 3, 224, 224) to (n, classes)."""
    complete = MODELS["proxylessnas_imagenet"].complete(widths)
    return inverted_net(plans.PROXYLESSNAS, complete, classes, nn.ReLU6)
