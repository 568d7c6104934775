"""A small network for scikit-learn's digits, with every kind of coupling: an addition and a depthwise convolution."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from bcnet.models.inverted import Inverted
from bcnet.models.layers import Layers, basic_block, conv_bn, finish
from bcnet.models.registry import MODELS


def digits_cnn(widths: Iterable[int] | None = None, classes: int = 10) -> nn.Module:
    """(n, 1, 8, 8) to (n, classes)."""
    stem, conv1, expand, out, head = MODELS["digits_cnn"].complete(widths)
    layers = Layers(
        stem=conv_bn(1, stem, 3),
        block1=basic_block(stem, conv1, stem, stride=1, shortcut=nn.Identity()),
        block2=Inverted(stem, expand, out, stride=2).build(shortcut=False),
        head=conv_bn(out, head, 1),
    )
    return finish(layers, head, classes)
