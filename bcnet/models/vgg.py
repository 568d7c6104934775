"""VGG19 for CIFAR."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from bcnet.models.architectures import VGGArchitecture
from bcnet.models.layers import Layers, conv_bn, finish


def build(architecture: VGGArchitecture, widths: Sequence[int], classes: int) -> nn.Sequential:
    """(n, 3, 32, 32) to (n, classes): max pooling between the stages, global pooling after the last."""
    width = iter(widths)
    layers, channels, number = Layers(), 3, 0
    for i, stage in enumerate(architecture.stages):
        if i > 0:
            layers[f"pool{i}"] = nn.MaxPool2d(2)
        for _ in stage:
            number += 1
            outputs = next(width)
            layers[f"conv{number}"] = conv_bn(channels, outputs, 3)
            channels = outputs
    return finish(layers, channels, classes)
