"""What a report says in words: figures for people, and a verdict that does not flatter."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

from bcnet.report.data import Figures, ReportData
from bcnet.search.constraints import format_cost

cost = format_cost
COSTS = {"flops": "FLOPs", "params": "parameters", "memory": "peak memory", "latency": "latency"}
CRITERIA = {
    "l1": "L1 norms",
    "l2": "L2 norms",
    "bn-scale": "batch-norm scales",
    "taylor": "first-order Taylor scores",
    "fpgm": "distances from the geometric median",
    "lamp": "LAMP scores",
}
RIVALS = {
    "found": "what the search found",
    "uniform": "scaling all layers alike",
    "uniform-8": "scaling all layers alike, in multiples of 8,",
    "balanced": "balancing layers without a search",
    "random": "the best of random widths",
    "random-global": "cutting channels at random",
    **{f"{name}-global": f"one threshold on {label} over all layers" for name, label in CRITERIA.items()},
    "random-isomorphic": "cutting channels at random, kind by kind",
    **{f"{name}-isomorphic": f"one threshold on {label} for each kind of layer" for name, label in CRITERIA.items()},
}
"""What the network that ships is compared with at its own budget."""
NAMES = ("full", *(name for name in RIVALS if name != "found"), "found")
"""The networks of a report, in the order it shows them in."""
UNIFORM = ("uniform", "uniform-8")

NOT_LEARNT = (
    "Its outputs do not score clearly better with the targets of their own inputs than with those of others: train it "
    "longer, at another learning rate, or check the data."
)


def images(scored_on: str) -> str:
    """What a run's ``scored_on`` stands for."""
    return {"test": "test images", "val": "validation images", "val/": "images of val/"}.get(scored_on, scored_on)


class Metric(Protocol):
    """How scores are shown: shares in percent, else with a unit; those of which lower is better are negated."""

    @property
    def metric(self) -> str: ...
    @property
    def percent(self) -> bool: ...
    @property
    def unit(self) -> str: ...
    @property
    def higher_is_better(self) -> bool: ...


def shown(data: Metric, value: float) -> float:
    """A score as people read it."""
    return (100.0 if data.percent else 1.0) * (value if data.higher_is_better else -value)


def score(data: Metric, value: float | None) -> str:
    """``97.35%`` of a share, else four digits and the unit; a dash for what was not measured."""
    if value is None or math.isnan(value):
        return "–"
    return f"{shown(data, value):.2f}%" if data.percent else f"{shown(data, value):.4g}{_unit(data)}"


class _Described(NamedTuple):
    metric: str
    percent: bool
    unit: str
    higher_is_better: bool


