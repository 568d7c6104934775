"""The page itself: text, tables and charts put into one HTML file that needs nothing from anywhere."""

from __future__ import annotations

import base64
import gzip
import importlib
import json
import math
from collections.abc import Iterable, Sequence
from functools import cache
from html import escape
from pathlib import Path
from string import Template

from bcnet import __version__
from bcnet.errors import BcnetError
from bcnet.report import words
from bcnet.report.charts import all_charts
from bcnet.report.data import NAMES, Figures, ReportData
from bcnet.report.fairness import widest
from bcnet.space.widths import WidthVariable
from bcnet.supernet.principle import Principle, get_principle

HERE = Path(__file__).parent


def render(data: ReportData) -> str:
    """The report as one HTML text."""
    parts = {
        "title": escape(f"{words.headline(data)} · {data.model}"),
        "style": file_text("page.css"),
        "plotly": packed_plotly(),
        "script": file_text("page.js"),
        "charts": as_json(all_charts(data)),
        "version": escape(__version__),
        "model": escape(data.model),
        "data": escape(data.data),
        "headline": escape(words.headline(data)),
        "badge": _badge(data),
        "budgets": _budgets(data),
        "verdict": escape(" ".join(words.verdict(data))),
        "key_figures": _key_figures(data),
        "networks": _networks(data),
        "seed": escape(data.facts.get("seed", "0")),
        "retained": escape(_retained(data)),
        "widths": _widths(data),
        "front": escape(_front(data)),
        "progress": escape(_progress(data)),
        "log_width": _log_width(data),
        "how": escape(_how(data)),
        "training": _training(data),
        "fairness": _fairness_section(data),
        "latency": escape(words.latency(data)),
        "notes": _notes(data.notes),
        "export": _export(data),
        "command": escape(data.command),
        "repeat": escape(data.repeat),
        "facts": _facts(data),
        "recipe": escape(data.recipe.strip()),
    }
    return Template(file_text("page.html")).substitute(parts)


def file_text(name: str) -> str:
    """A file of the page: its style sheet or its script."""
    return (HERE / name).read_text("utf-8")


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


def _key_figures(data: ReportData) -> str:
    full, found = data.full, data.found
    cells = [(data.metric, words.score(data, found.score), _beside(data))]
    for name in dict.fromkeys([*(b.name for b in data.budgets), "flops", "params"]):
        if name in full.costs and name != "latency":
            of = f"{words.share(found.costs[name], full.costs[name])} of {words.cost(name, full.costs[name])}"
            cells.append((words.COSTS.get(name, name), words.cost(name, found.costs[name]), of))
    if found.latency_ms is not None:
        of = "one input"
        if full.latency_ms:
            of = f"{words.share(found.latency_ms, full.latency_ms)} of {words.milliseconds(full.latency_ms)}"
        cells.append(("measured latency", words.milliseconds(found.latency_ms), of))
    return "\n".join(
        f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd><dd>{escape(note)}</dd></div>"
        for name, value, note in cells
    )


def _badge(data: ReportData) -> str:
    text, kind = words.badge(data)
    return f'<span class="badge {kind}">{escape(text)}</span>'


def _budgets(data: ReportData) -> str:
    items = "".join(f"<li>{escape(text)}</li>" for text in words.budgets(data))
    return f"<ul class=budgets>{items}</ul>" if items else ""


def _beside(data: ReportData) -> str:
    rivals = [(name, data.networks[name].score) for name in ("full", "uniform", "uniform-8") if name in data.networks]
    return ", ".join(f"{name} {words.score(data, score)}" for name, score in rivals if not math.isnan(score))


def _networks(data: ReportData) -> str:
    """The table of all networks."""
    costs = [name for name in words.COSTS if name in data.full.costs]
    measured = any(figures.latency_ms is not None for figures in data.networks.values())
    ahead = any(figures.lead is not None for figures in data.networks.values())
    heads = [data.metric, *(_title(name) for name in costs), *([_measured(costs)] if measured else [])]
    rows = [_row(data, data.networks[name], costs, measured) for name in NAMES if name in data.networks]
    classes = ["", *(_wide(data, name) for name in costs), ""]
    head = "".join(f"<th{c}>{escape(h)}</th>" for c, h in zip(classes, heads, strict=False))
    head += "<th>what ships is ahead by</th>" if ahead else ""
    return f"<table class=networks><thead><tr><th>network</th>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"


