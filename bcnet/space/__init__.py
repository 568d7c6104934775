"""What may vary: width variables, their coupling, networks at given widths, and their costs."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bcnet.space.axis import Size
    from bcnet.space.labels import Value
    from bcnet.space.network import NetworkSpace, trace
    from bcnet.space.operators import OPERATORS, Call, register, rule
    from bcnet.space.widths import WidthSpace, WidthVariable, candidates

__all__ = [
    "OPERATORS",
    "Call",
    "NetworkSpace",
    "Size",
    "Value",
    "WidthSpace",
    "WidthVariable",
    "candidates",
    "register",
    "rule",
    "trace",
]

_ROOMS = {
    "axis": ("Size",),
    "labels": ("Value",),
    "network": ("NetworkSpace", "trace"),
    "operators": ("OPERATORS", "Call", "register", "rule"),
    "widths": ("WidthSpace", "WidthVariable", "candidates"),
}


def __getattr__(name: str) -> Any:
    """Looked up on first use, because some rooms need torch and others must not."""
    for room, names in _ROOMS.items():
        if name in names:
            return getattr(import_module(f"{__name__}.{room}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
