"""The store of trials: killed searches end as uninterrupted ones, and nothing is lost."""

from __future__ import annotations

import csv
import dataclasses
import json
import os
import signal
import sqlite3
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import numpy as np
import pytest
import terminal
from search_cases import Concave, chain

from bcnet.errors import BcnetError
from bcnet.search import SearchConfig, SearchResult, TrialStore, search
from bcnet.search.rows import row_digest, sum_of_digests
from bcnet.search.store import DamagedTrials
from bcnet.space.widths import Widths

SPACE, COSTS = chain()
SMALL = SearchConfig(evaluations=120, population=20)


def found(result: SearchResult) -> list[tuple[int, tuple[int, ...], float | None, int, str | None]]:
    return [(t.number, t.widths, t.score, t.generation, t.failure) for t in result.trials]


class Stops:
    """A scorer that is interrupted after so many scores, and fails now and then."""

    def __init__(self, after: int):
        self._left = after
        self._scorer = Concave(SPACE)

    def score(self, widths: Widths) -> float:
        if self._left == 0:
            raise KeyboardInterrupt
        self._left -= 1
        if widths[1] == widths[2] == 8:
            raise RuntimeError("sometimes")
        return self._scorer.score(widths)


@pytest.mark.parametrize("strategy", ["evolution", "random", "greedy", "legr"])
@pytest.mark.parametrize("after", [0, 1, 19, 20, 33])
def test_interrupted_search_ends_as_the_uninterrupted_one(tmp_path: Path, strategy: str, after: int) -> None:
    config = dataclasses.replace(SMALL, strategy=strategy)
    given = {"importance": [np.random.default_rng(0).random(24)] * len(SPACE)} if strategy == "legr" else {}
    whole = search(SPACE, Stops(-1), ["flops=40%"], COSTS, config, **given)
    path = tmp_path / "trials.sqlite"
    with TrialStore(path) as store, pytest.raises(KeyboardInterrupt):
        search(SPACE, Stops(after), ["flops=40%"], COSTS, config, store=store, **given)
    with TrialStore(path) as store:
        assert len(store.trials()) == after
        resumed = search(SPACE, Stops(-1), ["flops=40%"], COSTS, config, store=store, **given)
        assert found(resumed) == found(whole)
        assert resumed.hits == whole.hits
        assert [dataclasses.replace(t, seconds=0) for t in store.trials()] == [
            dataclasses.replace(t, seconds=0) for t in resumed.trials
        ]


def test_killed_process_resumes(tmp_path: Path) -> None:
    path = tmp_path / "trials.sqlite"
    program = textwrap.dedent(f"""
        import time
        from search_cases import Concave, chain
        from bcnet.search import SearchConfig, TrialStore, search
        space, costs = chain()
        scorer = Concave(space)
        def slow(widths):
            time.sleep(0.01)
            return scorer.score(widths)
        search(space, slow, ["flops=40%"], costs, SearchConfig(evaluations=120, population=20),
               store=TrialStore({str(path)!r}))
    """)
    root = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(root), str(root / "tests" / "helpers")])}
    process = subprocess.Popen([sys.executable, "-c", program], env=environment)
    deadline = time.monotonic() + 300
    count = 0
    while count < 30 and time.monotonic() < deadline and process.poll() is None:
        time.sleep(0.02)
        if path.exists():
            with TrialStore(path) as reader:
                count = len(reader.trials())
    process.send_signal(signal.SIGKILL)
    process.wait()
    with TrialStore(path) as store:
        kept = len(store.trials())
        assert 30 <= kept < 120
        scorer = Concave(SPACE)
        resumed = search(SPACE, scorer.score, ["flops=40%"], COSTS, SMALL, store=store)
    assert len(scorer.asked) == 120 - kept
    assert found(resumed) == found(search(SPACE, Concave(SPACE).score, ["flops=40%"], COSTS, SMALL))


def test_more_evaluations_go_on_with_a_finished_search(tmp_path: Path) -> None:
    with TrialStore(tmp_path / "t.sqlite") as store:
        search(SPACE, Concave(SPACE), ["flops=40%"], COSTS, dataclasses.replace(SMALL, evaluations=50), store=store)
        more = search(SPACE, Concave(SPACE), ["flops=40%"], COSTS, SMALL, store=store)
    assert found(more) == found(search(SPACE, Concave(SPACE), ["flops=40%"], COSTS, SMALL))


def test_store_of_another_search_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "trials.sqlite"
    with TrialStore(path) as store:
        search(SPACE, Concave(SPACE), ["flops=40%"], COSTS, SMALL, store=store)
        with pytest.raises(BcnetError) as error:
            search(SPACE, Concave(SPACE), ["flops=40%"], COSTS, dataclasses.replace(SMALL, seed=3), store=store)
    assert str(error.value) == (
        f"{path} holds a search with another seed (0, not 3): use the same settings to resume it, or another folder"
    )


