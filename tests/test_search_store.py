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

import pytest
import terminal
from search_cases import Concave, chain

from bcnet.errors import BcnetError
from bcnet.search import SearchConfig, SearchResult, TrialStore, search
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


@pytest.mark.parametrize("strategy", ["evolution", "random", "greedy"])
@pytest.mark.parametrize("after", [0, 1, 19, 20, 33])
def test_interrupted_search_ends_as_the_uninterrupted_one(tmp_path: Path, strategy: str, after: int) -> None:
    config = dataclasses.replace(SMALL, strategy=strategy)
    whole = search(SPACE, Stops(-1), ["flops=40%"], COSTS, config)
    path = tmp_path / "trials.sqlite"
    with TrialStore(path) as store, pytest.raises(KeyboardInterrupt):
        search(SPACE, Stops(after), ["flops=40%"], COSTS, config, store=store)
    with TrialStore(path) as store:
        assert len(store.trials()) == after
        resumed = search(SPACE, Stops(-1), ["flops=40%"], COSTS, config, store=store)
        assert found(resumed) == found(whole)
        assert resumed.hits >= after
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
    here = Path(__file__).parent
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(here), str(here.parent)])}
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
    with TrialStore(path) as store:
        search(SPACE, Concave(SPACE), ["flops=40%"], COSTS, SMALL, store=store)
    with sqlite3.connect(path) as connection:
        connection.execute("UPDATE trials SET number = 1000 WHERE number = 3")
    with (
        TrialStore(path) as store,
        pytest.raises(BcnetError, match=r"^the stored trial 1000 is number 3 of this search"),
    ):
        search(SPACE, Concave(SPACE), ["flops=40%"], COSTS, SMALL, store=store)


def test_files_that_are_no_store_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "trials.sqlite"
    with pytest.raises(BcnetError, match=rf"^there are no trials at {path}: run a search there first$"):
        TrialStore(path, must_exist=True)
    path.write_text("this is not a database, but it is long enough to look like one" * 20)
    with pytest.raises(BcnetError) as error:
        TrialStore(path)
    assert str(error.value) == (
        f"cannot open the trials in {path} (file is not a database): "
        "the trials stored so far are kept; mend that and run the same search again"
    )
    other = tmp_path / "new.sqlite"
    with TrialStore(other) as store:
        store.claim({})
    with sqlite3.connect(other) as connection:
        connection.execute("UPDATE settings SET value = '7' WHERE key = 'version'")
    with pytest.raises(BcnetError, match=r"have format version 7, but this bcnet reads 1$"):
        TrialStore(other)


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
        "the trials stored so far are kept; mend that and run the same search again"
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
