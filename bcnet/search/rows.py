"""A trial as a row of the store and back, trusting nothing that is read."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterable, Sequence
from typing import Any

from bcnet.search.trial import Trial

SUM_OF_NONE = "0" * 64


def packed(trial: Trial, at: float) -> tuple[Any, ...]:
    """The cells of a trial, but for its digest; ``at`` is when it was scored, in seconds since 1970."""
    t = trial
    widths, costs = json.dumps(t.widths), json.dumps(t.costs)
    return t.number, widths, t.score, costs, int(t.feasible), t.generation, float(t.seconds), t.failure, at


def row_digest(row: Sequence[Any]) -> str:
    """The digest of the cells of a row, kinds included."""
    return hashlib.sha256(repr(tuple(row)).encode("utf-8", "surrogatepass")).hexdigest()


def add_up(digests: Iterable[str]) -> str:
    """The sum of digests, the same in any order."""
    return f"{sum(int(digest, 16) for digest in digests) % 2**256:064x}"


def unpacked(row: Sequence[Any]) -> Trial:
    """The trial of a row; a ``ValueError`` says which cell is odd."""
    number, widths, score, costs, feasible, generation, seconds, failure, *_ = row
    found = Trial(
        number,
        tuple(_json("widths", widths, list)),
        score,
        _json("costs", costs, dict),
        bool(feasible),
        generation,
        seconds,
        failure,
    )
    fits = {
        "number": _whole(number),
        "widths": all(_whole(width) and width > 0 for width in found.widths) and found.widths,
        "score": score is None or _finite(score),
        "costs": all(_whole(cost) for cost in found.costs.values()),
        "feasible": feasible in (0, 1) and type(feasible) is int,
        "generation": _whole(generation),
        "seconds": _finite(seconds),
        "failure": failure is None or isinstance(failure, str),
    }
    odd = next((name for name, fit in fits.items() if not fit), None)
    if odd is not None:
        raise ValueError(f"the {odd} of trial {number!r:.20} cannot be")
    return found


def _json(name: str, cell: object, kind: type) -> Any:
    try:
        value = json.loads(cell) if isinstance(cell, str) else None
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, kind):
        raise ValueError(f"the {name} of a trial cannot be read")
    return value


def _whole(value: object) -> bool:
    return type(value) is int and 0 <= value < 2**63


def _finite(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= sys.float_info.max