def test_changed_scorer_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "trials.sqlite"
    trials = search(SPACE, Concave(SPACE), ["flops=40%"], COSTS, SMALL).trials
    with TrialStore(path) as store:
        store.add([dataclasses.replace(trials[3], number=1000)])
        with pytest.raises(BcnetError, match=r"^the stored trial 1000 is number 3 of this search"):
            search(SPACE, Concave(SPACE), ["flops=40%"], COSTS, SMALL, store=store)


def test_files_that_are_no_store_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "trials.sqlite"
    with pytest.raises(BcnetError, match=rf"^there are no trials at {path}: run a search there first$"):
        TrialStore(path, read_only=True)
    path.write_text("this is not a database, but it is long enough to look like one" * 20)
    with pytest.raises(DamagedTrials) as error:
        TrialStore(path)
    sentence = f"the trials in {path} are damaged (file is not a database): remove the file to search anew"
    assert str(error.value) == sentence
    path.unlink()  # as it says
    with TrialStore(path) as store:
        assert store.trials() == []
    other = tmp_path / "new.sqlite"
    with TrialStore(other) as store:
        store.claim({})
    with sqlite3.connect(other) as connection:
        connection.execute("UPDATE settings SET value = '7' WHERE key = 'version'")
    with pytest.raises(BcnetError, match=r"have format version 7, but this bcnet reads 2: use the bcnet that made"):
        TrialStore(other)
    with pytest.raises(BcnetError, match=r"^cannot open the trials in .* \(not a regular file\)"):
        TrialStore("/dev/zero")


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    path = tmp_path / "trials.sqlite"
    with TrialStore(path) as store:
        search(SPACE, Stops(-1), ["flops=40%"], COSTS, SMALL, store=store)
    return path


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ("UPDATE trials SET score = 100", "a trial was changed after it was stored"),
        ("UPDATE trials SET number = 1000 WHERE number = 3", "a trial was changed after it was stored"),
        ("DELETE FROM trials WHERE number = 119", "rows were changed, added or removed"),
        ("UPDATE settings SET value = '3' WHERE key = 'seed'", "rows were changed, added or removed"),
        ("DELETE FROM settings WHERE key = 'sum'", "the sum of its digests is missing"),
        (
            "UPDATE trials SET costs = CAST(x'ff' AS TEXT) WHERE number = 7",
            "Could not decode to UTF-8 column 'costs' with text '\ufffd'",
        ),
        ("CREATE VIEW more AS SELECT * FROM trials", "it holds other tables"),
    ],
)
def test_changed_trials_are_never_used(stored: Path, change: str, reason: str) -> None:
    with sqlite3.connect(stored) as connection:
        connection.execute(change)
    with pytest.raises(DamagedTrials) as error, TrialStore(stored) as store:
        search(SPACE, Concave(SPACE), ["flops=40%"], COSTS, SMALL, store=store)
    assert str(error.value) == f"the trials in {stored} are damaged ({reason}): remove the file to search anew"
    stored.unlink()  # the advice works
    with TrialStore(stored) as store:
        search(SPACE, Stops(-1), ["flops=40%"], COSTS, SMALL, store=store)


@pytest.mark.parametrize("column", ["widths", "costs", "score", "generation", "seconds", "failure", "feasible"])
def test_odd_cells_with_right_digests_are_one_sentence(stored: Path, column: str) -> None:
    with sqlite3.connect(stored) as connection:
        connection.execute(f"UPDATE trials SET {column} = x'00ff' WHERE number = 7")
        rows = connection.execute("SELECT * FROM trials").fetchall()
        digests = [row_digest(row[:-1]) for row in rows]
        connection.execute("UPDATE trials SET digest = ? WHERE number = 7", (digests[7],))
        settings = connection.execute("SELECT key, value FROM settings WHERE key NOT IN ('sum', 'version')").fetchall()
        total = json.dumps(sum_of_digests([*digests, *map(row_digest, settings)]))
        connection.execute("UPDATE settings SET value = ? WHERE key = 'sum'", (total,))
    with TrialStore(stored, read_only=True) as store, pytest.raises(DamagedTrials, match=rf"the {column} of "):
        store.trials()


def test_reading_changes_nothing(stored: Path) -> None:
    def files() -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in stored.parent.iterdir()}

    before = files()
    with TrialStore(stored, read_only=True) as store:
        assert len(store.trials()) == 120
        assert list(files()) == list(before)
    assert files() == before
    empty = stored.with_name("empty.sqlite")
    for content in (b"", b"SQLite format 3"):
        empty.write_bytes(content)
        with pytest.raises(BcnetError, match=r"is no file of trials|are damaged \(file is not a database\)"):
            TrialStore(empty, read_only=True)
        assert empty.read_bytes() == content
    foreign = stored.with_name("foreign.sqlite")
    with sqlite3.connect(foreign) as connection:
        connection.execute("CREATE TABLE letters (text)")
    before = files()
    shown = terminal.run("front", str(foreign))
    said = f"error: {foreign} is no file of trials: name the folder of a run, or its trials.sqlite\n"
    assert (shown.exit_code, shown.stderr) == (2, said)
    assert files() == before


