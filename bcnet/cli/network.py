"""What commands about a network share: loading and tracing it, its costs, and widths as a user writes them."""

from __future__ import annotations

import json
import re
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bcnet.errors import BcnetError, did_you_mean

if TYPE_CHECKING:
    from bcnet.models.load import LoadedModel
    from bcnet.space.network import NetworkSpace

TITLES = {"flops": "FLOPs", "params": "parameters", "memory": "peak activations, bytes"}
LARGEST_FILE = 2**20  # bytes; far more than any list of widths needs


def load(model: str, input_shape: str | None) -> LoadedModel:
    """The network that a command names."""
    from bcnet.models.load import load_model, parse_shape

    return load_model(model, None if input_shape is None else parse_shape(input_shape))


def costs_of(space: NetworkSpace, widths: Any) -> dict[str, int]:
    """Every cost of one configuration (L,)."""
    return {name: int(cost(widths)[0]) for name, cost in space.costs.items()}


def by(shape: Sequence[int]) -> str:
    """A shape for people: 3x32x32."""
    return "x".join(map(str, shape))


@contextmanager
def one_line_warnings() -> Iterator[None]:
    """Warnings as ``note: ...`` on stderr."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("ignore")
        warnings.simplefilter("always", UserWarning)
        yield
    for message in dict.fromkeys(" ".join(str(w.message).split()) for w in caught):
        print(f"note: {message}", file=sys.stderr)


def read_widths(text: str) -> list[int] | dict[str, int]:
    """Widths as a user gives them: 44,51,… or @file.json."""
    return _read_file(Path(text[1:])) if text.startswith("@") else _parse_widths(text)


def _parse_widths(text: str) -> list[int]:
    parts = [part.strip() for part in text.split(",")]
    for part in parts:
        if not re.fullmatch("[-+]?[0-9]{1,18}", part):
            raise BcnetError(
                f"widths must be whole numbers separated by commas, or @file.json, but {part!r:.40} is none"
            )
    return [int(part) for part in parts]


def _read_file(path: Path) -> list[int] | dict[str, int]:
    """Widths from JSON: a list, an object of names and widths, or an object whose ``widths`` is one of these."""
    if not path.is_file():
        raise BcnetError(f"there is no file {path}")
    if path.stat().st_size > LARGEST_FILE:
        raise BcnetError(f"{path} is over {LARGEST_FILE:,} bytes, too large for a list of widths")
    try:
        data: Any = json.loads(path.read_bytes())
    except OSError as error:
        raise BcnetError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise BcnetError(f"{path} is no JSON text: {str(error)[:80]}") from None
    if isinstance(data, dict) and isinstance(data.get("widths"), list | dict):
        data = data["widths"]
    match data:
        case list() if all(map(_is_width, data)):
            return data
        case dict() if all(map(_is_width, data.values())):
            return data
    raise BcnetError(f'{path} must hold a list of whole numbers or a map of variables to them, perhaps as "widths"')


def _is_width(value: object) -> bool:
    return type(value) is int and abs(value) < 10**18


def ordered(given: dict[str, int], names: Sequence[str]) -> list[int]:
    """The widths of an object in the order of the variables' ``names``."""
    for name in given:
        if name not in names:
            guess = did_you_mean(name, names) or f"it has {len(names)}"
            raise BcnetError(f"this space has no variable {name!r:.60}: {guess}")
    missing = [name for name in names if name not in given]
    if missing:
        raise BcnetError(f"the width of variable {missing[0]!r} is missing ({len(missing)} of {len(names)} are)")
    return [given[name] for name in names]
