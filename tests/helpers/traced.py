"""Tracing a network takes a second or more, so tests that only look at a space share it."""

from __future__ import annotations

from typing import Any

from bcnet.models.load import LoadedModel
from bcnet.space.network import NetworkSpace

_DEFAULTS = {"groups": 20, "base": 1, "round_to": 1, "ignore": (), "squeeze": False}
_trace = LoadedModel.space
_known: dict[str, NetworkSpace] = {}


def space_of(source: LoadedModel, **options: Any) -> NetworkSpace:
    """``source.space(**options)``, traced once for each source and options in a run of the tests."""
    chosen = _DEFAULTS | options
    key = repr((source.spec, source.input_shape, {**chosen, "ignore": tuple(chosen["ignore"])}))
    if key not in _known:
        _known[key] = _trace(source, **options)
    return _known[key]
