"""The released schema of a table: JSON, key -> {"acc": [percent per seed], "std", "flops", "params", "mean"}.

Reading trusts nothing: every key of the space once, every field of its type, all entries of one number of
seeds, means that are the means. ``std`` must be there but is not compared, as its definition varies.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bcnet.bench.spaces import BenchSpace
from bcnet.errors import BcnetError
from bcnet.space.widths import Floats

COSTS = ("flops", "params")
LARGEST = 2**28  # bytes; the released tables have some 3 * 10^6
FIELDS = ("acc", "std", *COSTS, "mean")
# Released means are exact; a table written by others may hold rounded ones.
MEAN_TOLERANCE = 0.01


def deviation(acc: Floats) -> Floats:
    """The standard deviation over the seeds of ``acc`` (n, S) with S - 1 degrees of freedom, 0 for one seed: (n,)."""
    return acc.std(axis=1, ddof=1) if acc.shape[1] > 1 else np.zeros(len(acc))


def dump(space: BenchSpace, acc: Floats, costs: Mapping[str, NDArray[np.int64]]) -> bytes:
    """Accuracies (n, S) and costs (n,) in the order of the index as the text of a table."""
    keys = space.keys(np.arange(space.size)).tolist()
    columns = (acc, deviation(acc), *(costs[name] for name in COSTS), acc.mean(axis=1))
    rows = zip(*(column.tolist() for column in columns), strict=True)
    entries = {key: dict(zip(FIELDS, row, strict=True)) for key, row in zip(keys, rows, strict=True)}
    return json.dumps(entries, allow_nan=False).encode()


def parse(content: bytes, space: BenchSpace) -> tuple[Floats, dict[str, NDArray[np.int64]]]:
    """The text of a table as accuracies (n, S) and costs (n,) in the order of the index."""
    entries = _entries(content)
    index = space.parse(list(entries))
    if len(index) < space.size:
        missing = np.setdiff1d(np.arange(space.size), index)
        first = space.keys(missing[0])
        raise BcnetError(
            f"{len(missing):,} of the {space.size:,} keys of space {space.name!r} are missing, first '{first}'"
        )
    rows = list(entries.values())
    faults = (fault for key, row in entries.items() if (fault := _fault(key, row, rows[0])))
    if fault := next(faults, None):
        raise BcnetError(fault)
    order = np.argsort(index)
    acc = np.array([row["acc"] for row in rows], dtype=np.float64)[order]
    means = np.array([row["mean"] for row in rows], dtype=np.float64)[order]
    wrong = np.flatnonzero(np.abs(means - acc.mean(axis=1)) > MEAN_TOLERANCE)
    if len(wrong):
        at = wrong[0]
        raise BcnetError(
            f"key '{space.keys(at)}' has mean {means[at]:.3f}, but its accuracies average {acc[at].mean():.3f}"
        )
    return acc, {name: np.array([row[name] for row in rows], dtype=np.int64)[order] for name in COSTS}


def _entries(content: bytes) -> dict[str, Any]:
    try:
        data = json.loads(content, object_pairs_hook=_unique)
    except BcnetError:
        raise
    except (ValueError, RecursionError):
        raise BcnetError(f"this is no whole JSON file ({len(content):,} bytes); it may be cut short") from None
    if not isinstance(data, dict) or not data:
        raise BcnetError("a table is a JSON object of keys and their entries, and this is none")
    return data


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise BcnetError(f"{name[:60]!r} stands twice in one JSON object")
        found[name] = value
    return found


def _fault(key: str, entry: Any, first: Any) -> str | None:
    """What is wrong with an entry, assuming that the first entry of the table is right."""
    if not isinstance(entry, dict) or any(field not in entry for field in FIELDS):
        return f"the entry of key {key!r} must be an object with {', '.join(FIELDS)}"
    acc = entry["acc"]
    if not isinstance(acc, list) or not acc or not all(_is_number(a) and 0 <= a <= 100 for a in acc):
        return f"acc of key {key!r} must be a list of percentages in 0..100, got {acc!r:.60}"
    if len(acc) != len(first["acc"]):
        return f"key {key!r} has {len(acc)} accuracies, but the first key has {len(first['acc'])}"
    for field in ("mean", "std"):
        if not _is_number(entry[field]):
            return f"{field} of key {key!r} must be a number, got {entry[field]!r:.60}"
    for field in COSTS:
        if type(entry[field]) is not int or not 0 <= entry[field] < 2**63:
            return f"{field} of key {key!r} must be a whole number, got {entry[field]!r:.60}"
    return None


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) <= sys.float_info.max
