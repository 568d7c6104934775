"""What the JSON files of a run folder hold, so far as bcnet reads it: checked whenever they are read.

A file may hold more than its schema names; what is named must be present and of its type, so that readers of a result
need not check again. A field is its type, or its type and its default.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, PositiveFloat, ValidationError, create_model

from bcnet.search.rows import Costs, Number, Seconds, TrialRecord, Width, WidthList


class _Object(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True, protected_namespaces=())


def _object(*bases: type[BaseModel], **fields: Any) -> Any:
    """The schema of an object with these ``fields``, and those of ``bases``."""
    typed: dict[str, Any] = {name: kind if isinstance(kind, tuple) else (kind, ...) for name, kind in fields.items()}
    return create_model("Object", __base__=bases or (_Object,), **typed)


def _list(item: Any, least: int = 0) -> Any:
    return Annotated[list[item], Field(min_length=least)]


def _map(value: Any, least: int = 0) -> Any:
    return Annotated[dict[str, value], Field(min_length=least)]


Sha256 = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
Measure = Literal["score", "loss"]
_TENSORS = _object(bytes=Number, sha256=Sha256)
_INTEGRITY = _object(
    sha256=Sha256,
    recipe=(Sha256 | None, None),
    tensors=(_TENSORS | None, None),
    parts=(_map(Sha256), {}),
    files=(_map(Sha256), {}),
)
_RESULT = _object(version=int, integrity=_INTEGRITY)
"""What every result holds."""

_MACHINE = _object(system=str, threads=Number, device=str)
_VARIABLE = _object(name=str, candidates=WidthList, layers=list[str], unit=Width)
_BUDGET = _object(name=str, limit=FiniteFloat)
_EPOCHS = _list(_object(epoch=Number, loss=FiniteFloat))
_METRIC = _object(name=str, unit=str, higher_is_better=bool)
_MEASURED = _object(score=FiniteFloat, loss=FiniteFloat)
_HELD = _object(
    correction=Annotated[FiniteFloat, Field(gt=0)], full_ms=Seconds, slim_ms=Seconds, limit_ms=Seconds, held=bool
)
_POINT = _object(_MEASURED, name=str, epochs=Number)
_ROUND = _object(_POINT, round=Number)
_NETWORK = _object(
    _MEASURED,
    name=str,
    scored_on=str,
    costs=Costs,
    widths=WidthList,
    count=(Number | None, None),
    learnt=(bool, True),
)
_LEAD = _object(mean=FiniteFloat, error=Seconds)
_ROW = _object(_NETWORK, latency_ms=Seconds, lead=(_LEAD | None, None), trainings=(Number, 1))
_KEPT = _object(text=str, name=str, allowed=FiniteFloat, taken=FiniteFloat, by=Literal["counted", "measured"], met=bool)
_TARGET = _object(
    budget=str,
    folder=str,
    chosen=str,
    metric=_METRIC,
    networks=_map(_object(_MEASURED, costs=Costs, latency_ms=Seconds), least=1),
)

SCHEMAS: dict[str, Any] = {
    "run": _object(
        _RESULT,
        recipe=str,
        bcnet=(str, ""),
        command=(list[str], []),
        seed=(Number, 0),
        commit=(str | None, None),
        date=(str, ""),
        device=(str | None, None),
        versions=(dict[str, str], {}),
        machine=(_MACHINE | None, None),
    ),
    "latency": _object(_RESULT, table=dict[str, Any]),  # which has a format of its own
    "trace": _object(
        _RESULT,
        model=str,
        fingerprint=(_map(Sha256), {}),
        variables=_list(_VARIABLE, least=1),
        budgets=_list(_BUDGET, least=1),
        widths=dict[str, WidthList],
        costs=dict[str, Costs],
    ),
    "given": _object(
        _RESULT,
        _MEASURED,
        knew=bool,
        metric=_METRIC,
        scored_on=str,
        before=_MEASURED,
        val=_MEASURED,
        history=_EPOCHS,
        seconds=Seconds,
    ),
    "train": _object(_RESULT, principle=str, steps=Number, paths=Number, history=_EPOCHS, seconds=Seconds),
    "search": _object(
        _RESULT,
        best=TrialRecord,
        latency=(_HELD | None, None),
        front=list[TrialRecord],
        evaluations=Number,
        ranked_by=Measure,
        scored_by=Literal["steps", "cut", "supernet"],
        log_width=_object(gains=list[FiniteFloat]) | None,
        reference=dict[str, FiniteFloat],
        rules=(dict[str, FiniteFloat], {}),
        notes=list[str],
        seconds=Seconds,
    ),
    "search/": _object(
        _RESULT,
        note=(str, ""),
        ranked_by=(Measure | None, None),
        lr=(PositiveFloat | None, None),
        asked=(_map(WidthList), {}),
        holding=(list[str], []),
    ),
    "rate": _object(
        _RESULT,
        lr=PositiveFloat,
        probes=_list(_object(lr=PositiveFloat, loss=FiniteFloat | None), least=1),
        steps=Number,
        seconds=Seconds,
    ),
    "race": _object(
        _RESULT,
        winner=str,
        by=Measure,
        finalists=_map(WidthList, least=1),
        rounds=_list(_ROUND),
        curve=(_list(_POINT), []),
        history=_EPOCHS,
        seconds=Seconds,
    ),
    "race/": _object(_RESULT, _ROUND, curve=(_list(_POINT), [])),
    "retrain": _object(_RESULT, networks=_list(str, least=1), chosen=str),
    "retrain/": _object(_RESULT, _NETWORK, history=_EPOCHS, seconds=(Seconds, 0), val=(_MEASURED | None, None)),
    "targets": _object(_RESULT, targets=_list(_TARGET, least=1)),
    "compare": _object(
        _RESULT,
        timed_by=(str, ""),
        budgets=(_list(_KEPT), []),
        scored_on=str,
        metric=_METRIC,
        chosen=str,
        networks=_list(_ROW, least=1),
    ),
    "export": _object(
        _RESULT,
        format=str,
        path=str,
        files=list[str],
        any_batch=bool,
        difference=FiniteFloat | None,
        timed_by=str,
        latency_ms=dict[str, Seconds],
    ),
    "report": _object(_RESULT, path=str),
}
"""By the name of a result; a name that ends in ``/`` stands for all results in that folder."""


def fault(name: str, content: dict[str, Any]) -> str | None:
    """What is wrong with the content of the result called ``name``; None if nothing is."""
    folder, slash, _ = name.rpartition("/")
    try:
        SCHEMAS.get(folder + slash if slash else name, _RESULT).model_validate(content)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(str(part) for part in first["loc"])[:80]
        return f"{place}: {first['msg'][0].lower()}{first['msg'][1:]}"[:200]
    return None
