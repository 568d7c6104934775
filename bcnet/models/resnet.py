"""ResNet18, 34 and 50 for ImageNet, with the stride in the 3x3 convolutions, and ResNet18 for CIFAR."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from bcnet.models.architectures import ResNetArchitecture
from bcnet.models.layers import Block, Layers, basic_block, conv_bn, finish


def build(architecture: ResNetArchitecture, widths: Sequence[int], classes: int) -> nn.Sequential:
    """The network of ``architecture`` at ``widths``, one for each of its variables: (n, 3, H, W) to (n, classes)."""
    width = iter(widths)
    channels = next(width)
    layers = Layers(stem=conv_bn(3, channels, 3) if architecture.small else conv_bn(3, channels, 7, stride=2))
    if not architecture.small:
        layers["maxpool"] = nn.MaxPool2d(3, stride=2, padding=1)
    for i, count in enumerate(architecture.blocks, 1):
        blocks: list[nn.Module] = []
        for j in range(count):
            hidden = [next(width) for _ in range(2 if architecture.bottleneck else 1)]
            projects = j == 0 and architecture.projects(i)
            outputs = next(width) if projects else channels
            stride = 2 if j == 0 and i > 1 else 1
            shortcut = conv_bn(channels, outputs, 1, stride, act=None) if projects else nn.Identity()
            if architecture.bottleneck:
                blocks.append(_bottleneck((channels, *hidden, outputs), stride, shortcut))
            else:
                blocks.append(basic_block(channels, hidden[0], outputs, stride, shortcut))
            channels = outputs
        layers[f"stage{i}"] = nn.Sequential(*blocks)
    return finish(layers, channels, classes)


def _bottleneck(widths: Sequence[int], stride: int, shortcut: nn.Module) -> Block:
    """1x1, 3x3 and 1x1 convolutions between the four ``widths``, ReLU after the addition."""
    inputs, first, second, outputs = widths
    body = Layers(
        conv1=conv_bn(inputs, first, 1),
        conv2=conv_bn(first, second, 3, stride),
        conv3=conv_bn(second, outputs, 1, act=None),
    )
    return Block(nn.Sequential(body), shortcut, nn.ReLU())
