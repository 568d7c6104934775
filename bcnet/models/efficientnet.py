"""EfficientNet-B0 with squeeze-and-excitation."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from bcnet.models import plans
from bcnet.models.inverted import inverted_net
from bcnet.models.registry import MODELS


def efficientnet_b0_imagenet(widths: Iterable[int] | None = None, classes: int = 1000) -> nn.Module:
    """(n, 3, 224, 224) to (n, classes).

    A squeeze width is a quarter of its block's input in the full network. With 24 widths the 16 squeeze
    widths stay so; with 40, in order of first use, they are given too.
    """
    complete = MODELS["efficientnet_b0_imagenet"].complete(widths)
    return inverted_net(plans.EFFICIENTNET_B0, complete, classes, nn.SiLU)
