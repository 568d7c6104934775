"""Lines of results: what was stopped anywhere goes on, and what was changed is said in a sentence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bcnet.bench.results import Results
from bcnet.errors import BcnetError

HEAD = {"format": "some", "settings": 1}


def opened(folder: Path, head: dict[str, Any] | None = HEAD) -> Results[float]:
    return Results(folder / "results.jsonl", lambda row: float(row["value"]), head)


@pytest.mark.parametrize("head", [HEAD, None])
@pytest.mark.parametrize("lost", [1, 2, 9])
def test_a_line_that_was_cut_short_is_dropped(tmp_path: Path, head: dict[str, Any] | None, lost: int) -> None:
    """Even where all that it lacks is the end of the line, behind which the next one would be written."""
    results = opened(tmp_path, head)
    for value in range(3):
        results.add({"value": value})
    assert opened(tmp_path, head).known == results.known == [0, 1, 2]
    results.file.write_bytes(results.file.read_bytes()[:-lost])
    again = opened(tmp_path, head)
    assert again.known == [0, 1]
    again.add({"value": 5})
    assert opened(tmp_path, head).known == [0, 1, 5]


@pytest.mark.parametrize("line", ["{", "[]", '{"value": "much"}', '{"other": 1}', "[" * 100_000])
def test_a_damaged_line_is_named(tmp_path: Path, line: str) -> None:
    results = opened(tmp_path)
    results.file.write_text(results.file.read_text() + f"{line}\n" + '{"value": 1}\n')
    with pytest.raises(BcnetError, match=r"line 2 of .*results\.jsonl is damaged: remove it to have it done again"):
        opened(tmp_path)


def test_results_of_other_settings_are_refused(tmp_path: Path) -> None:
    opened(tmp_path).add({"value": 1})
    with pytest.raises(BcnetError, match="belongs to work with other settings: choose another folder"):
        opened(tmp_path, {**HEAD, "settings": 2})
