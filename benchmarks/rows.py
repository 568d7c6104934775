"""What benchmarks share that keep rows in a file of results and put tables into a page.

Rows are appended as they are found, so a stopped benchmark goes on where it was. Tables replace what stands between
their marks, ``<!-- name: begin -->`` and ``<!-- name: end -->``, and leave the rest of a page alone.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

RESULTS = Path(__file__).parents[1] / "docs" / "results"
Row = dict[str, Any]
Way = Callable[[argparse.Namespace], None]


def read(path: Path) -> list[Row]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def append(path: Path, row: Row) -> None:
    with path.open("a") as file:
        file.write(json.dumps(row) + "\n")


def put(page: Path, tables: Mapping[str, str]) -> None:
    """Replace what is between the marks of each table's name in ``page``."""
    text = page.read_text()
    for name, table in tables.items():
        begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
        before, found, rest = text.partition(begin)
        _, closed, after = rest.partition(end)
        if not (found and closed):
            raise SystemExit(f"{page} has no marks for the table {name!r}: add a line {begin} and a line {end}")
        text = f"{before}{begin}\n\n{table}\n\n{end}{after}"
    page.write_text(text)


def command_line(
    about: str | None,
    name: str,
    ways: Mapping[str, Way],
    options: Mapping[str, Mapping[str, Any]] | None = None,
    without_data: tuple[str, ...] = ("page",),
) -> None:
    """Do what the command line asks for, on one thread: one of ``ways``, all of which get its arguments. Rows lie in
    docs/results/NAME.jsonl, trained networks in build/NAME; only the ways ``without_data`` can do without CIFAR-10."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=list(ways))
    parser.add_argument("--cifar", type=Path, help="a folder with CIFAR-10")
    parser.add_argument("--out", type=Path, default=RESULTS / f"{name}.jsonl", help="the file of rows")
    parser.add_argument("--cache", type=Path, default=Path("build") / name, help="for trained networks")
    for option, settings in (options or {}).items():
        parser.add_argument(option, **settings)
    given = parser.parse_args()
    if given.cifar is None and given.what not in without_data:
        parser.error(f"{given.what} needs --cifar FOLDER")
    given.cache.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    ways[given.what](given)
