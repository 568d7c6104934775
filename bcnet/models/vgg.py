"""VGG19 for CIFAR."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from bcnet.models import plans
from bcnet.models.layers import Layers, conv_bn, finish
from bcnet.models.registry import MODELS


def vgg19_cifar(widths: Iterable[int] | None = None, classes: int = 10) -> nn.Module:
    """(n, 3, 32, 32) to (n, classes): four max poolings, the fifth is the global one."""
    width = iter(MODELS["vgg19_cifar"].complete(widths))
    layers, channels, number = Layers(), 3, 0
    for i, stage in enumerate(plans.VGG19.stages):
        if i > 0:
            layers[f"pool{i}"] = nn.MaxPool2d(2)
        for _ in stage:
            number += 1
            outputs = next(width)
            layers[f"conv{number}"] = conv_bn(channels, outputs, 3)
            channels = outputs
    return finish(layers, channels, classes)
