"""The part of a network's output that a task is about, found automatically for the usual kinds of outputs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

_NAMES = ("logits", "out", "prediction", "predictions", "pred", "heatmaps", "sample", "last_hidden_state")


def logits(output: Any) -> Any:
    """The tensor of an output that matters: its ``logits`` (or ``out`` ...), or its only one; otherwise all of it."""
    if isinstance(output, Tensor):
        return output
    if isinstance(output, Mapping):
        named = [output[name] for name in _NAMES if isinstance(output.get(name), Tensor)]
        tensors = [value for value in output.values() if isinstance(value, Tensor)]
    elif isinstance(output, (list, tuple)) and not hasattr(output, "_fields"):
        named, tensors = [], [value for value in output if isinstance(value, Tensor)]
        if len(output) > 1:
            return output
    else:
        named = [value for name in _NAMES if isinstance(value := getattr(output, name, None), Tensor)]
        tensors = []
    if named:
        return named[0]
    return tensors[0] if len(tensors) == 1 else output
