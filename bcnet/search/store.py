"""Every trial of a search in one SQLite file, written as it happens.

The file is in WAL mode: it can be read while a search writes it, and a search that is killed at any
moment loses at most the trial it was scoring. Started again with the same settings, a search asks for
the same widths in the same order, takes what is stored, and goes on from there.

Every row has a digest, and the sum of all digests is stored beside them: a cell that was changed, and a row that was
added or is missing, are noticed when the trials are read. A sum, unlike a chain, lets several processes add rows in
any order.
"""

from __future__ import annotations

import csv
import json
import shutil
import sqlite3
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any
from urllib.parse import quote

from bcnet.errors import BcnetError
from bcnet.search.rows import SUM_OF_NONE, packed, row_digest, sum_of_digests, unpacked
from bcnet.search.trial import Trial

FORMAT_VERSION = 2
TRIALS = "trials.sqlite"
"""The file of a run's trials, in its folder."""
_TABLES = {
    "settings": "CREATE TABLE settings (key TEXT PRIMARY KEY, value TEXT NOT NULL)",
    "trials": (
        "CREATE TABLE trials (number INTEGER PRIMARY KEY, widths TEXT NOT NULL UNIQUE, score REAL, "
        "costs TEXT NOT NULL, feasible INTEGER NOT NULL, generation INTEGER NOT NULL, seconds REAL NOT NULL, "
        "failure TEXT, at REAL NOT NULL, digest TEXT NOT NULL)"
    ),
}

DAMAGE = ("not a database", "malformed", "Could not decode")
"""What SQLite says of a file whose content was changed."""


class DamagedTrials(BcnetError):
    """The stored trials are not what was written (``cause``): the search must begin anew."""

    def __init__(self, cause: str):
        super().__init__(f"{cause}: remove the file to search anew")
        self.cause = cause


