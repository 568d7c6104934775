"""A table at a glance: how costs rank its networks, how well any score could, and histograms as SVG and HTML.

The drawing is written by hand: it needs no package, and one table always gives the same bytes.
"""

from __future__ import annotations

import html
import json
import math
import os
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bcnet.bench.correlation import Correlations, reliability
from bcnet.bench.predictors import PREDICTORS, predicted
from bcnet.bench.table import ChannelBench
from bcnet.utils.files import clear_errors, write_file

BINS = 40
PANEL_WIDTH, PANEL_HEIGHT, MARGIN = 320, 240, 40


def statistics(table: ChannelBench) -> dict[str, Any]:
    """Everything ``bcnet bench stats`` says, ready for JSON.

    "flops", "params" and "widths" (:data:`~bcnet.bench.predictors.PREDICTORS`) each hold their "pearson", "spearman"
    and "kendall" with mean accuracy; "ceiling" is the Kendall correlation of a perfect predictor and "ceilings" all
    three. A table of one seed tells nothing of its noise: its ceiling is None.
    """
    seeds = table.acc.shape[1]
    ceilings: Correlations | None = table.ceiling() if seeds > 1 else None
    return {
        "space": table.space.name,
        "networks": len(table),
        "seeds": seeds,
        "sha256": table.sha256,
        "released": table.released,
        **{name: table.correlate(predicted(name, table)) for name in PREDICTORS},
        "ceiling": ceilings["kendall"] if ceilings else None,
        "ceilings": ceilings,
        "reliability": reliability(table.acc) if seeds > 1 else None,
        "accuracy": {name: float(getattr(table.mean, name)()) for name in ("min", "mean", "max")},
        "seed_std": math.sqrt(np.square(table.std).mean()) if seeds > 1 else None,
        "histograms": {name: _histogram(values) for name, values in _columns(table).items()},
    }


def write_statistics(table: ChannelBench, folder: str | os.PathLike[str]) -> list[Path]:
    """Writes ``stats.json``, ``histograms.svg`` and the page ``stats.html`` into ``folder``; returns the files."""
    figures = statistics(table)
    texts = {
        "stats.json": json.dumps(figures, indent=2) + "\n",
        "histograms.svg": histograms_svg(figures),
        "stats.html": page(figures),
    }
    with clear_errors(f"the statistics in {folder}"):
        for name, text in texts.items():
            write_file(Path(folder) / name, text.encode())
    return [Path(folder) / name for name in texts]


def histograms_svg(figures: dict[str, Any]) -> str:
    """The histograms of :func:`statistics` side by side, as one SVG image."""
    titles = {"accuracy": "Mean accuracy (%)", "flops": "FLOPs", "params": "Parameters"}
    panels = [_panel(titles[name], histogram, i) for i, (name, histogram) in enumerate(figures["histograms"].items())]
    width, height = PANEL_WIDTH * len(panels), PANEL_HEIGHT
    label = html.escape(f"Histograms of the {figures['networks']:,} networks of space {figures['space']}")
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'role="img" font-family="sans-serif" font-size="11"><title>{label}</title>'
        f'<rect width="{width}" height="{height}" fill="white"/>{"".join(panels)}</svg>\n'
    )


def page(figures: dict[str, Any]) -> str:
    """The figures and histograms of :func:`statistics` as one HTML page that needs nothing else."""
    rows = [(label, figures[name]) for name, label in PREDICTORS.items()]
    if figures["ceilings"]:
        rows.append(("perfect predictor", figures["ceilings"]))
    cells = "".join(
        f"<tr><th>{label}</th>" + "".join(f"<td>{value:.3f}</td>" for value in row.values()) + "</tr>"
        for label, row in rows
    )
    name = html.escape(figures["space"])
    kind = "the released table" if figures["released"] else "not a released table"
    return f"""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>Channel bench: {name}</title>
<style>body{{font-family:sans-serif;margin:2em;max-width:62em}}td,th{{padding:.2em 1em;text-align:right}}
th:first-child{{text-align:left}}svg{{max-width:100%;height:auto}}</style></head>
<body><h1>Space {name}</h1>
<p>{figures["networks"]:,} networks, {figures["seeds"]} seeds each; {kind}, SHA-256 {figures["sha256"]}.</p>
<h2>Correlation with mean accuracy</h2>
<table><tr><th></th><th>Pearson</th><th>Spearman</th><th>Kendall</th></tr>{cells}</table>
<h2>Histograms</h2>
{histograms_svg(figures)}</body></html>
"""


def _columns(table: ChannelBench) -> dict[str, NDArray[Any]]:
    return {"accuracy": table.mean, "flops": table.costs["flops"], "params": table.costs["params"]}


def _histogram(values: NDArray[Any]) -> dict[str, list[float]]:
    counts, edges = np.histogram(values, bins=BINS)
    return {"counts": counts.tolist(), "edges": edges.tolist()}


def _panel(title: str, histogram: dict[str, list[float]], position: int) -> str:
    """One histogram as an SVG group, ``position`` panels from the left."""
    counts, edges = histogram["counts"], histogram["edges"]
    width, height = PANEL_WIDTH - MARGIN - 16, PANEL_HEIGHT - 2 * MARGIN
    per_unit = width / (edges[-1] - edges[0])
    bar = width / len(counts)
    bars = "".join(
        f'<rect x="{i * bar:.2f}" y="{height * (1 - count / max(counts)):.2f}" width="{bar - 0.5:.2f}" '
        f'height="{height * count / max(counts):.2f}">'
        f"<title>{_short(edges[i])} to {_short(edges[i + 1])}: {count:,}</title></rect>"
        for i, count in enumerate(counts)
    )
    across = "".join(
        f'<text x="{(tick - edges[0]) * per_unit:.2f}" y="{height + 14}" text-anchor="middle">{_short(tick)}</text>'
        for tick in _ticks(edges[0], edges[-1])
    )
    up = "".join(
        f'<text x="-4" y="{height * (1 - tick / max(counts)) + 4:.2f}" text-anchor="end">{_short(tick)}</text>'
        for tick in _ticks(0, max(counts))
    )
    left = position * PANEL_WIDTH + MARGIN
    return (
        f'<g transform="translate({left},{MARGIN})"><text x="{width / 2}" y="-12" text-anchor="middle" '
        f'font-size="13">{title}</text><g fill="#3b6ea5">{bars}</g>'
        f'<path d="M0 0V{height}H{width}" fill="none" stroke="black"/>{across}{up}</g>'
    )


def _ticks(low: float, high: float) -> list[float]:
    """Three to seven round numbers within low..high."""
    magnitude = 10 ** math.floor(math.log10((high - low) / 3))
    step = max(s * magnitude for s in (1, 2, 5) if s * magnitude <= (high - low) / 3)
    return [k * step for k in range(math.ceil(low / step), math.floor(high / step) + 1)]


def _short(value: float) -> str:
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.3g}{letter}"
    return f"{value:.4g}"
