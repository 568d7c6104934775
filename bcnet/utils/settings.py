"""Settings that are checked when they are made: dataclasses whose fields pydantic validates.

A mistake is a :class:`BcnetError` of one sentence that names the field, in Python and in a recipe alike::

    @checked
    class Sampling:
        draws: Annotated[Count, "how many widths are sampled a step"] = 1

What a field means stands beside its type; ``bcnet recipe show`` prints it (:func:`meanings`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import field, fields
from functools import wraps
from typing import Annotated, Any, TypeVar, dataclass_transform, get_args, get_type_hints

from pydantic import ConfigDict, Field, ValidationError
from pydantic.dataclasses import dataclass as validated

from bcnet.errors import BcnetError, did_you_mean
from bcnet.utils.yaml_text import brief

Flag = Annotated[bool, Field(strict=True)]
Whole = Annotated[int, Field(strict=True)]
Count = Annotated[int, Field(strict=True, ge=1)]
Natural = Annotated[int, Field(strict=True, ge=0)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, le=1)]
BelowOne = Annotated[float, Field(ge=0, lt=1)]

T = TypeVar("T")


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def checked(cls: type[T]) -> type[T]:
    """``cls`` as a frozen dataclass whose fields are validated when an instance is made.

    Rules that span several fields are a pydantic ``model_validator(mode="after")`` that raises BcnetError.
    """
    made: Any = validated(cls, frozen=True, config=ConfigDict(extra="forbid"))
    made.__doc__ = cls.__doc__
    validate = made.__init__

    @wraps(validate)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        try:
            validate(self, *args, **kwargs)
        except ValidationError as error:
            raise BcnetError(sentence(error, [f.name for f in fields(made)])) from None

    made.__init__ = init
    checked_class: type[T] = made
    return checked_class


def meanings(settings: type) -> dict[str, str]:
    """What the fields of a class of settings mean, for those that say so."""
    hints = get_type_hints(settings, include_extras=True)
    said = {name: [part for part in get_args(hint)[1:] if isinstance(part, str)] for name, hint in hints.items()}
    return {name: texts[-1] for name, texts in said.items() if texts}


_MUST_BE = {
    "int": "a whole number",
    "float": "a number",
    "finite": "a finite number",
    "bool": "true or false",
    "string": "a text",
    "tuple": "a list",
    "dataclass": "a group of settings, `key: value`",
    "model": "a group of settings, `key: value`",
}
MANY = 8
"""The most choices that a sentence lists; where there are more, it guesses which one was meant."""
_BOUNDS = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}


def sentence(error: ValidationError, known: Iterable[str] = ()) -> str:
    """The first mistake found: its key, and what the value must be; ``known`` are the valid keys."""
    first = error.errors(include_url=False)[0]
    key = ".".join(str(part) for part in first["loc"])
    kind, value, context = first["type"], first["input"], first.get("ctx", {})
    if kind in ("extra_forbidden", "unexpected_keyword_argument"):
        return unknown_key(key, known)
    if kind in ("missing", "missing_argument"):
        owner, _, number = key.rpartition(".")
        return f"{owner} has too few numbers" if number.isdigit() else f"{key} is missing: name it"
    if kind == "value_error":
        text = str(context["error"])
        return f"{key}.{text}" if key and not text.startswith(key) else text
    must = next((meaning for prefix, meaning in _MUST_BE.items() if kind.startswith(prefix)), "")
    if kind == "literal_error":
        must = context["expected"].replace("'", "")
        choices = must.replace(" or ", ", ").split(", ")
        if len(choices) > MANY and (guess := did_you_mean(value, choices)):
            return f"{key} is {brief(value)}: {guess}"
    elif bound := next((bound for bound in _BOUNDS if bound in context), None):
        must = f"{_BOUNDS[bound]} {context[bound]:g}"
    elif kind == "too_short":
        return f"{key} is empty, but it needs at least {context['min_length']}"
    if must:
        return f"{key} is {brief(value)}, but it must be {must}"
    return f"{key} is {brief(value)}, but {first['msg'][0].lower()}{first['msg'][1:]}"


def unknown_key(key: str, known: Iterable[str]) -> str:
    """A sentence that there is no such key, with the nearest one that exists."""
    names = list(known)
    return f"unknown key {key:.80}: {did_you_mean(key.rpartition('.')[2], names) or 'there are ' + ', '.join(names)}"
