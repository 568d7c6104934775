"""bcnet: find the best channel widths of a convolutional network under a budget.

``bcnet.slim`` does all of it; ``bcnet.load`` gives an exported network back. The names here are imported when they
are first used, so that ``import bcnet`` is instant.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from bcnet.api import Result, slim
    from bcnet.errors import BcnetError
    from bcnet.recipe import Recipe
    from bcnet.saved import load
    from bcnet.space.network import trace
    from bcnet.supernet.supernet import Supernet
    from bcnet.task import Task

_PLACES = {
    "BcnetError": "bcnet.errors",
    "Recipe": "bcnet.recipe",
    "Result": "bcnet.api",
    "Supernet": "bcnet.supernet.supernet",
    "Task": "bcnet.task",
    "load": "bcnet.saved",
    "slim": "bcnet.api",
    "trace": "bcnet.space.network",
}

__all__ = ["BcnetError", "Recipe", "Result", "Supernet", "Task", "__version__", "load", "slim", "trace"]


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module 'bcnet' has no attribute {name!r}")
    return getattr(importlib.import_module(_PLACES[name]), name)


def __dir__() -> list[str]:
    return __all__
