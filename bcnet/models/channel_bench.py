"""The two networks of Channel-Bench-Macro, as its tables were made: their FLOPs and parameters agree on every entry.

The paper's table of the MobileNet leaves out the last 1x1 convolution; the released figures contain it.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from bcnet.models.inverted import Inverted
from bcnet.models.layers import Layers, basic_block, conv_bn, finish
from bcnet.models.registry import MODELS


def channel_bench_mobilenet(widths: Iterable[int] | None = None, classes: int = 10) -> nn.Module:
    """(n, 3, 32, 32) to (n, classes), four inverted residual blocks."""
    c0, h1, h2, h3, c4, h5, c6 = MODELS["channel_bench_mobilenet"].complete(widths)
    layers = Layers(
        stem=conv_bn(3, c0, 3, stride=2),
        block1=Inverted(c0, h1, c0).build(shortcut=True),
        block2=Inverted(c0, h2, c0).build(shortcut=True),
        block3=Inverted(c0, h3, c4, stride=2).build(shortcut=False),
        block4=Inverted(c4, h5, c4).build(shortcut=True),
        head=conv_bn(c4, c6, 1),
    )
    return finish(layers, c6, classes)


def channel_bench_resnet(widths: Iterable[int] | None = None, classes: int = 10) -> nn.Module:
    """(n, 3, 32, 32) to (n, classes), five basic blocks; the third strides and has no shortcut."""
    c0, m1, m2, m3, c4, m5, m6 = MODELS["channel_bench_resnet"].complete(widths)
    layers = Layers(
        stem=conv_bn(3, c0, 3, stride=2),
        block1=basic_block(c0, m1, c0, stride=1, shortcut=nn.Identity()),
        block2=basic_block(c0, m2, c0, stride=1, shortcut=nn.Identity()),
        block3=basic_block(c0, m3, c4, stride=2, shortcut=None),
        block4=basic_block(c4, m5, c4, stride=1, shortcut=nn.Identity()),
        block5=basic_block(c4, m6, c4, stride=1, shortcut=nn.Identity()),
    )
    return finish(layers, c4, classes)