def test_trials_of_a_search_at_work_are_read(stored: Path, tmp_path: Path) -> None:
    """What is in the write-ahead log counts too; where SQLite cannot make its own files beside it, a copy is read."""
    frozen = tmp_path / "frozen"
    (frozen / "trials.sqlite-shm").mkdir(parents=True)
    with TrialStore(stored) as store:
        first = store.trials()[0]
        store.add([dataclasses.replace(first, number=500, widths=(1,) * 5)])
        for path in (stored, stored.with_name("trials.sqlite-wal")):
            (frozen / path.name).write_bytes(path.read_bytes())
        with TrialStore(stored, read_only=True) as reader:
            assert len(reader.trials()) == 121
    with TrialStore(frozen / "trials.sqlite", read_only=True) as reader:
        assert len(reader.trials()) == 121


def test_folder_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(BcnetError, match=r"^cannot open the trials in .*: the trials stored so far are kept"):
        TrialStore(blocked / "run" / "trials.sqlite")


def test_full_disk_loses_nothing(tmp_path: Path) -> None:
    path = tmp_path / "trials.sqlite"
    with TrialStore(path) as store:
        store.claim({})
        pages = store._connection.execute("PRAGMA page_count").fetchone()[0]
        store._connection.execute(f"PRAGMA max_page_count = {pages + 3}")
        with pytest.raises(BcnetError) as error:
            search(SPACE, Concave(SPACE), ["flops=40%"], COSTS, SMALL, store=store)
    assert str(error.value) == (
        f"cannot write the trials in {path} (database or disk is full): "
        "the trials stored so far are kept; fix that and run the same search again"
    )
    with TrialStore(path) as store:
        assert 0 < len(store.trials()) < 120
        resumed = search(SPACE, Concave(SPACE), ["flops=40%"], COSTS, SMALL, store=store)
    assert found(resumed) == found(search(SPACE, Concave(SPACE), ["flops=40%"], COSTS, SMALL))


def test_two_searches_in_one_store_are_told_apart(tmp_path: Path) -> None:
    path = tmp_path / "trials.sqlite"
    first, second = TrialStore(path), TrialStore(path)
    trials = search(SPACE, Concave(SPACE), ["flops=40%"], COSTS, SMALL).trials
    first.add(trials[:1])
    with pytest.raises(BcnetError, match=rf"^another search is writing to {path}: let one of them end first$"):
        second.add(trials[:1])
    first.close()
    second.close()


def test_trials_are_exported(tmp_path: Path) -> None:
    with TrialStore(tmp_path / "t.sqlite") as store:
        result = search(SPACE, Stops(-1), ["flops=40%"], COSTS, SMALL, store=store)
        with store.export(tmp_path / "t.csv").open() as file:
            rows = list(csv.DictReader(file))
        assert [int(row["number"]) for row in rows] == list(range(120))
        assert [tuple(int(row[f"width.v{i}"]) for i in range(5)) for row in rows] == [t.widths for t in result.trials]
        assert [row["flops"] for row in rows] == [str(t.costs["flops"]) for t in result.trials]
        parquet = pytest.importorskip("pyarrow.parquet")
        columns = parquet.read_table(store.export(tmp_path / "t.parquet")).to_pydict()
        assert columns["score"] == [t.score for t in result.trials]
        with pytest.raises(
            BcnetError, match=r"^cannot export trials to 't.xls': its name must end in .csv or .parquet$"
        ):
            store.export(tmp_path / "t.xls")


def test_front_command(tmp_path: Path) -> None:
    with TrialStore(tmp_path / "trials.sqlite") as store:
        result = search(SPACE, Concave(SPACE), ["flops=40%"], COSTS, SMALL, store=store)
    shown = terminal.run("front", str(tmp_path), "--out", str(tmp_path / "all.csv"))
    assert shown.exit_code == 0
    assert f"{len(result.front)} on the front of 120 trials" in shown.output
    assert len((tmp_path / "all.csv").read_text().splitlines()) == 121
    told = json.loads(terminal.run("front", str(tmp_path), "--json").output)
    assert told["best"]["widths"] == list(result.best.widths if result.best else ())
    assert told["chosen"] is None
    assert len(told["front"]) == len(result.front)
    missing = terminal.run("front", str(tmp_path / "nowhere"))
    assert missing.exit_code == 2
    assert missing.stderr == f"error: there are no trials at {tmp_path / 'nowhere'}: run a search there first\n"
