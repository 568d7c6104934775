"""bcnet: find the best channel widths of a convolutional network under a budget.

``bcnet.slim`` does all of it; ``bcnet.load`` gives an exported network back. For the steps between, ``bcnet.trace``
finds the width space of a network, ``bcnet.Supernet`` and ``bcnet.train_supernet`` train all of it at once,
``bcnet.search.search`` finds the best configuration and ``bcnet.retrain`` trains it.

Names and packages (``bcnet.search``, ``bcnet.bench``, …) are imported when they are first used, so that
``import bcnet`` is instant.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:  # `as` exports a name to type checkers
    from bcnet import bench as bench
    from bcnet import data as data
    from bcnet import latency as latency
    from bcnet import models as models
    from bcnet import report as report
    from bcnet import run as run
    from bcnet import search as search
    from bcnet import space as space
    from bcnet import supernet as supernet
    from bcnet import training as training
    from bcnet.bench.table import ChannelBench as ChannelBench
    from bcnet.data.load import load_data as load_data
    from bcnet.errors import BcnetError as BcnetError
    from bcnet.models.load import load_model as load_model
    from bcnet.run.recipe import Recipe as Recipe
    from bcnet.run.serialization import load as load
    from bcnet.run.slim import Result as Result
    from bcnet.run.slim import slim as slim
    from bcnet.search.config import SearchConfig as SearchConfig
    from bcnet.search.constraints import Constraints as Constraints
    from bcnet.search.predictors.log_width import LogWidthModel as LogWidthModel
    from bcnet.space.network import trace as trace
    from bcnet.space.widths import WidthSpace as WidthSpace
    from bcnet.space.widths import WidthVariable as WidthVariable
    from bcnet.supernet.scoring import Evaluator as Evaluator
    from bcnet.supernet.supernet import Supernet as Supernet
    from bcnet.supernet.training import SupernetTraining as SupernetTraining
    from bcnet.supernet.training import train_supernet as train_supernet
    from bcnet.training.optim import Optimisation as Optimisation
    from bcnet.training.retraining import Retraining as Retraining
    from bcnet.training.retraining import retrain as retrain
    from bcnet.training.task import Task as Task

_ROOMS = ("bench", "data", "latency", "models", "report", "run", "search", "space", "supernet", "training")
_PLACES = {
    "BcnetError": "errors",
    "ChannelBench": "bench.table",
    "Constraints": "search.constraints",
    "Evaluator": "supernet.scoring",
    "LogWidthModel": "search.predictors.log_width",
    "Optimisation": "training.optim",
    "Recipe": "run.recipe",
    "Result": "run.slim",
    "Retraining": "training.retraining",
    "SearchConfig": "search.config",
    "Supernet": "supernet.supernet",
    "SupernetTraining": "supernet.training",
    "Task": "training.task",
    "WidthSpace": "space.widths",
    "WidthVariable": "space.widths",
    "load": "run.serialization",
    "load_data": "data.load",
    "load_model": "models.load",
    "retrain": "training.retraining",
    "slim": "run.slim",
    "trace": "space.network",
    "train_supernet": "supernet.training",
}

__all__ = ["__version__", *_ROOMS, *_PLACES]


def __getattr__(name: str) -> Any:
    if name in _ROOMS:
        return importlib.import_module(f"bcnet.{name}")
    if name not in _PLACES:
        raise AttributeError(f"module 'bcnet' has no attribute {name!r}")
    return getattr(importlib.import_module(f"bcnet.{_PLACES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
