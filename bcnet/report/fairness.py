"""The chart of a supernet's fairness: how often each of its channels is used."""

from __future__ import annotations

from typing import Any

import numpy as np

from bcnet.report.data import ReportData
from bcnet.space.widths import WidthVariable
from bcnet.supernet.principle import UA, Principle


def fairness(data: ReportData, chosen: Principle) -> dict[str, Any]:
    """How often each channel is used; one pair of traces per variable, of which the page shows one."""
    traces = []
    for number, variable in enumerate(data.variables):
        shown = {"visible": number == widest(data)}
        traces.append(_steps(chosen, variable, "--found", 3) | shown | {"fill": "tozeroy", "fillcolor": "--wash"})
        if chosen is not UA:
            dotted = _steps(UA, variable, "--uniform", 2)
            dotted["line"]["dash"] = "dot"
            traces.append(dotted | shown)
    return {
        "data": traces,
        "layout": {
            "xaxis": {"title": {"text": "channel of the supernet"}, "showgrid": False},
            "yaxis": {"title": {"text": "how often it is used"}, "rangemode": "tozero"},
        },
    }


def widest(data: ReportData) -> int:
    """The variable that fairness is shown for first."""
    return int(np.argmax([variable.max for variable in data.variables]))


def _steps(principle: Principle, variable: WidthVariable, colour: str, width: float) -> dict[str, Any]:
    """The cardinality of every channel, drawn by its steps alone."""
    uses = principle.cardinality(variable)
    starts = [0, *(np.flatnonzero(np.diff(uses)) + 1).tolist(), len(uses)]
    values = [int(uses[min(start, len(uses) - 1)]) for start in starts]
    return {
        "type": "scatter",
        "mode": "lines",
        "name": principle.name if principle.name != "ua" else "ua, for comparison",
        "x": [start + 0.5 for start in starts],
        "y": values,
        "line": {"color": colour, "width": width, "shape": "hv"},
        "hovertemplate": f"from channel %{{x:.0f}}: used %{{y}} times<extra>{principle.name}</extra>",
    }
