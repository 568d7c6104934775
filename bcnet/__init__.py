"""bcnet: find the best channel widths of a convolutional network under a budget.

``bcnet.slim`` does all of it; ``bcnet.load`` gives an exported network back. The names here are imported when they
are first used, so that ``import bcnet`` is instant.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from bcnet.errors import BcnetError
    from bcnet.run.recipe import Recipe
    from bcnet.run.serialization import load
    from bcnet.run.slim import Result, slim
    from bcnet.space.network import trace
    from bcnet.supernet.supernet import Supernet
    from bcnet.training.task import Task

_PLACES = {
    "BcnetError": "bcnet.errors",
    "Recipe": "bcnet.run.recipe",
    "Result": "bcnet.run.slim",
    "Supernet": "bcnet.supernet.supernet",
    "Task": "bcnet.training.task",
    "load": "bcnet.run.serialization",
    "slim": "bcnet.run.slim",
    "trace": "bcnet.space.network",
}

__all__ = ["BcnetError", "Recipe", "Result", "Supernet", "Task", "__version__", "load", "slim", "trace"]


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module 'bcnet' has no attribute {name!r}")
    return getattr(importlib.import_module(_PLACES[name]), name)


def __dir__() -> list[str]:
    return __all__
