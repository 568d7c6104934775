"""Mutated files of every format, 200 each: benchmarks/fuzz.py does the same with as many as it is told to."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

FILE = Path(__file__).parents[2] / "benchmarks" / "fuzz.py"
spec = importlib.util.spec_from_file_location("fuzz", FILE)
assert spec is not None
assert spec.loader is not None
fuzz: Any = importlib.util.module_from_spec(spec)
sys.modules["fuzz"] = fuzz  # dataclasses look their module up
spec.loader.exec_module(fuzz)


@pytest.mark.parametrize("kind", fuzz.FORMATS, ids=lambda kind: kind.name)
def test_a_changed_file_ends_in_a_sentence_or_in_what_was_written(kind: Any) -> None:
    tally = fuzz.fuzz(kind, count=200, seed=1)
    assert tally.failures == []
    assert tally.refused + tally.same + tally.other > 100
    assert tally.slowest_s < fuzz.LONGEST
    if kind.guarded:
        assert tally.other == 0
