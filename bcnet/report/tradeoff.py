"""The page of a run with several targets: what each slim network reaches for what it costs."""

from __future__ import annotations

from dataclasses import dataclass
from html import escape
from string import Template
from typing import Any

from bcnet import __version__
from bcnet.report import words
from bcnet.report.charts import scatter
from bcnet.report.page import as_json, file_text, packed_plotly

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

    def shown(self, score: float) -> float:
        """A score as people read it: shares in percent, and negated ones as they were given."""
        return (100.0 if self.percent else 1.0) * (score if self.higher_is_better else -score)

    def text(self, score: float | None) -> str:
        if score is None:
            return "–"
        return f"{self.shown(score):.2f}%" if self.percent else f"{self.shown(score):.4g}{self.unit}"


PAGE = Template(
    """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<link rel="icon" href="data:,"><title>$title</title><style>
$style</style></head><body><main><header>
<p class="eyebrow"><b>bcnet</b> report · $model on $data</p><h1>$title</h1>
<p class="lead">$lead</p><div class="scroll">$table</div></header>
<section><h2>$metric against cost</h2><div class="chart" id="tradeoff"></div>
<p class="caption">$caption</p>
</section></main><footer>Made by bcnet $version. This page is one file and loads nothing from elsewhere.</footer>
<script type="text/plain" id="plotly">$plotly</script>
<script type="application/json" id="charts">$charts</script><script>$script</script>
</body></html>
"""
)


def render_tradeoff(data: Tradeoff) -> str:
    """The page as one HTML text."""
    label = words.COSTS.get(data.cost, data.cost)
    best = ", ".join(f"{data.text(p.slim[1])} at {words.share(p.slim[0], data.full_cost)}" for p in data.points)
    return PAGE.substitute(
        title=escape(f"your network: {data.text(data.full_score)} at 100% → slim: {best} of the {label}"),
        metric=escape(data.metric[:1].upper() + data.metric[1:]),
        model=escape(data.model),
        data=escape(data.data),
        style=file_text("page.css"),
        lead=escape(_lead(data)),
        table=_table(data, label),
        caption="Each point was searched, raced and trained for its own budget, once; its own report has more.",
        version=escape(__version__),
        plotly=packed_plotly(),
        charts=as_json({"tradeoff": _chart(data, label)}),
        script=file_text("page.js"),
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


def _table(data: Tradeoff, label: str) -> str:
    rows = "".join(
        f"<tr><td><a href='{escape(p.folder, quote=True)}/report.html'>{escape(p.budget)}</a></td>"
        f"<td>{escape(p.chosen)}</td><td>{data.text(p.slim[1])}</td><td>{words.cost(data.cost, p.slim[0])}</td>"
        f"<td>{data.text(p.uniform[1]) if p.uniform else '–'}</td></tr>"
        for p in data.points
    )
    head = "".join(f"<th>{escape(text)}</th>" for text in ("target", "ships", data.metric, label, "uniform"))
    return f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"


def _chart(data: Tradeoff, label: str) -> dict[str, Any]:

    def line(name: str, pairs: list[Pair], colour: str, symbol: str) -> dict[str, Any]:
        ordered = sorted(pairs)
        costs, scores = [cost for cost, _ in ordered], [data.shown(score) for _, score in ordered]
        marker = {"color": colour, "symbol": symbol, "size": 11}
        return scatter("lines+markers", name, costs, scores, line={"color": colour}, marker=marker)

    traces = [
        line("slim", [p.slim for p in data.points], "--found", "star"),
        line("uniform", [p.uniform for p in data.points if p.uniform], "--uniform", "diamond"),
    ]
    if data.full_score is not None:
        traces.append(line("your network", [(data.full_cost, data.full_score)], "--ink", "square"))
    unit = "%" if data.percent else data.unit
    return {
        "data": [trace for trace in traces if trace["x"]],
        "layout": {
            "xaxis": {"title": {"text": label}, "tickformat": "~s"},
            "yaxis": {
                "title": {"text": data.metric},
                "ticksuffix": unit,
                **({} if data.higher_is_better else {"autorange": "reversed"}),
            },
        },
    }