class TrialStore:
    """The trials of one search; without a path they are kept in memory.

    ``read_only`` opens a file that must be there, and neither changes it nor leaves anything beside it.
    """

    def __init__(self, path: str | Path | None = None, read_only: bool = False):
        self.path = Path(path) if path is not None else None
        self._copy: tempfile.TemporaryDirectory[str] | None = None
        with self._clear_errors("open"):
            if read_only and not (self.path and self.path.is_file()):
                raise BcnetError(f"there are no trials at {self.path}: run a search there first")
            self._connection = self._open_to_read() if read_only else self._open_to_write()
        try:
            self._check_file()
        except BaseException:
            self.close()
            raise

    def _open_to_write(self) -> sqlite3.Connection:
        if self.path:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            if self.path.exists() and not self.path.is_file():
                raise OSError("not a regular file")
        connection = sqlite3.connect(self.path or ":memory:", isolation_level=None, timeout=60)
        connection.execute("PRAGMA trusted_schema=OFF")
        if not connection.execute("SELECT name FROM sqlite_master").fetchone():
            connection.execute("PRAGMA journal_mode=WAL")
            connection.execute("BEGIN IMMEDIATE")
            if not connection.execute("SELECT name FROM sqlite_master").fetchone():  # another process was faster
                for statement in _TABLES.values():
                    connection.execute(statement)
                first = {"version": FORMAT_VERSION, "sum": SUM_OF_NONE}
                rows = [(key, json.dumps(value)) for key, value in first.items()]
                connection.executemany("INSERT INTO settings VALUES (?, ?)", rows)
            connection.execute("COMMIT")
        connection.execute("PRAGMA synchronous=NORMAL")
        return connection

    def _open_to_read(self) -> sqlite3.Connection:
        """SQLite makes files of its own beside one in WAL mode, even to read it, unless it is told that nobody writes;
        where that cannot be said and the folder cannot be written to, a copy is read."""
        assert self.path is not None
        wal = self.path.with_name(f"{self.path.name}-wal")
        live = wal.exists() and wal.stat().st_size > 0
        place = quote(str(self.path.absolute()))
        try:
            connection = sqlite3.connect(f"file:{place}?{'mode=ro' if live else 'immutable=1'}", uri=True, timeout=60)
            connection.execute("SELECT name FROM sqlite_master").fetchone()
        except sqlite3.OperationalError:
            if not live:
                raise
            self._copy = tempfile.TemporaryDirectory(prefix="bcnet-trials-")
            for file in (self.path, wal):
                shutil.copy(file, self._copy.name)
            connection = sqlite3.connect(Path(self._copy.name) / self.path.name)
        connection.execute("PRAGMA trusted_schema=OFF")
        return connection

    def _check_file(self) -> None:
        """A stranger's file may hold views that never end, or other tables."""
        with self._clear_errors("open"):
            found = self._connection.execute("SELECT name, sql FROM sqlite_master WHERE sql IS NOT NULL").fetchall()
            names = {name for name, _ in found}
            if not {"settings", "trials"} <= names:
                raise BcnetError(f"{self.path} is no file of trials: name the folder of a run, or its {TRIALS}")
            stored = dict(self._connection.execute("SELECT key, value FROM settings WHERE key = 'version'").fetchall())
        if stored.get("version") != str(FORMAT_VERSION):
            version = stored.get("version", "unknown")
            raise BcnetError(
                f"the trials in {self.path} have format version {version!s:.20}, but this bcnet reads "
                f"{FORMAT_VERSION}: use the bcnet that made them, or search in another folder"
            )
        if dict(found) != _TABLES:
            raise self._damaged("it holds other tables")

    def __enter__(self) -> TrialStore:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        self._connection.close()
        if self._copy is not None:
            self._copy.cleanup()

    def claim(self, settings: dict[str, Any]) -> None:
        """Make this the store of a search with ``settings``; a store of another search is refused."""
        rows = [(key, json.dumps(value, sort_keys=True)) for key, value in settings.items()]
        with self._clear_errors("write"), self._transaction():
            known = {key for key, _ in self._connection.execute("SELECT key, value FROM settings").fetchall()}
            new = [row for row in rows if row[0] not in known]
            self._connection.executemany("INSERT INTO settings VALUES (?, ?)", new)
            self._add_to_sum([row_digest(row) for row in new])
        stored = self.settings()
        for key, value in rows:
            if json.dumps(stored.get(key), sort_keys=True) != value:
                raise BcnetError(
                    f"{self.path} holds a search with another {key} "
                    f"({stored.get(key)!r:.60}, not {settings[key]!r:.60}): "
                    f"use the same settings to resume it, or another folder"
                )

    def settings(self) -> dict[str, Any]:
        """What :meth:`claim` stored."""
        rows = self._whole()[0]
        try:
            return {str(key): json.loads(value) for key, value in rows if key not in ("version", "sum")}
        except (TypeError, RecursionError, ValueError):
            raise self._damaged("its settings cannot be read") from None

    def add(self, trials: Iterable[Trial]) -> None:
        """Store trials, all or none; they are on disk when this returns."""
        rows = [packed(trial, time.time()) for trial in trials]
        with self._clear_errors("write"), self._transaction():
            whole = [(*row, row_digest(row)) for row in rows]
            self._connection.executemany("INSERT INTO trials VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)", whole)
            self._add_to_sum([row[-1] for row in whole])

    def trials(self) -> list[Trial]:
        """All trials in order of their number; a :class:`DamagedTrials` where they are not those that were stored."""
        rows = self._whole()[1]
        try:
            return [unpacked(row) for row in rows]
        except ValueError as error:
            raise self._damaged(str(error)) from None

    def _whole(self) -> tuple[list[Any], list[Any]]:
        """The rows of both tables, held against their digests."""
        with self._clear_errors("read"):
            self._connection.execute("BEGIN")  # one moment of the file, while others write
            try:
                settings = self._connection.execute("SELECT key, value FROM settings").fetchall()
                trials = self._connection.execute("SELECT * FROM trials ORDER BY number").fetchall()
                expected = self._sum()
            finally:
                self._connection.execute("COMMIT")
        digests = [row_digest(row) for row in settings if row[0] not in ("version", "sum")]
        for *row, digest in trials:
            digests.append(row_digest(row))
            if digest != digests[-1]:
                raise self._damaged("a trial was changed after it was stored")
        if sum_of_digests(digests) != expected:
            raise self._damaged("rows were changed, added or removed")
        return settings, trials

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

    def _sum(self) -> str:
        row = self._connection.execute("SELECT value FROM settings WHERE key = 'sum'").fetchone()
        try:
            return sum_of_digests([json.loads(row[0])])
        except (ValueError, TypeError, RecursionError):
            raise self._damaged("the sum of its digests is missing") from None

    def _add_to_sum(self, digests: list[str]) -> None:
        total = json.dumps(sum_of_digests([self._sum(), *digests]))
        self._connection.execute("UPDATE settings SET value = ? WHERE key = 'sum'", (total,))

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        """A transaction: all of it or nothing, and nobody else in between."""
        self._connection.execute("BEGIN IMMEDIATE")
        try:
            yield
            self._connection.execute("COMMIT")
        except BaseException:
            if self._connection.in_transaction:
                self._connection.execute("ROLLBACK")
            raise

    def _damaged(self, reason: str) -> DamagedTrials:
        return DamagedTrials(f"the trials in {self.path} are damaged ({reason})")

    @contextmanager
    def _clear_errors(self, verb: str) -> Iterator[None]:
        try:
            yield
        except sqlite3.IntegrityError:
            raise BcnetError(f"another search is writing to {self.path}: let one of them end first") from None
        except (sqlite3.Error, OSError, ValueError) as error:
            if isinstance(error, BcnetError):
                raise
            reason = " ".join(str(error).split())[:120] or type(error).__name__
            if isinstance(error, ValueError) or any(words in reason for words in DAMAGE):
                raise self._damaged(reason) from None
            raise BcnetError(
                f"cannot {verb} the trials in {self.path} ({reason}): "
                f"the trials stored so far are kept; fix that and run the same search again"
            ) from None


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
