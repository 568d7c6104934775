"""The page of a run with several targets: what each slim network reaches for what it costs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from markupsafe import Markup

from bcnet.report import words
from bcnet.report.charts import scatter, tradeoff_chart
from bcnet.report.page import fill

Pair = tuple[float, float]


@dataclass(frozen=True)
class TradeoffPoint:
    """A target: the network that ships and uniform scaling as (cost, score), and the folder of its run."""

    budget: str
    folder: str
    cost: str
    slim: Pair
    uniform: Pair | None
    chosen: str


@dataclass(frozen=True)
class Tradeoff:
    """Everything the page shows; ``full_score`` is None where the given network was not scored."""

    model: str
    data: str
    percent: bool
    cost: str
    full_cost: float
    full_score: float | None
    points: tuple[TradeoffPoint, ...]
    metric: str = "accuracy"
    unit: str = ""
    higher_is_better: bool = True


def render_tradeoff(data: Tradeoff) -> str:
    """The page as one HTML text."""
    label = words.COSTS.get(data.cost, data.cost)
    given = (
        words.score(data, data.full_score) if data.percent else f"{data.metric} {words.score(data, data.full_score)}"
    )
    best = ", ".join(
        f"{words.score(data, p.slim[1])} at {words.percentage(p.slim[0], data.full_cost)}" for p in data.points
    )
    return fill(
        "tradeoff.html",
        {"tradeoff": tradeoff_chart(data, _traces(data), label)},
        title=f"your network: {given} at 100% → slim: {best} of the {label}",
        model=data.model,
        data=data.data,
        metric=data.metric,
        lead=_lead(data),
        heads=("target", "ships", data.metric, label, "uniform"),
        rows=[
            (
                Markup("<a href='{}/report.html'>{}</a>").format(p.folder, p.budget),
                p.chosen,
                words.score(data, p.slim[1]),
                words.cost(data.cost, p.slim[0]),
                words.score(data, p.uniform[1] if p.uniform else None),
            )
            for p in data.points
        ],
        caption="Each point was searched, raced and trained for its own budget, once; its own report has more.",
    )


def _lead(data: Tradeoff) -> str:
    pairs = [(p.slim[1], p.uniform[1]) for p in data.points if p.uniform is not None]
    if not pairs:
        return f"{len(data.points)} slim networks, one for each target."
    better = sum(slim > uniform for slim, uniform in pairs)
    return (
        f"{len(data.points)} slim networks, one for each target. The network that ships is better than uniform scaling "
        f"at {better} of {len(pairs)} targets; one training each, so small differences can be chance."
    )


def _traces(data: Tradeoff) -> list[dict[str, Any]]:
    lines = [
        ("slim", [p.slim for p in data.points], "--found", "star"),
        ("uniform", [p.uniform for p in data.points if p.uniform], "--uniform", "diamond"),
        ("your network", [] if data.full_score is None else [(data.full_cost, data.full_score)], "--ink", "square"),
    ]
    found = []
    for name, pairs, colour, symbol in lines:
        ordered = sorted(pairs)
        costs, scores = [cost for cost, _ in ordered], [words.shown(data, score) for _, score in ordered]
        marker = {"color": colour, "symbol": symbol, "size": 11}
        found.append(scatter("lines+markers", name, costs, scores, line={"color": colour}, marker=marker))
    return [trace for trace in found if trace["x"]]
