"""The page itself: text, tables and charts put into one HTML file that needs nothing from anywhere."""

from __future__ import annotations

import base64
import gzip
import importlib
import json
import math
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from bcnet import __version__
from bcnet.errors import BcnetError
from bcnet.report import words
from bcnet.report.charts import all_charts
from bcnet.report.data import ReportData
from bcnet.report.fairness import widest
from bcnet.space.widths import WidthVariable
from bcnet.supernet.principle import Principle, get_principle

HERE = Path(__file__).parent
TEMPLATES = Environment(
    loader=FileSystemLoader(HERE), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
)


def render(data: ReportData) -> str:
    """The report as one HTML text."""
    layers: list[dict[str, Any]] = [
        {"name": variable.name, "layers": variable.layers, "width": width, "full": full, "ratio": width / full}
        for variable, width, full in zip(data.variables, data.found.widths, data.full_widths, strict=True)
    ]
    ordered = sorted(layers, key=lambda layer: layer["ratio"])
    return fill(
        "page.html",
        all_charts(data),
        title=words.headline(data),
        model=data.model,
        data=data.data,
        run=data,
        badge=words.badge(data),
        key_figures=_key_figures(data),
        networks=[data.networks[name] for name in words.NAMES if name in data.networks],
        costs=[name for name in words.COSTS if name in data.full.costs],
        measured=any(figures.latency_ms is not None for figures in data.networks.values()),
        compared=any(figures.lead is not None for figures in data.networks.values()),
        layers=layers,
        least=ordered[0],
        most=ordered[-1],
        progress=_progress(data),
        fairness=None if data.principle is None else _fairness(data, get_principle(data.principle)),
    )


def fill(template: str, charts: dict[str, Any], **values: Any) -> str:
    """A page from its template, with charts, style sheet and scripts in it; ``values`` are escaped."""
    whole = {"plotly": packed_plotly(), "charts": as_json(charts)}
    whole |= {name: (HERE / file).read_text("utf-8") for name, file in (("style", "page.css"), ("script", "page.js"))}
    as_they_are = {name: Markup(text) for name, text in whole.items()}
    return TEMPLATES.get_template(template).render(words=words, version=__version__, **as_they_are, **values)


@cache
def packed_plotly() -> str:
    """Plotly's script, compressed, in base 85: a page has less than 2 MB instead of 5. Browsers unpack it (page.js)."""
    try:
        source: str = importlib.import_module("plotly.offline").get_plotlyjs()
    except ModuleNotFoundError:
        raise BcnetError('the report draws with plotly, which is not installed: pip install "bcnet[report]"') from None
    packed = base64.b85encode(gzip.compress(source.encode(), mtime=0)).decode()
    return packed.replace("<", "/")  # which base 85 does not have, and which opens no tag


def as_json(value: object) -> str:
    """JSON that cannot end the script element it stands in."""
    return json.dumps(_finite(value), separators=(",", ":"), ensure_ascii=True, allow_nan=False).replace("<", "\\u003c")


def _finite(value: object) -> object:
    """``value`` with floats of six digits, and null for what JSON has no number for."""
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value


def _key_figures(data: ReportData) -> list[tuple[str, str, str]]:
    """What counts most: a name, its value, and what to see it beside."""
    full, found = data.full, data.found
    rivals = [(name, data.networks[name].score) for name in ("full", "uniform", "uniform-8") if name in data.networks]
    beside = ", ".join(f"{name} {words.score(data, score)}" for name, score in rivals if not math.isnan(score))
    cells = [(data.metric, words.score(data, found.score), beside)]
    for name in dict.fromkeys([*(b.name for b in data.budgets), "flops", "params"]):
        if name in full.costs and name != "latency":
            of = f"{words.percentage(found.costs[name], full.costs[name])} of {words.cost(name, full.costs[name])}"
            cells.append((words.COSTS.get(name, name), words.cost(name, found.costs[name]), of))
    if found.latency_ms is not None:
        of = words.inputs(data)
        if full.latency_ms:
            of = f"{words.percentage(found.latency_ms, full.latency_ms)} of {words.milliseconds(full.latency_ms)}"
        cells.append(("measured latency", words.milliseconds(found.latency_ms), of))
    return cells


def _progress(data: ReportData) -> str:
    """How the choice was made, and how it compares with uniform scaling by the same scores."""
    if data.chosen.score is None:
        return ""
    gain = f"The best configuration was number {data.chosen.number:,} of {len(data.trials):,}"
    if data.gains is not None:
        model = "a log-width model (experimental)"
        gain = f"The choice is the best configuration by {model} of all {len(data.trials):,} scores"
    uniform = data.reference_scores.get("uniform")
    if uniform is None:
        return f"{gain}."
    difference = data.chosen.score - uniform
    if data.ranked_by == "loss":
        where = "below" if difference >= 0 else "above"
        return f"{gain}: its loss is {abs(difference):.3g} {where} that of uniform scaling, scored the same way."
    where = "above" if difference >= 0 else "below"
    return f"{gain}: {words.gap(data, difference)} {where} uniform scaling, scored the same way."


def _fairness(data: ReportData, principle: Principle) -> dict[str, Any]:
    """Of which variables all channels are trained alike, a verdict on each, and which is shown first."""
    fair, count = sum(principle.fair(variable) for variable in data.variables), len(data.variables)
    where = f"all {count} width variables" if fair == count else f"{fair} of {count} width variables"
    verdicts = [_verdict(principle, variable) for variable in data.variables]
    return {"where": where, "verdicts": verdicts, "first": widest(data)}


def _verdict(principle: Principle, variable: WidthVariable) -> str:
    uses = principle.cardinality(variable)
    low, high = int(uses.min()), int(uses.max())
    if low == high:
        return f"Each of its {len(uses)} channels is used {low} times: fair."
    return f"Its {len(uses)} channels are used {low} to {high} times: not fair."
