"""Dense convolutions forwards and backwards, and their shapes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from bcnet.accel.fused_step.program import Conv
from bcnet.accel.kernels.values import Window

SPLITS = 264
"""Tiles of 128x128 that a weight gradient's matrix product is split into, at least: two per multiprocessor."""

Extent = tuple[int, int, int]


def channels_last(image: Tensor) -> Tensor:
    return image.contiguous(memory_format=torch.channels_last)


def extent_of(y: Tensor) -> Extent:
    return y.shape[0], y.shape[2], y.shape[3]


def window_of(layer: Conv, extent: Extent) -> Window:
    return Window(*extent, layer.kernel[0], layer.stride[0], layer.padding)


def convolution(x: Tensor, weight: Tensor, layer: Conv) -> Tensor:
    y = torch.convolution(x, weight, None, layer.stride, layer.padding, layer.dilation, False, (0, 0), 1)
    return channels_last(y)


def convolution_backward(dy: Tensor, x: Tensor, weight: Tensor, layer: Conv, wants_x: bool) -> Any:
    mask = (wants_x, True, False)
    if layer.kernel == (1, 1) and layer.stride != (1, 1) and not x.is_cuda:
        x = x.contiguous()  # in channels last, torch 2.13 on a CPU writes beyond its memory for few channels
    return torch.ops.aten.convolution_backward.default(
        dy, x, weight, None, layer.stride, layer.padding, layer.dilation, False, (0, 0), 1, mask
    )


def tiles(outputs: int, inputs: int) -> int:
    return -(-outputs // 128) * -(-inputs // 128)


def splits(rows: int, tiles: int) -> int:
    """Into how many pieces of at least 512 rows a sum over rows is cut: a power of two that divides them."""
    parts = 1
    while parts * tiles < SPLITS and rows % (2 * parts) == 0 and rows // (2 * parts) >= 512:
        parts *= 2
    return parts
