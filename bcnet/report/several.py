"""Several runs on one page: what each reached, for what cost."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

from bcnet import __version__
from bcnet.report import words
from bcnet.report.charts import scatter
from bcnet.report.data import ReportData
from bcnet.report.page import as_json, file_text, packed_plotly
from bcnet.report.tradeoff import PAGE


def render_several(runs: Sequence[ReportData]) -> str:
    """The page as one HTML text; the scores must be of one metric."""
    first = runs[0]
    name = first.first_budget.name
    label = words.COSTS.get(name, name)
    models, data = (sorted({getattr(run, key) for run in runs}) for key in ("model", "data"))
    return PAGE.substitute(
        title=escape(f"{len(runs)} runs side by side"),
        metric=escape(first.metric[:1].upper() + first.metric[1:]),
        model=escape(", ".join(models)),
        data=escape(", ".join(data)),
        style=file_text("page.css"),
        lead=escape(
            f"What each run ships, beside its full network and uniform scaling, by {first.metric} and {label}."
        ),
        table=_table(runs, name, label),
        caption=escape("Each run has a report of its own; figures of different machines or data do not compare."),
        version=escape(__version__),
        plotly=packed_plotly(),
        charts=as_json({"tradeoff": _chart(runs, name, label)}),
        script=file_text("page.js"),
    )


def _table(runs: Sequence[ReportData], name: str, label: str) -> str:
    heads = ["run", "budget", "verdict", "full", "uniform", "slim", label, "latency"]
    rows = []
    for run in runs:
        uniform = run.networks.get("uniform")
        cells = [
            run.run,
            ", ".join(budget.text for budget in run.budgets),
            words.badge(run)[0],
            words.score(run, run.full.score),
            "–" if uniform is None else words.score(run, uniform.score),
            words.score(run, run.found.score),
            words.cost(name, run.found.costs[name]) if name in run.found.costs else "–",
            words.milliseconds(run.found.latency_ms),
        ]
        rows.append("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in cells) + "</tr>")
    head = "".join(f"<th>{escape(text)}</th>" for text in heads)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"


def _chart(runs: Sequence[ReportData], name: str, label: str) -> dict[str, Any]:
    colours = {"full": "--full", "uniform": "--uniform", "slim": "--found"}
    traces = []
    for kind, colour in colours.items():
        points = []
        for run in runs:
            figures = run.found if kind == "slim" else run.networks.get(kind)
            if figures is not None and name in figures.costs:
                shown = figures.score if run.higher_is_better else -figures.score
                points.append((figures.costs[name], 100 * shown if run.percent else shown, escape(run.run)))
        costs, scores, texts = ([point[i] for point in points] for i in range(3))
        traces.append(scatter("markers", kind, costs, scores, hovertext=texts, marker={"color": colour, "size": 11}))
    return {
        "data": traces,
        "layout": {
            "xaxis": {"title": {"text": label}, "tickformat": "~s"},
            "yaxis": {"title": {"text": runs[0].metric}, "ticksuffix": "%" if runs[0].percent else runs[0].unit},
        },
    }
