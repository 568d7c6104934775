"""Rows and tables of benchmarks: what is around a table stays, and a page without its place is named."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
PAGE = "above\n<!-- one: begin -->\n\nold\n\n<!-- one: end -->\nbetween\n<!-- two: begin --><!-- two: end -->\nbelow\n"


@pytest.fixture(scope="module")
def rows() -> Iterator[ModuleType]:
    sys.path.insert(0, str(BENCHMARKS))
    try:
        import rows

        yield rows
    finally:
        sys.path.remove(str(BENCHMARKS))


def test_rows_are_read_as_they_were_appended(rows: ModuleType, tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    assert rows.read(file) == []
    for row in ({"seed": 1, "loss": 0.5}, {"seed": 2, "widths": [4, 8]}):
        rows.append(file, row)
    assert rows.read(file) == [{"seed": 1, "loss": 0.5}, {"seed": 2, "widths": [4, 8]}]


def test_tables_replace_what_is_between_their_marks_and_nothing_else(rows: ModuleType, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(PAGE)
    rows.put(page, {"one": "| a |", "two": "| b |"})
    put = page.read_text()
    assert "old" not in put
    assert put.index("above") < put.index("| a |") < put.index("between") < put.index("| b |") < put.index("below")
    rows.put(page, {"two": "| b |", "one": "| a |"})
    assert page.read_text() == put


@pytest.mark.parametrize("text", ["no marks", "<!-- one: begin -->\n", "<!-- one: end --> <!-- one: begin -->"])
def test_a_page_without_a_place_for_a_table_is_left_as_it_is(rows: ModuleType, tmp_path: Path, text: str) -> None:
    page = tmp_path / "page.md"
    page.write_text(text)
    with pytest.raises(SystemExit, match="has no marks for the table 'one': add a line <!-- one: begin --> and"):
        rows.put(page, {"one": "| a |"})
    assert page.read_text() == text


def test_what_needs_data_says_so(
    rows: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    done: list[str] = []
    ways = {"run": lambda given: done.append("run"), "page": lambda given: done.append(given.out.name)}
    monkeypatch.setattr("torch.set_num_threads", lambda _: None)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["some.py", "page"])
    rows.command_line("about", "some-name", ways)
    assert done == ["some-name.jsonl"]
    monkeypatch.setattr(sys, "argv", ["some.py", "run"])
    with pytest.raises(SystemExit):
        rows.command_line("about", "some-name", ways)
    assert "run needs --cifar FOLDER" in capsys.readouterr().err
    assert done == ["some-name.jsonl"]
