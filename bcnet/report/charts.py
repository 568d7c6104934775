"""The charts of a report as Plotly figures: plain dictionaries of data and layout.

Colours are named by role (``--found``, ``--line``): the page's script looks them up in its style sheet, so charts
follow light, dark and print as the text does. Hover labels are HTML to Plotly, so every name is escaped.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence
from html import escape
from typing import Any

from bcnet.report import words
from bcnet.report.data import Curve, ReportData
from bcnet.report.fairness import fairness
from bcnet.search.trial import Trial, best_so_far, front_of
from bcnet.supernet.principle import get_principle

Chart = dict[str, Any]

MOST_POINTS = 3000  # of a scatter plot; more would only cover each other
MOST_NAMES = 12  # of variables written out below the bars
MOST_LAYERS = 12  # that a hover label names
_SYMBOLS = {"full": "square", "uniform": "diamond", "balanced": "circle", "random": "triangle-up", "found": "star"}
_SIZES = {"full": 11, "uniform": 12, "balanced": 12, "random": 12, "found": 17}


def all_charts(data: ReportData) -> dict[str, Chart]:
    """Every chart by the id of its place on the page."""
    known = {} if data.gains is None else {"log-width": log_width(data, data.gains)}
    if data.race or data.validated:
        known["validation"] = validation(data)
    if data.supernet_curve is not None:
        known["supernet-curve"] = curves([data.supernet_curve])
    if data.principle is not None:
        known["fairness"] = fairness(data, get_principle(data.principle))
    return {
        **known,
        "retained": retained(data),
        "front": front(data),
        "progress": progress(data),
        "retrain-curve": curves(data.retrain_curves),
        "costs": costs(data),
    }


def validation(data: ReportData) -> Chart:
    """What networks had on validation images: finalists after every epoch, and all after training."""
    key = "loss" if data.ranked_by == "loss" else "score"
    traces: list[Chart] = []
    measured = [*data.race, *data.validated]
    for name in dict.fromkeys(row["name"] for row in measured):
        rows = sorted((row for row in measured if row["name"] == name), key=lambda row: row["epochs"])
        values = [row[key] if key == "loss" else _score(data, row[key]) for row in rows]
        hover = f"epoch %{{x}}: %{{y:.4g}}<extra>{escape(name)}</extra>"
        traces.append(scatter("lines+markers", name, [row["epochs"] for row in rows], values, hovertemplate=hover))
    return _chart(
        traces,
        xaxis={"title": {"text": "epoch"}, "showgrid": False},
        yaxis={"title": {"text": f"validation {'loss' if key == 'loss' else data.metric}"}},
    )


def retained(data: ReportData) -> Chart:
    """How much of every width variable is kept, beside uniform scaling."""
    places = list(range(1, len(data.variables) + 1))
    ratios = [100 * c / full for c, full in zip(data.found.widths, data.full_widths, strict=True)]
    hover = [_about(data, place) for place in range(len(places))]
    bars: Chart = {
        "type": "bar",
        "name": "slim",
        "x": places,
        "y": ratios,
        "hovertext": hover,
        "hoverinfo": "text",
        **(_numbers(data.found.widths) if len(places) <= MOST_NAMES else {}),
        "marker": {"color": "--found", "cornerradius": 3},
    }
    traces: list[Chart] = [bars]
    if "uniform" in data.networks:
        widths = data.networks["uniform"].widths
        uniform = [100 * c / full for c, full in zip(widths, data.full_widths, strict=True)]
        size = 24 if len(places) <= MOST_NAMES else 11
        halo = _dashes(places, uniform, "--paper", size + 4, 8) | {"showlegend": False}
        traces += [halo, _dashes(places, uniform, "--uniform", size, 4) | {"name": "uniform"}]
    top = max(100.0, *ratios)
    rule = _line({"x0": 0, "x1": 1, "xref": "paper", "y0": 100, "y1": 100}, "--full")
    return _chart(
        traces,
        xaxis=_variable_axis(data),
        yaxis={"title": {"text": "channels kept (%)"}, "range": [0, 1.08 * top], "dtick": 25},
        shapes=[rule],
        bargap=0.28,
    )


def _numbers(widths: Sequence[int]) -> Chart:
    """Numbers of channels at the foot of bars, where no dash of uniform scaling covers them."""
    return {"text": [str(width) for width in widths], "textposition": "auto", "insidetextanchor": "start"}


def _dashes(x: list[int], y: list[float], colour: str, size: int, width: int) -> Chart:
    marker = {"symbol": "line-ew-open", "color": colour, "size": size, "line": {"width": width, "color": colour}}
    return scatter("markers", "", x, y, marker=marker, hoverinfo="skip")


def _about(data: ReportData, place: int) -> str:
    """What hovering over a bar says: the width, and the layers that share it."""
    variable, width, full = data.variables[place], data.found.widths[place], data.full_widths[place]
    lines = [f"<b>{escape(variable.name)}</b>", f"{width} of {full} channels, {words.percentage(width, full)}"]
    if "uniform" in data.networks:
        scaled = data.networks["uniform"].widths[place]
        lines.append(f"uniform scaling: {scaled}, {words.percentage(scaled, full)}")
    if variable.layers:
        lines += ["shared by", *(escape(layer) for layer in variable.layers[:MOST_LAYERS])]
    if len(variable.layers) > MOST_LAYERS:
        lines.append(f"and {len(variable.layers) - MOST_LAYERS} more")
    return "<br>".join(lines)


def front(data: ReportData) -> Chart:
    """Score against the first budget's cost: all trials, the front, what was found, uniform and full."""
    name, unit, scale = data.first_budget.name, *_unit(data.first_budget.name)
    edge = front_of(data.trials, name)
    within = [t for t in _thinned(data.trials) if t.score is not None]

    def x(trial: Trial) -> float:
        return trial.costs[name] / scale

    traces = [
        _dots("tried", [x(t) for t in within], [_score(data, t.score) for t in within]),
        scatter(
            "lines+markers",
            "Pareto front",
            [x(t) for t in edge],
            [_score(data, t.score) for t in edge],
            line={"color": "--found", "width": 1.5, "shape": "hv"},
            marker={"color": "--found", "size": 6},
            customdata=[_picked(data, t) for t in edge],
            hovertemplate=f"%{{x:.4~s}}{unit}<br>%{{y:.4g}}{_percent(data)}<extra>front</extra>",
        ),
    ]
    points = {who: data.networks[who].costs.get(name) for who in ("full", "uniform") if who in data.networks}
    scores: dict[str, float | None] = dict(data.reference_scores)
    if (found := data.star) is not None:
        points["found"], scores["found"] = found.costs[name], found.score
    for who, at in points.items():
        if at is not None and scores.get(who) is not None:
            traces.append(_point(data, who, at / scale, _score(data, scores[who]), unit))
    limit = data.first_budget.limit / scale
    side = "left" if limit < 0.6 * data.full.costs.get(name, limit) / scale else "right"
    return _chart(
        traces,
        xaxis={"title": {"text": words.COSTS.get(name, name)}, "tickformat": "~s", "ticksuffix": unit},
        yaxis=_score_axis(data),
        shapes=[_line({"x0": limit, "x1": limit, "y0": 0, "y1": 1, "yref": "paper"}, "--mute")],
        annotations=[
            _label(
                escape(data.first_budget.text),
                x=limit,
                y=0,
                yref="paper",
                xanchor=side,
                xshift=5 if side == "left" else -5,
            )
        ],
    )


