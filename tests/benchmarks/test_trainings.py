"""Benchmarks that train many networks: rows as they come, nothing twice, nothing too late; which entries they are."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from bench_tables import RELEASED, needs_released

from bcnet.bench.table import ChannelBench

FOLDER = str(Path(__file__).parents[2] / "benchmarks")
sys.path.insert(0, FOLDER)
import retrain_entries  # noqa: E402
import trainings  # noqa: E402

sys.path.remove(FOLDER)
RECIPE = {"epochs": 2, "lr": 0.1}


def jobs(count: int) -> list[trainings.Job]:
    return [trainings.Job({"number": n}, "zoo:digits_cnn", (8, 16 - n, 8, 8, 16), n, RECIPE) for n in range(count)]


@pytest.fixture
def setting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(FOLDER)  # what processes that are begun inherit

    def made(**given: Any) -> trainings.Setting:
        return trainings.Setting("digits", tmp_path / "rows.jsonl", batch=64, **given)

    return made


def test_networks_are_trained_side_by_side_as_alone_and_once(setting: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainings, "WORTH", 0.0)  # both processes, however slow
    two = setting(processes=2)
    assert trainings.train_all(jobs(2), two)
    rows = trainings.known(two.out)
    assert [row["processes"] for row in rows if "throughput" in row] == [1, 2]
    found = {row["number"]: row for row in rows if "number" in row}
    assert sorted(found) == [0, 1]
    for number, row in found.items():
        assert row["widths"] == [8, 16 - number, 8, 8, 16]
        assert row["best"] == max(row["tested"]) >= row["last"] == row["tested"][-1] > 20
        assert len(row["tested"]) == 2
        assert row["processes"] == 2
        assert 0 < row["flops"] < found[0]["flops"] + 1
    alone = setting()
    assert trainings.train_all(jobs(2), alone)
    assert trainings.known(alone.out) == rows  # nothing was left to do
    alone.out.unlink()
    assert trainings.train_all(jobs(1), alone)
    assert trainings.known(alone.out)[0]["tested"] == found[0]["tested"]  # however many are trained at once


def test_without_time_nothing_is_written_and_failures_are_told(setting: Any, capfd: Any) -> None:
    late = setting(seconds=0.0)
    assert trainings.train_all(jobs(1), late)
    assert trainings.known(late.out) == []
    assert "1 networks were not begun" in capfd.readouterr().out
    missing = trainings.Setting("cifar10:nowhere", late.out)
    assert not trainings.train_all(jobs(1), missing)
    assert "nowhere" in capfd.readouterr().out
    wrong = trainings.Job({"number": 0}, "zoo:digits_cnn", (8, 8), 0, RECIPE)
    assert not trainings.train_all([wrong, *jobs(2)[1:]], setting())
    assert [row["number"] for row in trainings.known(late.out)] == [1]
    assert "{'number': 0}: BcnetError" in capfd.readouterr().out


@needs_released
def test_entries_are_those_of_the_rule_and_spread() -> None:
    for name, keys in retrain_entries.ENTRIES.items():
        table = ChannelBench.load(name, RELEASED)
        assert retrain_entries.drawn(table) == keys
        first = table.query(keys[0]).acc[0], table.query(keys[1]).acc[0], table.query(keys[2]).acc[0]
        assert first[0] < first[2] < first[1]
        job = next(j for j in retrain_entries.jobs(60) if j.place == {"space": name, "key": keys[0], "number": 0})
        assert np.array_equal(table.query(keys[0]).widths, job.widths)


@needs_released
def test_what_is_judged_is_the_gap_to_runs_that_entries_were_not_drawn_by() -> None:
    table = ChannelBench.load("resnet", RELEASED)
    keys = retrain_entries.ENTRIES["resnet"][:5]
    rows = []
    for number, key in enumerate(keys):
        other = float(table.query(key).acc[1:].mean())
        facts = {"date": "2026-11-17", "machine": "a GPU", "versions": {"torch": "2.11"}, "commit": "abc"}
        figures = {"best": other + 0.5, "last": other - 1, "ms_a_step": 2.0, "engine": "fused", "command": "x"}
        rows.append({"space": "resnet", "key": key, "number": number, **figures, **facts})
    found = retrain_entries.judged(rows, table)
    assert found["best"]["gap"] == pytest.approx(0.5)
    assert found["best"]["half"] == pytest.approx(0, abs=1e-9)
    assert found["best"]["kendall"] == pytest.approx(1)
    assert found["last"]["gap"] == pytest.approx(-1)
    text = retrain_entries.page([{"throughput": {}, "processes": 2, "steps_a_second": 400.0}, *rows], {"resnet": table})
    assert "| resnet | 5 | best epoch |" in text
    assert "400 with 2." in text
