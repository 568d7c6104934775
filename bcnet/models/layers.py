"""The blocks that several families share.

Everything here runs at any width its parameters have: no forward pass stores or asks for a channel count.
"""

from __future__ import annotations

from collections import OrderedDict

from torch import Tensor, nn

Layers = OrderedDict[str, nn.Module]
Activation = type[nn.Module]


def conv_bn(
    inputs: int, outputs: int, kernel: int, stride: int = 1, act: Activation | None = nn.ReLU, depthwise: bool = False
) -> nn.Sequential:
    """Convolution (keeps the size at stride 1), batch norm, activation: (n, inputs, h, w) to (n, outputs, h', w')."""
    groups = inputs if depthwise else 1
    conv = nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, groups=groups, bias=False)
    layers = Layers(conv=conv, bn=nn.BatchNorm2d(outputs))
    if act is not None:
        layers["act"] = act()
    return nn.Sequential(layers)


class Block(nn.Module):
    """``act(body(x) + shortcut(x))``, each of the two optional: (n, c, h, w) to (n, c', h', w')."""

    def __init__(self, body: nn.Module, shortcut: nn.Module | None = None, act: nn.Module | None = None):
        super().__init__()
        self.body = body
        self.shortcut = shortcut
        self.act = act

    def forward(self, x: Tensor) -> Tensor:
        y = self.body(x)
        if self.shortcut is not None:
            y = y + self.shortcut(x)
        return y if self.act is None else self.act(y)


class SqueezeExcite(nn.Module):
    """Scales each channel by a gate in (0, 1) computed from all channels' means: (n, c, h, w) to the same."""

    def __init__(self, channels: int, squeeze: int, act: Activation):
        super().__init__()
        self.gate = nn.Sequential(
            Layers(
                pool=nn.AdaptiveAvgPool2d(1),
                squeeze=nn.Conv2d(channels, squeeze, 1),
                act=act(),
                excite=nn.Conv2d(squeeze, channels, 1),
                sigmoid=nn.Sigmoid(),
            )
        )

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gate(x)


def basic_block(inputs: int, hidden: int, outputs: int, stride: int, shortcut: nn.Module | None) -> Block:
    """Two 3x3 convolutions, ReLU after the addition."""
    body = Layers(
        conv1=conv_bn(inputs, hidden, 3, stride),
        conv2=conv_bn(hidden, outputs, 3, act=None),
    )
    return Block(nn.Sequential(body), shortcut, nn.ReLU())


def finish(layers: Layers, channels: int, classes: int) -> nn.Sequential:
    """``layers``, global pooling and a linear classifier as one network: (n, C, H, W) to (n, classes).

    Weights stay as torch's layers draw them: with fan-out initialisation, supernets learnt more slowly and ranked worse
    (docs/results/channel-bench.md).
    """
    layers["pool"] = nn.AdaptiveAvgPool2d(1)
    layers["flatten"] = nn.Flatten(1)
    layers["classifier"] = nn.Linear(channels, classes)
    return nn.Sequential(layers)
