"""Every trial of a search in one SQLite file, written as it happens.

The file is in WAL mode: it can be read while a search writes it, and a search that is killed at any
moment loses at most the trial it was scoring. Started again with the same settings, a search asks for
the same widths in the same order, takes what is stored, and goes on from there.
"""

from __future__ import annotations

import csv
import json
import sqlite3
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

from bcnet.errors import BcnetError
from bcnet.search.trial import Trial

FORMAT_VERSION = 1
_SCHEMA = """
CREATE TABLE IF NOT EXISTS settings (key TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS trials (
    number INTEGER PRIMARY KEY, widths TEXT NOT NULL UNIQUE, score REAL, costs TEXT NOT NULL,
    feasible INTEGER NOT NULL, generation INTEGER NOT NULL, seconds REAL NOT NULL, failure TEXT, at REAL NOT NULL
);
"""


class TrialStore:
    """The trials of one search; without a path they are kept in memory."""

    def __init__(self, path: str | Path | None = None, must_exist: bool = False):
        self.path = Path(path) if path is not None else None
        if must_exist and not (self.path and self.path.is_file()):
            raise BcnetError(f"there are no trials at {self.path}: run a search there first")
        with self._clear_errors("open"):
            if self.path and not must_exist:
                self.path.parent.mkdir(parents=True, exist_ok=True)
            self._connection = sqlite3.connect(self.path or ":memory:", isolation_level=None)
            self._connection.execute("PRAGMA journal_mode=WAL")
            self._connection.execute("PRAGMA synchronous=NORMAL")
            self._connection.executescript(_SCHEMA)
            version = self._setting("version") or FORMAT_VERSION
        if version != FORMAT_VERSION:
            raise BcnetError(
                f"the trials in {self.path} have format version {version!r}, but this bcnet reads {FORMAT_VERSION}"
            )

    def __enter__(self) -> TrialStore:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        self._connection.close()

    def claim(self, settings: dict[str, Any]) -> None:
        """Make this the store of a search with ``settings``; a store of another search is refused."""
        with self._clear_errors("write"):
            self._connection.execute("BEGIN IMMEDIATE")
            for key, value in {"version": FORMAT_VERSION, **settings}.items():
                row = (key, json.dumps(value, sort_keys=True))
                self._connection.execute("INSERT OR IGNORE INTO settings VALUES (?, ?)", row)
            self._connection.execute("COMMIT")
        for key, value in settings.items():
            stored = self._setting(key)
            if json.dumps(stored, sort_keys=True) != json.dumps(value, sort_keys=True):
                raise BcnetError(
                    f"{self.path} holds a search with another {key} ({stored!r:.60}, not {value!r:.60}): "
                    f"use the same settings to resume it, or another folder"
                )

    def settings(self) -> dict[str, Any]:
        """What :meth:`claim` stored."""
        with self._clear_errors("read"):
            rows = self._connection.execute("SELECT key, value FROM settings WHERE key != 'version'").fetchall()
        return {key: json.loads(value) for key, value in rows}

    def add(self, trials: Iterable[Trial]) -> None:
        """Store trials, all or none; they are on disk when this returns."""
        rows = [_row(trial) for trial in trials]
        with self._clear_errors("write"):
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                self._connection.executemany("INSERT INTO trials VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", rows)
                self._connection.execute("COMMIT")
            except sqlite3.Error:
                if self._connection.in_transaction:
                    self._connection.execute("ROLLBACK")
                raise

    def trials(self) -> list[Trial]:
        """All trials in order of their number."""
        query = "SELECT number, widths, score, costs, feasible, generation, seconds, failure FROM trials"
        with self._clear_errors("read"):
            rows = self._connection.execute(f"{query} ORDER BY number").fetchall()
        return [
            Trial(number, tuple(json.loads(widths)), score, json.loads(costs), bool(feasible), *rest)
            for number, widths, score, costs, feasible, *rest in rows
        ]

    def export(self, path: str | Path) -> Path:
        """Write all trials as a table, one column per width variable and cost: ``.csv`` or ``.parquet``."""
        target = Path(path)
        names = self.settings().get("variables")
        rows = [_flat(trial, names) for trial in self.trials()]
        if not rows:
            raise BcnetError(f"there are no trials in {self.path or 'memory'} to export yet")
        try:
            if target.suffix == ".csv":
                with target.open("w", newline="", encoding="utf-8") as file:
                    writer = csv.DictWriter(file, fieldnames=list(rows[0]))
                    writer.writeheader()
                    writer.writerows(rows)
            elif target.suffix == ".parquet":
                _write_parquet(rows, target)
            else:
                raise BcnetError(f"cannot export trials to {target.name!r}: its name must end in .csv or .parquet")
        except OSError as error:
            raise BcnetError(f"cannot write {target}: {error.strerror or error}") from None
        return target

    def _setting(self, key: str) -> Any:
        row = self._connection.execute("SELECT value FROM settings WHERE key = ?", (key,)).fetchone()
        return json.loads(row[0]) if row else None

    @contextmanager
    def _clear_errors(self, verb: str) -> Iterator[None]:
        try:
            yield
        except sqlite3.IntegrityError:
            raise BcnetError(f"another search is writing to {self.path}: let one of them end first") from None
        except (sqlite3.Error, OSError) as error:
            reason = str(error) or type(error).__name__
            raise BcnetError(
                f"cannot {verb} the trials in {self.path} ({reason}): "
                f"the trials stored so far are kept; mend that and run the same search again"
            ) from None


def _row(t: Trial) -> tuple[Any, ...]:
    widths, costs = json.dumps(t.widths), json.dumps(t.costs)
    return t.number, widths, t.score, costs, t.feasible, t.generation, t.seconds, t.failure, time.time()


def _flat(trial: Trial, names: list[str] | None) -> dict[str, Any]:
    row = trial.to_dict()
    widths, costs = row.pop("widths"), row.pop("costs")
    labels = names or [str(i) for i in range(len(widths))]
    return row | costs | {f"width.{name}": width for name, width in zip(labels, widths, strict=True)}


def _write_parquet(rows: list[dict[str, Any]], target: Path) -> None:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise BcnetError("parquet needs pyarrow: pip install 'bcnet[parquet]', or export to .csv") from None
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), target)
