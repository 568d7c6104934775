"""Ablations of the search by looking up: what a search sees is not what judges it, and pages say what rows say."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
from synthetic_table import FILE, SPACE

from bcnet.bench.table import ChannelBench

FOLDER = str(Path(__file__).parents[2] / "benchmarks")
sys.path.insert(0, FOLDER)
import table_ablations as ablations  # noqa: E402

sys.path.remove(FOLDER)


@pytest.fixture(scope="module")
def table() -> ChannelBench:
    return ChannelBench.load(SPACE, FILE)


def test_the_run_that_is_seen_does_not_judge(table: ChannelBench) -> None:
    for seed in range(3):
        scores = ablations.Scores(table, seed)
        others = [run for run in range(3) if run != seed]
        assert np.array_equal(scores.values, table.acc[:, seed])
        assert np.allclose(scores.judged, table.acc[:, others].mean(axis=1))
        log = scores.log(5)
        assert np.all(np.diff(log.losses) >= 0)
        assert len(log.widths) == 5


def test_rows_are_made_once_and_become_a_page(table: ChannelBench, tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    data = ablations.measure({table.space.name: table}, 2, file)
    assert len(data["rows"]) == 2 * len(ablations.SEARCHES) * len(ablations.SHARES)
    again = ablations.measure({table.space.name: table}, 2, file)
    assert again["rows"] == data["rows"]
    lines = ablations.variants(data["rows"], 2)
    random = [line["accuracy"] for line in lines if line["variant"] == "random"]
    mine = [r["judged"][-1] for r in data["rows"] if (r["search"], r["seed"]) == ("random", 0)]
    assert random[0] == pytest.approx(np.mean(mine))
    text = ablations.page(data)
    assert f"| | random | {np.mean(random):.3f} ±" in text.replace("|  |", "| |")
    assert "It has not been run yet." in ablations.page({"rows": []})