def _wide(data: ReportData, cost: str) -> str:
    """Marks what a phone has no room for: costs without a budget, beside FLOPs."""
    return "" if cost == "flops" or any(budget.name == cost for budget in data.budgets) else " class=wide"


def _title(cost: str) -> str:
    return "latency, predicted" if cost == "latency" else words.COSTS[cost]


def _measured(costs: Sequence[str]) -> str:
    return "latency, measured" if "latency" in costs else "latency"


def _row(data: ReportData, figures: Figures, costs: Sequence[str], measured: bool) -> str:
    ships = "<small>ships</small>" if figures.name == data.slim else ""
    cells = [f"<td><span class='key {figures.name}'></span>{figures.name}{ships}</td>"]
    cells.append(f"<td>{escape(words.score(data, figures.score))}</td>")
    for name in costs:
        wide = _wide(data, name)
        text = escape(words.cost(name, figures.costs[name]))
        cells.append(f"<td{wide}>{text}<small>{words.share(figures.costs[name], data.full.costs[name])}</small></td>")
    if measured:
        cells.append(f"<td>{words.milliseconds(figures.latency_ms)}</td>")
    if any(other.lead is not None for other in data.networks.values()):
        cells.append(f"<td>{escape(words.lead(data, figures))}</td>")
    return f"<tr{' class=ships' if figures.name == data.slim else ''}>{''.join(cells)}</tr>"


def _ratios(data: ReportData) -> list[tuple[float, WidthVariable]]:
    pairs = zip(data.found.widths, data.full_widths, data.variables, strict=True)
    return sorted(((width / full, variable) for width, full, variable in pairs), key=lambda pair: pair[0])


def _retained(data: ReportData) -> str:
    ordered = _ratios(data)
    least, most = ordered[0], ordered[-1]
    if least[0] == most[0]:
        return f"Every width variable keeps {words.share(least[0], 1)} of its channels."
    return (
        f"{most[1].name} keeps most ({words.share(most[0], 1)}), {least[1].name} least ({words.share(least[0], 1)}). "
        "Layers that are added, concatenated or otherwise tied share one width and one bar; hover for their names."
    )


def _widths(data: ReportData) -> str:
    rows = "".join(
        f"<tr><td class=name>{escape(v.name)}</td><td>{width}</td><td>{full}</td><td>{words.share(width, full)}</td>"
        f"<td class=layers>{escape(', '.join(v.layers))}</td></tr>"
        for v, width, full in zip(data.variables, data.found.widths, data.full_widths, strict=True)
    )
    head = "<tr><th>variable</th><th>slim</th><th>full</th><th>kept</th><th style='text-align:left'>layers</th></tr>"
    return f"<table><thead>{head}</thead><tbody>{rows}</tbody></table>"


def _front(data: ReportData) -> str:
    inside = sum(trial.feasible for trial in data.trials)
    return (
        f"{len(data.trials):,} configurations were scored {_scored_with(data)}, {inside:,} of them within the "
        f"budget. These scores rank configurations; the {data.metric} that counts is that after training, above."
        f"{_below(data)} Click on a point of the front for its widths and the command that trains it."
    )


def _below(data: ReportData) -> str:
    """Why the star may lie below the front."""
    if data.gains is None:
        return ""
    return (
        " The star may lie below the front: single scores err, so it was chosen by a model of all of them, and points "
        "above it are partly luck."
    )


def _scored_with(data: ReportData) -> str:
    return "with the weights they inherit" if data.principle is None else "with the supernet's shared weights"


def _how(data: ReportData) -> str:
    began = "began with the most important channels of your network" if data.inherited else "were trained from scratch"
    found = "Found is what search and race came to; what ships is the best on validation images within the budget. "
    return (
        f"All slim networks {began} and were trained by the same recipe, {_often(data)}, with seed "
        f"{data.facts.get('seed', '0')}. {found if data.validated else ''}Half of a 95% interval follows each "
        "difference. Percentages are of the full network."
    )


def _often(data: ReportData) -> str:
    if data.repeats > 1:
        return f"{data.repeats} times each (intervals are over trainings and images)"
    return "once each (intervals are over images alone: what another training would change was not measured)"


