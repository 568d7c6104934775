"""What may vary: width variables, their coupling, networks at given widths, and their costs."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # `as` exports a name to type checkers
    from bcnet.space.axis import Size as Size
    from bcnet.space.labels import Value as Value
    from bcnet.space.network import NetworkSpace as NetworkSpace
    from bcnet.space.network import trace as trace
    from bcnet.space.operators import OPERATORS as OPERATORS
    from bcnet.space.operators import Call as Call
    from bcnet.space.operators import register as register
    from bcnet.space.operators import rule as rule
    from bcnet.space.widths import WidthSpace as WidthSpace
    from bcnet.space.widths import WidthVariable as WidthVariable
    from bcnet.space.widths import candidates as candidates

_NAMES = {
    "axis": ("Size",),
    "labels": ("Value",),
    "network": ("NetworkSpace", "trace"),
    "operators": ("OPERATORS", "Call", "register", "rule"),
    "widths": ("WidthSpace", "WidthVariable", "candidates"),
}

__all__ = [name for names in _NAMES.values() for name in names]


def __getattr__(name: str) -> Any:
    """Looked up on first use, because some modules need torch and others must not."""
    for module, names in _NAMES.items():
        if name in names:
            return getattr(import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
