"""What ranks the networks of a table without any supernet: a supernet has to do better than these."""

from __future__ import annotations

from typing import Any

from numpy.typing import NDArray

from bcnet.bench.table import ChannelBench
from bcnet.search.predictors.log_width import LogWidthModel

PREDICTORS = {"flops": "FLOPs", "params": "parameters", "widths": "log widths × layers"}
"""Their names, and what they are called; ``widths`` is the log-width model in which every layer gains alike."""


def predicted(predictor: str, table: ChannelBench) -> NDArray[Any]:
    """The prediction of one of :data:`PREDICTORS` for every network of a table, (n,)."""
    if predictor == "widths":
        return LogWidthModel.balanced(table.space).predict(table.widths)
    return table.costs[predictor]
