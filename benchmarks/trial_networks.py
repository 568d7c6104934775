"""Two small networks for the trial of the log-width model, of kinds that it was not made with: a chain without
shortcuts, and modules that concatenate their outputs. Both see 32 x 32 images at a quarter of their size."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from bcnet.models.layers import Layers, conv_bn, finish

SHAPE = (3, 32, 32)
CLASSES = 10


def chain() -> nn.Module:
    """Seven convolutions one after the other, each with a width of its own: (n, 3, 32, 32) to (n, 10)."""
    layers = Layers(shrink=nn.AvgPool2d(4))
    inputs = SHAPE[0]
    for i, (outputs, stride) in enumerate([(24, 1), (32, 1), (32, 1), (64, 2), (64, 1), (64, 1), (128, 2)]):
        layers[f"conv{i}"] = conv_bn(inputs, outputs, 3, stride)
        inputs = outputs
    return finish(layers, inputs, CLASSES)


class Fire(nn.Module):
    """Squeeze 1x1, then 1x1 and 3x3 side by side: (n, inputs, h, w) to (n, 2 * expand, h', w')."""

    def __init__(self, inputs: int, squeeze: int, expand: int, stride: int):
        super().__init__()
        self.squeeze = conv_bn(inputs, squeeze, 1)
        self.small = conv_bn(squeeze, expand, 1, stride)
        self.large = conv_bn(squeeze, expand, 3, stride)

    def forward(self, x: Tensor) -> Tensor:
        x = self.squeeze(x)
        return torch.cat([self.small(x), self.large(x)], dim=1)


def concatenated() -> nn.Module:
    """A stem and three modules that concatenate: ten widths, (n, 3, 32, 32) to (n, 10)."""
    layers = Layers(shrink=nn.AvgPool2d(4), stem=conv_bn(SHAPE[0], 32, 3))
    inputs = 32
    for i, (squeeze, expand, stride) in enumerate([(32, 48, 1), (48, 64, 2), (64, 96, 1)]):
        layers[f"fire{i}"] = Fire(inputs, squeeze, expand, stride)
        inputs = 2 * expand
    return finish(layers, inputs, CLASSES)


chain.input_shape = concatenated.input_shape = SHAPE  # type: ignore[attr-defined]
