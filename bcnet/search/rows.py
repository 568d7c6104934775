"""A trial as a row of the store and back, trusting nothing that is read."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import fields
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, ValidationError

from bcnet.search.trial import Trial

SUM_OF_NONE = "0" * 64

Number = Annotated[int, Field(ge=0, lt=2**63)]
Width = Annotated[int, Field(ge=1, le=2**26)]
WidthList = Annotated[list[Width], Field(min_length=1, max_length=100_000)]
Costs = Annotated[dict[str, Number], Field(min_length=1)]
Seconds = Annotated[FiniteFloat, Field(ge=0)]


class TrialRecord(BaseModel):
    """What a file must hold of a trial."""

    model_config = ConfigDict(extra="allow", strict=True)

    number: Number
    widths: WidthList
    score: FiniteFloat | None
    costs: Costs
    feasible: bool
    generation: Number
    seconds: Seconds
    failure: str | None = None


def packed(trial: Trial, at: float) -> tuple[Any, ...]:
    """The cells of a trial, but for its digest; ``at`` is when it was scored, in seconds since 1970."""
    t = trial
    widths, costs = json.dumps(t.widths), json.dumps(t.costs)
    return t.number, widths, t.score, costs, int(t.feasible), t.generation, float(t.seconds), t.failure, at


def row_digest(row: Sequence[Any]) -> str:
    """The digest of the cells of a row, kinds included."""
    return hashlib.sha256(repr(tuple(row)).encode("utf-8", "surrogatepass")).hexdigest()


def sum_of_digests(digests: Iterable[str]) -> str:
    """The sum of digests, the same in any order."""
    return f"{sum(int(digest, 16) for digest in digests) % 2**256:064x}"


def unpacked(row: Sequence[Any]) -> Trial:
    """The trial of a row; a ``ValueError`` says which cell is odd."""
    names = [entry.name for entry in fields(Trial)]
    cells = dict(zip(names, row, strict=False))
    cells |= {name: _json(name, cells[name]) for name in ("widths", "costs")}
    if type(cells["feasible"]) is int and cells["feasible"] in (0, 1):
        cells["feasible"] = bool(cells["feasible"])
    try:
        TrialRecord.model_validate(cells)
    except ValidationError as error:
        odd = error.errors(include_url=False, include_input=False)[0]["loc"][0]
        raise ValueError(f"the {odd} of trial {cells['number']!r:.20} cannot be") from None
    return Trial.from_dict(cells)


def _json(name: str, cell: object) -> Any:
    try:
        return json.loads(cell) if isinstance(cell, str) else None
    except (ValueError, RecursionError):
        raise ValueError(f"the {name} of a trial cannot be read") from None