def _training(data: ReportData) -> str:
    charts = {"retrain-curve": "Slim networks" if data.inherited else "Networks from scratch"}
    if data.race or data.validated:
        title = "On validation images, epoch by epoch" if data.race else "On validation images"
        charts = {"validation": title, **charts}
    if data.supernet_curve is not None:
        charts = {"supernet-curve": "The supernet: mean over the networks it trains", **charts}
    return "".join(
        f'<div><h3>{title}</h3><div class="chart low" id="{name}"></div></div>' for name, title in charts.items()
    )


def _fairness_section(data: ReportData) -> str:
    """How evenly the supernet's channels are trained, where there is one."""
    if data.principle is None:
        return ""
    principle = get_principle(data.principle)
    verdict = _fairness(principle, data.variables[widest(data)])
    return (
        "<section><h2>Method</h2><details><summary>How evenly the supernet trains its channels</summary>"
        f"<p>{escape(_fair(data, principle))}</p>"
        '<p class="picker"><label>Width variable '
        f'<select id="fairness-variable">{_variables(data, principle)}</select></label></p>'
        f'<p id="fairness-verdict">{escape(verdict)}</p><div class="chart low" id="fairness"></div></details></section>'
    )


def _progress(data: ReportData) -> str:
    if data.chosen.score is None:
        return ""
    gain = f"The best was found at evaluation {data.chosen.number} of {len(data.trials):,}"
    if data.gains is not None:
        model = "a log-width model (experimental)"
        gain = f"The choice is the best configuration by {model} of all {len(data.trials):,} scores"
    uniform = data.reference_scores.get("uniform")
    if uniform is None:
        return f"{gain}."
    difference = data.chosen.score - uniform
    if data.ranked_by == "loss":
        where = "below" if difference >= 0 else "above"
        return f"{gain}: its loss is {abs(difference):.3g} {where} that of uniform scaling, scored alike."
    where = "above" if difference >= 0 else "below"
    return f"{gain}: {words.gap(data, difference)} {where} uniform scaling, scored alike."


def _log_width(data: ReportData) -> str:
    """What every width is worth, where a log-width model chose."""
    if data.gains is None:
        return ""
    most = data.variables[data.gains.index(max(data.gains))].name
    return (
        "<h3>What a width is worth</h3><p>Single scores err, and a search finds those that err upwards. "
        "So a log-width model is fitted to all of them: doubling a width adds a fixed amount, never negative, the same "
        f"for each of its layers unless the scores tell otherwise. Doubling {escape(most)} adds most. The model is "
        "experimental: it did not win a trial on networks it was not made with."
        '</p><div class="chart low" id="log-width"></div>'
    )


def _fairness(principle: Principle, variable: WidthVariable) -> str:
    uses = principle.cardinality(variable)
    low, high = int(uses.min()), int(uses.max())
    if low == high:
        return f"Each of its {len(uses)} channels is used {low} times: fair."
    return f"Its {len(uses)} channels are used {low} to {high} times: not fair."


def _fair(data: ReportData, principle: Principle) -> str:
    fair = sum(principle.fair(variable) for variable in data.variables)
    count = len(data.variables)
    which = f"all {count} width variables" if fair == count else f"{fair} of {count} width variables"
    return (
        "Scores of a supernet can be compared only if no channel is trained more than another. "
        f"Under {principle.name}, this holds for {which}."
    )


def _variables(data: ReportData, principle: Principle) -> str:
    first = widest(data)
    return "".join(
        f"<option{' selected' if i == first else ''} data-verdict='{escape(_fairness(principle, v), quote=True)}'>"
        f"{escape(v.name)}</option>"
        for i, v in enumerate(data.variables)
    )


def _notes(notes: Iterable[str]) -> str:
    items = "".join(f"<li>{escape(note)}</li>" for note in notes)
    return f"<h3>Notes</h3><ul class=notes>{items}</ul>" if items else ""


def _export(data: ReportData) -> str:
    if data.export is None or not data.export.get("files"):
        return ""
    files = ", ".join(f"<code>{escape(name)}</code>" for name in data.export["files"])
    return f"<p>Exported: {files} in <code>{escape(str(data.export['path']))}</code>.</p>"


def _facts(data: ReportData) -> str:
    return "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in data.facts.items())
