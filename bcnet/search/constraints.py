"""What a network may cost: budgets as an engineer writes them, and whether they can be met.

``flops=50%``, ``flops=150M``, ``params=3M``, ``memory=2MiB`` and ``latency=4ms`` are budgets; several
hold at once. A percentage is of the largest network. Memory is counted in bytes, latency in
nanoseconds, FLOPs (multiply-accumulates) and parameters in ones.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bcnet.errors import BcnetError
from bcnet.space.cost import Cost
from bcnet.space.widths import Floats, Widths, WidthSpace

_COUNT = {"": 1, "k": 10**3, "K": 10**3, "M": 10**6, "G": 10**9, "B": 10**9, "T": 10**12}
_BYTES = {"B": 1, "KB": 10**3, "kB": 10**3, "MB": 10**6, "GB": 10**9, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
_TIME = {"ns": 1, "us": 10**3, "ms": 10**6, "s": 10**9}
FULL = 0.95
"""The share of a budget that random networks and offspring should use at least."""
TRIES = 20
"""How often random networks are drawn until they use that much."""
UNITS: dict[str, dict[str, int]] = {"flops": _COUNT, "params": _COUNT, "memory": _BYTES, "latency": _TIME}


@dataclass(frozen=True)
class Budget:
    """At most ``limit`` (in the cost's own unit) of the cost ``name``; ``text`` is what was written."""

    name: str
    limit: float
    text: str


_THOUSANDS = r"[0-9]{1,3}(?:,[0-9]{3})+(?:\.[0-9]*)?"
"""Commas separate thousands only: 12,5 is refused rather than read as 125."""


def parse_budget(text: str, costs: Mapping[str, Cost], space: WidthSpace) -> Budget:
    """``name=value`` with a unit or a percentage of the largest network, as a :class:`Budget`."""
    name, equals, value = (part.strip() for part in text.partition("="))
    if not equals:
        raise BcnetError(f"budget {text!r} must read name=value, such as flops=50%")
    if name not in costs:
        near = f"did you mean {name.lower()}?" if name.lower() in costs else ""
        raise BcnetError(f"unknown budget {name!r}: {near or 'this space knows ' + ', '.join(sorted(costs))}")
    if "," in value and "=" in value:
        raise BcnetError(
            f"budget {text!r} names several: give each on its own, as in --budget {text.partition(',')[0]}"
        )
    units = UNITS.get(name, _COUNT)
    match = re.fullmatch(rf"([+-]?(?:{_THOUSANDS}|[0-9._]+)(?:[eE][+-]?[0-9]+)?)\s*([A-Za-zµ%]*)", value)
    number = _number(match.group(1)) if match else math.nan
    if not match or not math.isfinite(number):
        raise BcnetError(f"budget {text!r} has no number after the equals sign, as in flops=50%")
    unit = match.group(2)
    if number <= 0:
        raise BcnetError(f"budget {text!r} must be above zero")
    if not unit and number < 1:
        raise BcnetError(f"budget {text!r} is below 1: did you mean {name}={100 * number:g}%?")
    if unit == "%":
        return Budget(name, number * float(costs[name](space.max)[0]) / 100, text)
    if unit not in units:
        known = ", ".join(u for u in units if u)
        raise BcnetError(
            f"budget {text!r} has the unknown unit {unit!r}: {name} takes {known}, or % of the largest network"
            if unit
            else f"budget {text!r} needs a unit: {known}, or % of the largest network"
        )
    return Budget(name, number * units[unit], text)


def _number(text: str) -> float:
    try:
        return float(text.replace(",", "").replace("_", ""))
    except ValueError:
        return math.nan


def format_cost(name: str, value: float) -> str:
    """A cost for people: ``105.6M``, ``2.10 MiB``, ``3.92 ms``."""
    units = UNITS.get(name, _COUNT)
    order = ["GiB", "MiB", "KiB", "B"] if units is _BYTES else ["s", "ms", "us", "ns"] if units is _TIME else "GMK"
    for unit in order:
        if value >= units[unit]:
            space = "" if units is _COUNT else " "
            return f"{value / units[unit]:.4g}{space}{unit}"
    return f"{value:.4g}"


def _percent_meant(budget: Budget) -> str:
    number = budget.text.partition("=")[2].strip()
    return f"; did you mean {budget.name}={number}%?" if number.isdigit() and int(number) < 100 else ""


class Constraints:
    """Budgets bound to the space and the costs they speak of: whole populations are checked at once."""

    def __init__(self, space: WidthSpace, costs: Mapping[str, Cost], budgets: Sequence[str | Budget]):
        if not budgets:
            raise BcnetError("a search needs at least one budget, such as flops=50%")
        self.space, self.costs = space, dict(costs)
        self.budgets = tuple(b if isinstance(b, Budget) else parse_budget(b, costs, space) for b in budgets)
        for i, budget in enumerate(self.budgets):
            twin = next((b for b in self.budgets[:i] if b.name == budget.name), None)
            if twin is not None:
                raise BcnetError(f"budget {budget.name!r} is given twice ({twin.text} and {budget.text}): give it once")

    def excess(self, widths: Widths) -> Floats:
        """How far widths (n, L) are above each budget, relative to it: (n, B), positive where too costly."""
        return np.column_stack([self.costs[b.name](widths) / b.limit - 1 for b in self.budgets])

    def feasible(self, widths: Widths) -> NDArray[np.bool_]:
        """Which of widths (n, L) are within every budget: (n,)."""
        return np.all([self.costs[b.name](widths) <= b.limit for b in self.budgets], axis=0)

    def uniform(self, multiple: int = 0) -> Widths:
        """The widest uniform scaling within every budget, or the smallest network where there is none: (L,).

        Channel by channel, unless the space asks for rounding; with ``multiple``, to the nearest multiple of that,
        where such a scaling is within the budgets.
        """
        try:
            return self.space.uniform(lambda widths: self.excess(widths).max(axis=1), 0.0, multiple)
        except BcnetError:
            return self.uniform() if multiple else self.space.min

    def uniform_index(self) -> NDArray[np.int64]:
        """The candidates nearest to the widest uniform scaling within every budget: indices (L,).

        Those just below it, then each one just above that the budgets leave room for, the nearest first. Where the
        smallest candidates are above uniform scaling, or those below it cost more, it is scaled further.
        """
        scaled = self.uniform()
        if not self.feasible(self.space.floor(scaled)[None])[0]:
            try:
                scaled = self.space.uniform(lambda widths: self.excess(self.space.floor(widths)).max(axis=1), 0.0)
            except BcnetError:
                scaled = self.space.min
        pairs = list(zip(self.space.variables, scaled.tolist(), strict=True))
        index = np.array([max(bisect_right(v.candidates, c) - 1, 0) for v, c in pairs])
        gaps = [
            ((v.candidates[index[n] + 1] - c) / v.max, n)
            for n, (v, c) in enumerate(pairs)
            if v.candidates[index[n]] < c < v.max
        ]
        for _, n in sorted(gaps):
            index[n] += 1
            if not self.feasible(self.space.decode(index)[None])[0]:
                index[n] -= 1
        return index

    def with_uniform(self, widths: Widths) -> Widths:
        """Feasible widths (n, L), preceded by the candidates nearest to uniform scaling: a search that starts from them
        never does worse than those."""
        even = self.space.decode(self.uniform_index())[None]
        return np.vstack([even[self.feasible(even)], widths])

    def shrink(self, index: NDArray[np.int64], rng: np.random.Generator) -> NDArray[np.int64]:
        """Candidate indices (n, L), each lowered one step of a random variable at a time until it is feasible.

        Bounded: a row ends at the smallest network at the latest.
        """
        index = index.copy()
        bad = np.flatnonzero(~self.feasible(self.space.decode(index)))
        for _ in range(int(index.sum(axis=1).max(initial=0))):
            if not len(bad):
                break
            weights = rng.random((len(bad), index.shape[1])) * (index[bad] > 0)
            index[bad, weights.argmax(axis=1)] -= 1
            np.maximum(index, 0, out=index)
            bad = bad[~self.feasible(self.space.decode(index[bad]))]
        return index

    def used(self, widths: Widths) -> Floats:
        """How much of the budget that they come nearest to widths (n, L) use: (n,)."""
        share: Floats = 1 + self.excess(widths).max(axis=1)
        return share

    def fill(self, widths: Widths, rng: np.random.Generator, enough: float = math.inf) -> Widths:
        """Feasible widths (n, L), each raised one candidate of a random variable at a time until nothing more fits, or
        until it uses ``enough`` of a budget.

        Costs rise with every width, so a variable that does not fit once never will; bounded by the candidates.
        """
        index = self.space.encode(widths)
        last = np.array([len(v.candidates) - 1 for v in self.space.variables])
        room = np.ones(index.shape, dtype=bool)
        for _ in range(int(last.sum()) + len(last)):
            room &= (index < last) & (self.used(self.space.decode(index)) < enough)[:, None]
            rows = np.flatnonzero(room.any(axis=1))
            if not len(rows):
                break
            variables = np.where(room[rows], rng.random((len(rows), len(last))), -1.0).argmax(axis=1)
            raised = index[rows].copy()
            raised[np.arange(len(rows)), variables] += 1
            fits = self.feasible(self.space.decode(raised))
            index[rows[fits]] = raised[fits]
            room[rows[~fits], variables[~fits]] = False
        return self.space.decode(index)

    def sample_full(self, rng: np.random.Generator, n: int) -> Widths:
        """``n`` random widths (n, L) that use the budgets: random feasible ones, filled, drawn again while they leave
        more than 5 % of every budget. After :data:`TRIES` draws the fullest are taken, as candidates may be too few."""
        drawn = [self.fill(self.sample(rng, n)[0], rng)]
        used = [self.used(drawn[0])]
        for _ in range(TRIES - 1):
            if sum(int((u >= FULL).sum()) for u in used) >= n:
                break
            drawn.append(self.fill(self.sample(rng, n)[0], rng))
            used.append(self.used(drawn[-1]))
        shares = np.concatenate(used)
        order = np.argsort(-np.minimum(shares, FULL), kind="stable")  # all that are full enough count alike
        return np.concatenate(drawn)[order[:n]]

    def sample(self, rng: np.random.Generator, n: int, tries: int = 100) -> tuple[Widths, int]:
        """``n`` feasible widths (n, L) drawn uniformly, and how many of them had to be shrunk instead.

        Uniform draws that break a budget are rejected, ``tries`` times ``n`` of them at most; where
        budgets are too tight for that, the rest are uniform draws shrunk until they fit.
        """
        kept = [np.empty((0, len(self.space)), dtype=np.int64)]
        found = 0
        for _ in range(tries):
            if found >= n:
                break
            drawn = self.space.sample(rng, n)
            kept.append(drawn[self.feasible(drawn)])
            found += len(kept[-1])
        shrunk = max(n - found, 0)
        if shrunk:
            kept.append(self.space.decode(self.shrink(self.space.encode(self.space.sample(rng, shrunk)), rng)))
        return np.concatenate(kept)[:n], shrunk

    def check(self) -> Feasibility:
        """The smallest, uniform and largest network against every budget; impossible budgets are refused."""
        smallest = {b.name: int(self.costs[b.name](self.space.min)[0]) for b in self.budgets}
        for budget in self.budgets:
            least = smallest[budget.name]
            if least > budget.limit:
                raise BcnetError(
                    f"budget {budget.text} is impossible: the smallest network of this space costs "
                    f"{format_cost(budget.name, least)}, so the nearest feasible budget is "
                    f"{budget.name}={least}{_exact_unit(budget.name)}{_percent_meant(budget)}"
                )
        scaled = self.uniform()
        rows = tuple(
            BudgetReport(
                b.name,
                b.text,
                b.limit,
                smallest[b.name],
                int(self.costs[b.name](scaled)[0]),
                int(self.costs[b.name](self.space.max)[0]),
            )
            for b in self.budgets
        )
        return Feasibility(rows, tuple(int(c) for c in scaled))


def _exact_unit(name: str) -> str:
    units = UNITS.get(name, _COUNT)
    return "B" if units is _BYTES else "ns" if units is _TIME else ""


@dataclass(frozen=True)
class BudgetReport:
    """One budget beside what the smallest, the uniformly scaled and the largest network cost."""

    name: str
    text: str
    limit: float
    smallest: int
    uniform: int
    largest: int


@dataclass(frozen=True)
class Feasibility:
    """The answer to "can these budgets be met?" before any search; ``uniform`` is the scaling's widths."""

    budgets: tuple[BudgetReport, ...]
    uniform: tuple[int, ...]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)