def _picked(data: ReportData, trial: Trial) -> list[str]:
    """What a click on a point of the front says: its widths and costs, and the command that makes a network of it."""
    widths = ", ".join(f"{v.name} {width}" for v, width in zip(data.variables, trial.widths, strict=True))
    costs = ", ".join(f"{words.cost(name, value)} {words.COSTS.get(name, name)}" for name, value in trial.costs.items())
    name = data.first_budget.name
    unit = {"latency": "ns", "memory": "B"}.get(name, "")
    budget = f"{name}={math.ceil(trial.costs[name])}{unit}"
    command = f"bcnet pick {shlex.quote(data.run)} --budget {budget} --widths {','.join(map(str, trial.widths))}"
    if data.in_python:
        command = f'result.pick("{budget}", widths={list(trial.widths)})'
    return [f"{costs}; {widths}", command]


def progress(data: ReportData) -> Chart:
    """The best score within the budgets after every evaluation."""
    trials = sorted(data.trials, key=lambda t: t.number)
    best = best_so_far(trials)
    scored = [t for t in _thinned(trials) if t.score is not None and t.feasible]
    numbers = [t.number for t in trials]
    traces = [
        _dots("tried", [t.number for t in scored], [_score(data, t.score) for t in scored]),
        scatter(
            "lines",
            "best so far",
            numbers,
            [None if b is None else _score(data, b) for b in best],
            line={"color": "--found", "width": 2.5, "shape": "hv"},
            hovertemplate=f"after %{{x}}: %{{y:.4g}}{_percent(data)}<extra>best so far</extra>",
        ),
    ]
    shapes, labels = [], []
    uniform = data.reference_scores.get("uniform")
    if uniform is not None:
        y = _score(data, uniform)
        shapes = [_line({"x0": 0, "x1": 1, "xref": "paper", "y0": y, "y1": y}, "--uniform")]
        labels = [_label("uniform", x=1, xref="paper", y=y, xanchor="right", colour="--uniform")]
    return _chart(
        traces,
        xaxis={"title": {"text": "configurations scored"}, "rangemode": "tozero", "showgrid": False},
        yaxis=_score_axis(data),
        shapes=shapes,
        annotations=labels,
    )


