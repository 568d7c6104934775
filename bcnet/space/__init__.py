"""What may vary: width variables, their coupling, networks at given widths, and their costs."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bcnet.space.labels import Value
    from bcnet.space.operators import RULES, Call, rule

__all__ = ["RULES", "Call", "Value", "rule"]

_ROOMS = {"RULES": "operators", "Call": "operators", "rule": "operators", "Value": "labels"}


def __getattr__(name: str) -> Any:
    """Names that need torch are looked up on first use."""
    if name not in _ROOMS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_ROOMS[name]}"), name)
