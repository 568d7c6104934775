"""Strided 1x1 convolutions on a CPU, run so that their weight gradients stay within their memory.

With several threads, torch 2.13 writes past the end of the weight gradient of such a convolution in channels-last where
the threads do not divide the batch evenly: a crash at best. A convolution without stride over every second pixel gives
the same result, and is safe.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode


def safe_gradients(device: torch.device) -> AbstractContextManager[Any]:
    """A context in which the gradients of whatever runs forwards on ``device`` can be trusted."""
    return _WithoutStride() if device.type == "cpu" else nullcontext()


class _WithoutStride(TorchFunctionMode):
    def __torch_function__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = kwargs or {}
        if func is torch.conv2d or func is torch.ops.aten.conv2d.default:
            found = _without_stride(*args, **given)
            return func(*args, **given) if found is None else found
        return func(*args, **given)


def _without_stride(
    input: Tensor, weight: Tensor, bias: Any = None, stride: Any = 1, padding: Any = 0, *more: Any, **named: Any
) -> Tensor | None:
    """A strided 1x1 convolution computed without stride; None for any other convolution. ``more`` and ``named`` are the
    dilation, which has no effect here, and the groups."""
    down, right = _pair(stride)
    unpadded = padding == "valid" or (padding != "same" and _pair(padding) == (0, 0))
    if weight.shape[2:] != (1, 1) or (down, right) == (1, 1) or not unpadded:
        return None
    return torch.conv2d(input[..., ::down, ::right], weight, bias, 1, 0, *more, **named)


def _pair(value: Any) -> tuple[int, int]:
    """A stride or padding, which may be one number for both axes."""
    one = value if isinstance(value, int) else tuple(value)
    return (one, one) if isinstance(one, int) else (one[0], one[-1])
