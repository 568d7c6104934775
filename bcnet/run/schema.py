"""What the JSON files of a run folder hold, as far as anything in bcnet reads it: checked when they are read.

A file may hold more than its schema names; what is named must be there and of its type, so that whoever reads a
result need not look again.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, ValidationError

from bcnet.search.rows import Costs, Number, Seconds, TrialRecord, Width, WidthList

Sha256 = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]


class _Schema(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True, protected_namespaces=())


class _Tensors(_Schema):
    bytes: Number
    sha256: Sha256


class _Integrity(_Schema):
    sha256: Sha256
    recipe: Sha256 | None = None
    tensors: _Tensors | None = None
    parts: dict[str, Sha256] = {}
    files: dict[str, Sha256] = {}


class Record(_Schema):
    """What every result holds."""

    version: int
    integrity: _Integrity


class _Machine(_Schema):
    system: str
    threads: Number
    device: str


class RunRecord(Record):
    """run.json: which program began the run, and how; a run begun from tests may say less."""

    recipe: str
    bcnet: str = ""
    command: list[str] = []
    seed: Number = 0
    commit: str | None = None
    date: str = ""
    device: str | None = None
    versions: dict[str, str] = {}
    machine: _Machine | None = None


class LatencyRecord(Record):
    """latency.json; the table has a format of its own."""

    table: dict[str, Any]


class _Variable(_Schema):
    name: str
    candidates: WidthList
    layers: list[str]
    unit: Width


class _Budget(_Schema):
    name: str
    limit: FiniteFloat


class TraceRecord(Record):
    """trace.json: the width space and its budgets."""

    model: str
    fingerprint: dict[str, Sha256] = {}
    variables: Annotated[list[_Variable], Field(min_length=1)]
    budgets: Annotated[list[_Budget], Field(min_length=1)]
    widths: dict[str, WidthList]
    costs: dict[str, Costs]


class _Epoch(_Schema):
    epoch: Number
    loss: FiniteFloat


class _Metric(_Schema):
    name: str
    unit: str
    higher_is_better: bool


class _Measured(_Schema):
    score: FiniteFloat
    loss: FiniteFloat


class GivenRecord(Record, _Measured):
    """given.json: what the network knew as it was given, and after training where it knew nothing."""

    knew: bool
    metric: _Metric
    scored_on: str
    before: _Measured
    val: _Measured
    history: list[_Epoch]
    seconds: Seconds


class TrainRecord(Record):
    """train.json: how the supernet was trained."""

    principle: str
    steps: Number
    paths: Number
    history: list[_Epoch]
    seconds: Seconds


class _LogWidth(_Schema):
    gains: list[FiniteFloat]


class _Held(_Schema):
    correction: Annotated[FiniteFloat, Field(gt=0)]
    full_ms: Seconds
    slim_ms: Seconds
    limit_ms: Seconds
    held: bool


class SearchRecord(Record):
    """search.json: what was chosen, and the front it was chosen from."""

    best: TrialRecord
    latency: _Held | None = None
    front: list[TrialRecord]
    evaluations: Number
    ranked_by: Literal["score", "loss"]
    scored_by: Literal["steps", "cut", "supernet"]
    log_width: _LogWidth | None
    reference: dict[str, FiniteFloat]
    notes: list[str]
    seconds: Seconds


class DoubtRecord(Record):
    """search/doubt.json: what the scores of a search tell configurations apart by."""

    ranked_by: Literal["score", "loss"] | None
    note: str


class _Round(_Measured):
    round: Number
    name: str
    epochs: Number


class _Point(_Measured):
    name: str
    epochs: Number


class RoundRecord(Record, _Round):
    """race/ROUND-NAME.json: what a finalist had on validation after a round, and after the epochs before."""

    curve: list[_Point] = []


class RaceRecord(Record):
    """race.json: the finalists and their rounds, and how the winner was trained."""

    winner: str
    by: Literal["score", "loss"]
    finalists: Annotated[dict[str, WidthList], Field(min_length=1)]
    rounds: list[_Round]
    curve: list[_Point] = []
    history: list[_Epoch]
    seconds: Seconds


class RetrainRecord(Record):
    """retrain.json: the networks that were trained."""

    networks: Annotated[list[str], Field(min_length=1)]
    chosen: str


class _Network(_Measured):
    name: str
    scored_on: str
    costs: Costs
    widths: WidthList
    count: Number | None = None
    learnt: bool = True


class TrainedRecord(Record, _Network):
    """retrain/NAME.json: one trained network."""

    history: list[_Epoch]
    seconds: Seconds = 0
    val: _Measured | None = None


class _Lead(_Schema):
    mean: FiniteFloat
    error: Seconds


class _Row(_Network):
    latency_ms: Seconds
    lead: _Lead | None = None
    trainings: Number = 1


class _Kept(_Schema):
    text: str
    name: str
    allowed: FiniteFloat
    taken: FiniteFloat
    by: Literal["counted", "measured"]
    met: bool


class CompareRecord(Record):
    """compare.json: the networks side by side, and whether the budgets hold."""

    timed_by: str = ""
    budgets: list[_Kept] = []

    scored_on: str
    metric: _Metric
    chosen: str
    networks: Annotated[list[_Row], Field(min_length=1)]


class _Shown(_Measured):
    costs: Costs
    latency_ms: Seconds


class _Target(_Schema):
    budget: str
    folder: str
    chosen: str
    metric: _Metric
    networks: Annotated[dict[str, _Shown], Field(min_length=1)]


class TargetsRecord(Record):
    """targets.json: the slim network of every target, and uniform scaling beside it."""

    targets: Annotated[list[_Target], Field(min_length=1)]


class ExportRecord(Record):
    """export.json: what was written, and how fast it is."""

    format: str
    path: str
    files: list[str]
    any_batch: bool
    difference: FiniteFloat | None
    timed_by: str
    latency_ms: dict[str, Seconds]


class ReportRecord(Record):
    """report.json: where the page is."""

    path: str


SCHEMAS: dict[str, type[Record]] = {
    "run": RunRecord,
    "latency": LatencyRecord,
    "trace": TraceRecord,
    "given": GivenRecord,
    "train": TrainRecord,
    "search": SearchRecord,
    "search/": DoubtRecord,
    "race": RaceRecord,
    "race/": RoundRecord,
    "retrain": RetrainRecord,
    "retrain/": TrainedRecord,
    "targets": TargetsRecord,
    "compare": CompareRecord,
    "export": ExportRecord,
    "report": ReportRecord,
}
"""By the name of a result; a name that ends in ``/`` stands for all results in that folder."""


def fault(name: str, content: dict[str, Any]) -> str | None:
    """What is wrong with the content of the result called ``name``; None where it is as it should be."""
    folder, slash, _ = name.rpartition("/")
    schema = SCHEMAS.get(folder + slash if slash else name, Record)
    try:
        schema.model_validate(content)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(str(part) for part in first["loc"])[:80]
        return f"{place}: {first['msg'][0].lower()}{first['msg'][1:]}"[:200]
    return None
