"""Tracing a network takes a second or more, so tests that only look at a space share it."""

from __future__ import annotations

from typing import Any

from bcnet.models.load import LoadedModel
from bcnet.space.network import NetworkSpace

_DEFAULTS = {"groups": 20, "base": 1, "round_to": 1, "ignore": (), "squeeze": False}
_trace = LoadedModel.space
_known: dict[str, NetworkSpace] = {}


def space_of(loaded: LoadedModel, **options: Any) -> NetworkSpace:
    """``loaded.space(**options)``, traced once for each network and options in a run of the tests."""
    chosen = _DEFAULTS | options
    key = repr((loaded.spec, loaded.input_shape, {**chosen, "ignore": tuple(chosen["ignore"])}))
    if key not in _known:
        _known[key] = _trace(loaded, **options)
    return _known[key]
