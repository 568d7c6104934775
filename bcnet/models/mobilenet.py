"""MobileNetV2 for CIFAR and ImageNet."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from bcnet.models import plans
from bcnet.models.inverted import inverted_net
from bcnet.models.registry import MODELS


def mobilenetv2_cifar(widths: Iterable[int] | None = None, classes: int = 10) -> nn.Module:
    """(n, 3, 32, 32) to (n, classes); the last feature map is 8 x 8."""
    complete = MODELS["mobilenetv2_cifar"].complete(widths)
    return inverted_net(plans.MOBILENETV2_CIFAR, complete, classes, nn.ReLU6)


def mobilenetv2_imagenet(widths: Iterable[int] | None = None, classes: int = 1000) -> nn.Module:
    """(n, 3, 224, 224) to (n, classes)."""
    complete = MODELS["mobilenetv2_imagenet"].complete(widths)
    return inverted_net(plans.MOBILENETV2_IMAGENET, complete, classes, nn.ReLU6)