def log_width(data: ReportData, gains: Sequence[float]) -> Chart:
    """What doubling every width is worth to the supernet, by the log-width model."""
    loss = data.ranked_by == "loss"
    shown = [100 * gain if _percent(data) else gain for gain in gains]
    what = "loss" if loss else data.metric
    bars = {
        "type": "bar",
        "x": list(range(1, len(shown) + 1)),
        "y": shown,
        "marker": {"color": "--found", "cornerradius": 3},
        "customdata": [escape(variable.name) for variable in data.variables],
        "hovertemplate": f"%{{customdata}}: %{{y:.3g}}{_percent(data)}<extra></extra>",
    }
    title = f"{what} {'saved' if loss else 'gained'} by twice the width{' (%)' if _percent(data) else ''}"
    return _chart(
        [bars],
        xaxis=_variable_axis(data),
        yaxis={"title": {"text": title}, "rangemode": "tozero"},
        bargap=0.28,
        showlegend=False,
    )


def _variable_axis(data: ReportData) -> Chart:
    """Places of the width variables, by name where there is room."""
    count = len(data.variables)
    axis: Chart = {"title": {"text": "width variable, from input to output"}, "showgrid": False}
    axis["range"] = [0.4, count + 0.6]
    if count <= MOST_NAMES:
        names = [_short(variable.name) for variable in data.variables]
        axis |= {
            "tickvals": list(range(1, count + 1)),
            "ticktext": names,
            "autotickangles": [0, -45, -90],
            "title": {"text": ""},
        }
        axis["ticklabeloverflow"] = "allow"
    return axis


def curves(given: Sequence[Curve]) -> Chart:
    """The loss of every epoch of some trainings."""
    traces = [
        scatter(
            "lines" if len(curve.losses) > 1 else "markers",
            curve.name,
            list(range(1, len(curve.losses) + 1)),
            list(curve.losses),
            line={"color": f"--{curve.name}", "width": 2},
            hovertemplate=f"epoch %{{x}}: %{{y:.4g}}<extra>{escape(curve.name)}</extra>",
        )
        for curve in given
    ]
    values = [loss for curve in given for loss in curve.losses]
    wide = bool(values) and min(values) > 0 and max(values) > 20 * min(values)
    scale = {"type": "log", "dtick": "D2", "tickformat": "~g"} if wide else {"rangemode": "tozero"}
    return _chart(
        traces,
        xaxis={"title": {"text": "epoch"}, "showgrid": False},
        yaxis={"title": {"text": "training loss"}, **scale},
        showlegend=len(traces) > 1,
    )