def described(metric: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a :class:`Metric`, from what a task says of it (:attr:`bcnet.Task.metric`)."""
    name, unit = metric["name"], metric["unit"]
    shown_as = {"percent": True, "unit": ""} if unit == "%" else {"percent": False, "unit": unit}
    return {"metric": name, **shown_as, "higher_is_better": metric["higher_is_better"]}


def figure(metric: Mapping[str, Any], value: float) -> str:
    """A score of the metric that a task describes."""
    return score(_Described(**described(metric)), value)


def gap(data: ReportData, value: float) -> str:
    """The size of a difference of two scores: ``0.84 points``."""
    return f"{abs(100 * value):.2f}\N{NO-BREAK SPACE}points" if data.percent else f"{abs(value):.3g}{_unit(data)}"


def _unit(data: Metric) -> str:
    return f"\N{NO-BREAK SPACE}{data.unit}" if data.unit else ""


def direction(data: ReportData, difference: float) -> str:
    """Whether a score that is better by ``difference`` is more or less of the metric."""
    return "more" if (difference > 0) == data.higher_is_better else "less"


def percentage(part: float, whole: float) -> str:
    """A ratio in percent, with a digit more where it is small."""
    ratio = 100 * part / whole
    return f"{ratio:.0f}%" if ratio >= 9.95 else f"{ratio:.1f}%"


def milliseconds(value: float | None) -> str:
    return "–" if value is None else f"{value:.3g} ms"


def headline(data: ReportData) -> str:
    """The verdict in one line."""
    name = data.first_budget.name
    if not data.learnt:
        return f"the slim network has not learnt anything: {score(data, data.found.score)} {data.metric}"
    if data.inherited and not math.isnan(data.full.score):
        slim = _kept_share(data)
        before, after = score(data, data.full.score), score(data, data.found.score)
        named = before if data.percent else f"{data.metric} {before}"
        return f"your network: {named} at 100% → slim: {after} at {slim} of the {COSTS.get(name, name)}"
    at = f"{_kept_share(data)} of the {COSTS.get(name, name)}"
    if math.isnan(data.full.score):
        return f"{at}, {score(data, data.found.score)} {data.metric}"
    difference = data.found.score - data.full.score
    if _same(difference):
        return f"{at} at the same {data.metric}"
    if difference > 0:
        return f"{at}, and {gap(data, difference)} {direction(data, difference)} {data.metric}"
    of = "of" if data.higher_is_better else "more"
    return f"{at} for {gap(data, difference)} {of} {data.metric}"


def _kept_share(data: ReportData) -> str:
    """How much of the first budget's cost is left; of latency, as it was measured."""
    name, full, found = data.first_budget.name, data.full, data.found
    if name == "latency" and full.latency_ms is not None and found.latency_ms is not None:
        return percentage(found.latency_ms, full.latency_ms)
    return percentage(found.costs[name], full.costs[name])


def badge(data: ReportData) -> tuple[str, str]:
    """The verdict in a word, and its kind: ``good``, ``open`` or ``bad``."""
    if not data.learnt:
        return "failed: nothing was learnt", "bad"
    if not all(kept["met"] for kept in data.kept):
        return "failed: a budget is not met", "bad"
    rivals = _rivals(data)
    if data.slim != "found":
        return "the search was not worth it", "bad"
    if not rivals:
        return "not compared", "open"
    best = max(rivals, key=lambda rival: rival.score)
    ahead, chance = data.found.score - best.score, _chance(data, best)
    if -ahead > chance:
        return "the search was not worth it", "bad"
    return ("worth it", "good") if ahead > chance else ("no clear difference", "open")


def budgets(data: ReportData) -> list[str]:
    """For each budget whether it holds, and by what."""
    return [
        f"{kept['text']}: {'met' if kept['met'] else 'not met'}, {kept['by']} "
        f"({cost(kept['name'], kept['taken'])} of {cost(kept['name'], kept['allowed'])})"
        for kept in data.kept
    ]


def verdict(data: ReportData) -> list[str]:
    """The verdict in two or three sentences."""
    budget = ", ".join(b.text for b in data.budgets)
    return [
        f"Within {budget}, the slim network reaches {score(data, data.found.score)} {data.metric} "
        f"on the {data.scored_on}"
        + ("." if math.isnan(data.full.score) else f"; the full network reaches {score(data, data.full.score)}."),
        *([] if data.learnt else [NOT_LEARNT]),
        *broken_budgets(data),
        *comparison(data),
    ]


def broken_budgets(data: ReportData) -> list[str]:
    """A sentence for each budget that does not hold."""
    return [
        f"The budget {kept['text']} is not met: {kept['by']}, it takes {cost(kept['name'], kept['taken'])}, and "
        f"{cost(kept['name'], kept['allowed'])} are allowed."
        for kept in data.kept
        if not kept["met"]
    ]


def closing(data: ReportData) -> list[str]:
    """What stands below the table of networks: budgets that are not met, and the comparison."""
    return [*broken_budgets(data), *comparison(data)]


def comparison(data: ReportData) -> list[str]:
    """What was found beside other networks of the same budget, in up to two sentences, and what may be chance."""
    rivals, sentences = _rivals(data), []
    if not rivals:
        return ["Nothing else was trained within the budget, so there is nothing to compare it with."]
    if data.slim != "found":
        sentences.append(
            f"On validation images {RIVALS[data.slim]} did better than what the search found, so that is what ships."
        )
    sentences.append(f"At the same budget, {', and '.join(_against(data, rival) for rival in rivals)}.")
    return [*sentences, *_certainty(data, max(rivals, key=lambda rival: rival.score))]


def _rivals(data: ReportData) -> list[Figures]:
    """What was trained at the budget of the network that ships; where that is one uniform scaling, not the other."""
    left_out = UNIFORM if data.slim in UNIFORM else (data.slim,)
    return [data.networks[name] for name in RIVALS if name in data.networks and name not in left_out]


def _certainty(data: ReportData, rival: Figures) -> list[str]:
    """Whether what ships and its best rival differ by more than chance, and what chance means here."""
    ahead, chance = data.found.score - rival.score, _chance(data, rival)
    images = f"{data.count:,} {data.scored_on}" if data.count else f"the {data.scored_on}"
    if -ahead > chance:
        if data.slim != "found":
            return [f"What ships was chosen on validation images; on {images} it is the other way round."]
        return ["So the search was not worth it here: train for longer, or take the better network."]
    if not chance:
        return []
    more = f"and over {data.repeats} trainings of each " if data.repeats > 1 else ""
    once = [] if data.repeats > 1 else ["Each was trained once: what another training would change was not measured."]
    if ahead > chance:
        return [f"That is more than chance on {images} {more}allows.", *once]
    return [f"On {images} {more}".rstrip() + f", chance alone makes differences of up to {gap(data, chance)}.", *once]


def _chance(data: ReportData, rival: Figures) -> float:
    """What 95 of 100 differences of two equally good networks stay below: by the images both were measured on, else
    by the number of images of a share; nothing where neither is known."""
    if rival.lead is not None:
        return 1.96 * rival.lead[1]
    if not data.percent or not data.count:
        return 0.0
    return 1.96 * math.sqrt(2 * data.found.score * (1 - data.found.score) / data.count)


def _against(data: ReportData, rival: Figures) -> str:
    what = RIVALS[rival.name]
    difference = data.found.score - rival.score
    if rival.widths == data.found.widths:
        return f"{what} is what ships, under another name"
    if _same(difference):
        return f"{what} does as well ({score(data, rival.score)})"
    gives = f"{what} gives {score(data, rival.score)}, {gap(data, difference)} {direction(data, -difference)}"
    return f"{gives}{_interval(data, rival)}"


def lead(data: ReportData, rival: Figures) -> str:
    """How far the network that ships is ahead of ``rival``, with half of the 95 % interval: ``+1.14 ± 0.39``."""
    if rival.lead is None or rival.name == data.slim:
        return "–"
    scale = 100 if data.percent else 1
    return f"{scale * rival.lead[0]:+.3g} ± {1.96 * scale * rival.lead[1]:.2g}"


def _interval(data: ReportData, rival: Figures) -> str:
    if rival.lead is None:
        return ""
    size, reach = abs(rival.lead[0]), 1.96 * rival.lead[1]
    ends = [100 * end if data.percent else end for end in (size - reach, size + reach)]
    return f" (95% interval: {ends[0]:.3g} to {ends[1]:.3g})"


def _same(difference: float) -> bool:
    return abs(difference) < 1e-9


def latency(data: ReportData) -> str:
    """What became of the time, beside what became of the FLOPs."""
    full, found = data.full.latency_ms, data.found.latency_ms
    if found is None:
        return "Latency was not measured."
    if full is None:
        return f"The slim network takes {milliseconds(found)} for {inputs(data)}; the full one was not measured."
    cause = ""
    if found > 0.95 * full:
        cause = " FLOPs fell but time did not: on this device such small networks are bound by other things."
    return (
        f"FLOPs fell to {percentage(data.found.costs['flops'], data.full.costs['flops'])} of the full network's, the "
        f"measured latency to {percentage(found, full)}, from {milliseconds(full)} to {milliseconds(found)} for "
        f"{inputs(data)}.{cause}"
    )


def inputs(data: ReportData) -> str:
    """How many inputs at once latency was measured for."""
    return data.timed_by.rpartition(", ")[2] or "one input"


def ratios(figures: Figures, full: Figures) -> Mapping[str, float]:
    """Every cost relative to the full network's; ``measured`` is the latency on the device."""
    found = {name: figures.costs[name] / full.costs[name] for name in COSTS if name in full.costs}
    if figures.latency_ms is not None and full.latency_ms is not None:
        found["measured"] = figures.latency_ms / full.latency_ms
    return found
