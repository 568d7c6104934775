"""Several runs on one page: what each reached, for what cost."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

from bcnet.report import words
from bcnet.report.charts import scatter, tradeoff_chart
from bcnet.report.data import ReportData
from bcnet.report.page import fill


def render_several(runs: Sequence[ReportData]) -> str:
    """The page as one HTML text; the scores must be of one metric."""
    first = runs[0]
    name = first.first_budget.name
    label = words.COSTS.get(name, name)
    return fill(
        "tradeoff.html",
        {"tradeoff": tradeoff_chart(first, _traces(runs, name), label)},
        title=f"{len(runs)} runs side by side",
        model=", ".join(sorted({run.model for run in runs})),
        data=", ".join(sorted({run.data for run in runs})),
        metric=first.metric,
        lead=f"What each run ships, beside its full network and uniform scaling, by {first.metric} and {label}.",
        heads=("run", "budget", "slim", "uniform", "full", label, "latency", "verdict"),
        rows=[_row(run, name) for run in runs],
        caption="Each run has a report of its own; figures of different machines or data do not compare.",
    )


def _row(run: ReportData, cost: str) -> list[str]:
    uniform = run.networks.get("uniform")
    return [
        run.run,
        ", ".join(budget.text for budget in run.budgets),
        words.score(run, run.found.score),
        words.score(run, None if uniform is None else uniform.score),
        words.score(run, run.full.score),
        words.cost(cost, run.found.costs[cost]) if cost in run.found.costs else "–",
        words.milliseconds(run.found.latency_ms),
        words.badge(run)[0],
    ]


def _traces(runs: Sequence[ReportData], name: str) -> list[dict[str, Any]]:
    colours = {"full": "--full", "uniform": "--uniform", "slim": "--found"}
    traces = []
    for kind, colour in colours.items():
        networks = [(run, run.found if kind == "slim" else run.networks.get(kind)) for run in runs]
        known = [(run, figures) for run, figures in networks if figures is not None and name in figures.costs]
        traces.append(
            scatter(
                "markers",
                kind,
                [figures.costs[name] for _, figures in known],
                [words.shown(run, figures.score) for run, figures in known],
                hovertext=[escape(run.run) for run, _ in known],
                marker={"color": colour, "size": 11},
            )
        )
    return traces