def costs(data: ReportData) -> Chart:
    """Every cost relative to the full network's, predicted and measured."""
    traces = []
    for name, figures in data.networks.items():
        ratios = words.ratios(figures, data.full)
        predicted = "latency, predicted" if "latency" in ratios else "latency"
        titles = words.COSTS | {"latency": predicted, "measured": "latency, measured"}
        texts = [words.cost(key, figures.costs[key]) for key in ratios if key != "measured"]
        texts += [words.milliseconds(figures.latency_ms)] if "measured" in ratios else []
        traces.append(
            {
                "type": "bar",
                "name": name,
                "x": [titles[key] for key in ratios],
                "y": [100 * ratio for ratio in ratios.values()],
                "customdata": texts,
                "marker": {"color": f"--{name}", "cornerradius": 3},
                "hovertemplate": f"%{{x}}: %{{customdata}}, %{{y:.0f}}%<extra>{name}</extra>",
            }
        )
    return _chart(
        traces,
        barmode="group",
        bargap=0.3,
        bargroupgap=0.08,
        xaxis={"showgrid": False},
        yaxis={"title": {"text": "% of the full network"}, "rangemode": "tozero"},
    )


def tradeoff_chart(data: words.Metric, traces: list[Chart], cost: str) -> Chart:
    """Scores against a cost, of several runs or targets."""
    return _chart(
        traces,
        xaxis={"title": {"text": cost}, "tickformat": "~s"},
        yaxis={
            "title": {"text": data.metric},
            "ticksuffix": "%" if data.percent else data.unit,
            **({} if data.higher_is_better else {"autorange": "reversed"}),
        },
    )


def scatter(mode: str, name: str, x: Sequence[object], y: Sequence[object], **more: Any) -> Chart:
    """A trace of ``lines``, ``markers`` or both."""
    return {"type": "scatter", "mode": mode, "name": name, "x": x, "y": y, **more}


def _chart(traces: list[Chart], **layout: Any) -> Chart:
    return {"data": traces, "layout": layout}


def _dots(name: str, x: list[float], y: list[float]) -> Chart:
    return scatter("markers", name, x, y, hoverinfo="skip", marker={"color": "--dots", "size": 5})


def _point(data: ReportData, name: str, x: float, y: float, unit: str) -> Chart:
    label = "choice" if name == "found" else name
    outline = {"color": "--paper", "width": 1.5}
    marker = {"color": f"--{name}", "symbol": _SYMBOLS[name], "size": _SIZES[name], "line": outline}
    hover = f"%{{x:.4~s}}{unit}<br>%{{y:.4g}}{_percent(data)}<extra>{label}</extra>"
    return scatter("markers", label, [x], [y], marker=marker, hovertemplate=hover)


def _line(ends: Chart, colour: str) -> Chart:
    return {"type": "line", "layer": "below", "line": {"color": colour, "width": 1.5, "dash": "dash"}, **ends}


def _label(text: str, *, colour: str = "--soft", **place: Any) -> Chart:
    font = {"color": colour, "size": 12}
    return {"text": text, "showarrow": False, "yanchor": "bottom", "font": font, **place}


def _thinned(trials: Sequence[Trial]) -> Sequence[Trial]:
    step = -(-len(trials) // MOST_POINTS) or 1
    return trials[::step]


def _score(data: ReportData, value: float | None) -> float:
    """What the search's scorer gave for a configuration, as it is shown: a loss stands behind its negation."""
    assert value is not None
    return -value if data.ranked_by == "loss" else words.shown(data, value)


def _percent(data: ReportData) -> str:
    return "%" if data.percent and data.ranked_by == "score" else ""


def _score_axis(data: ReportData) -> Chart:
    """Up is better, so an axis of losses is turned over."""
    where = "before training" if data.principle is None else "in the supernet"
    if data.ranked_by == "loss":
        return {"title": {"text": f"loss {where}"}, "autorange": "reversed"}
    unit = "%" if data.percent else data.unit
    title = {"title": {"text": f"{data.metric} {where}{f' ({unit})' if unit else ''}"}}
    return title if data.higher_is_better else {**title, "autorange": "reversed"}


def _unit(name: str) -> tuple[str, float]:
    """What is written after a cost, and what it is divided by first (Plotly itself writes k, M and G)."""
    units: dict[str, tuple[str, float]] = {"memory": ("B", 1.0), "latency": ("s", 1e9)}
    return units.get(name, ("", 1.0))


def _short(name: str, most: int = 24) -> str:
    text = name if len(name) <= most else f"…{name[1 - most :]}"
    return escape(text)
