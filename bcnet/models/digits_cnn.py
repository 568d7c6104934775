"""Small networks for scikit-learn's digits: as they are, and in clutter."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from bcnet.models.inverted import Inverted
from bcnet.models.layers import Layers, basic_block, conv_bn, finish
from bcnet.models.registry import MODELS


def digits_cnn(widths: Iterable[int] | None = None, classes: int = 10) -> nn.Module:
    """(n, 1, 8, 8) to (n, classes), with every kind of coupling: an addition and a depthwise convolution."""
    stem, conv1, expand, out, head = MODELS["digits_cnn"].complete(widths)
    layers = Layers(
        stem=conv_bn(1, stem, 3),
        block1=basic_block(stem, conv1, stem, stride=1, shortcut=nn.Identity()),
        block2=Inverted(stem, expand, out, stride=2).build(shortcut=False),
        head=conv_bn(out, head, 1),
    )
    return finish(layers, head, classes)


def cluttered_cnn(widths: Iterable[int] | None = None, classes: int = 10) -> nn.Module:
    """(n, 1, 24, 24) to (n, classes)."""
    stem, conv1, conv2, hidden, head = MODELS["cluttered_cnn"].complete(widths)
    layers = Layers(
        stem=conv_bn(1, stem, 3, stride=2),
        conv1=conv_bn(stem, conv1, 3),
        conv2=conv_bn(conv1, conv2, 3, stride=2),
        block=basic_block(conv2, hidden, conv2, stride=1, shortcut=nn.Identity()),
        head=conv_bn(conv2, head, 3),
    )
    return finish(layers, head, classes)
