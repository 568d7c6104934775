"""MobileNetV2, ProxylessNAS and EfficientNet: networks of inverted residual blocks.

Dropout and stochastic depth are left to the training recipe: the networks hold only what has widths.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from bcnet.models.architectures import InvertedArchitecture
from bcnet.models.layers import Activation, Block, Layers, SqueezeExcite, conv_bn, finish


@dataclass(frozen=True)
class Inverted:
    """What an inverted residual block is made of; ``hidden`` 0: no expansion, ``squeeze`` 0: no excitation."""

    inputs: int
    hidden: int
    outputs: int
    kernel: int = 3
    stride: int = 1
    squeeze: int = 0
    act: Activation = nn.ReLU

    def build(self, shortcut: bool) -> Block:
        """Expand 1x1, depthwise, squeeze-and-excite, project 1x1; no activation after the addition."""
        body = Layers()
        if self.hidden:
            body["expand"] = conv_bn(self.inputs, self.hidden, 1, act=self.act)
        inner = self.hidden or self.inputs
        body["depthwise"] = conv_bn(inner, inner, self.kernel, self.stride, self.act, depthwise=True)
        if self.squeeze:
            body["excite"] = SqueezeExcite(inner, self.squeeze, self.act)
        body["project"] = conv_bn(inner, self.outputs, 1, act=None)
        return Block(nn.Sequential(body), nn.Identity() if shortcut else None)


def build(architecture: InvertedArchitecture, widths: Sequence[int], classes: int) -> nn.Sequential:
    """The network of ``architecture`` at ``widths``, one for each of its variables: (n, 3, H, W) to (n, classes)."""
    width, act = iter(widths), getattr(nn, architecture.act)
    channels = next(width)
    layers = Layers(stem=conv_bn(3, channels, 3, architecture.stem_stride, act))
    for i, stage in enumerate(architecture.stages, 1):
        blocks: list[nn.Module] = []
        outputs = 0
        for j, (kernel, expansion) in enumerate(stage.blocks):
            first = j == 0
            hidden = next(width) if expansion > 1 else 0
            squeeze = next(width) if architecture.squeeze else 0
            outputs = next(width) if first else outputs
            block = Inverted(channels, hidden, outputs, kernel, stage.stride if first else 1, squeeze, act)
            # By place, not by equal widths: ends of different variables may happen to be equal.
            blocks.append(block.build(shortcut=not first))
            channels = outputs
        layers[f"stage{i}"] = nn.Sequential(*blocks)
    head = next(width)
    layers["head"] = conv_bn(channels, head, 1, act=act)
    return finish(layers, head, classes)
