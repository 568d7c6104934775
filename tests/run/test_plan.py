"""What a plan says of the time that a run spends on choosing widths and on training them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import tinyrun

from bcnet.run.plan import RunPlan, make_plan

pytestmark = pytest.mark.usefixtures("one_thread")
SLOW = {
    "healing": {"steps": 30, "calibration": 2},
    "search": {"evaluations": 60},
    "retrain": {"epochs": 1, "warmup": 0},
}


def plan(folder: Path, **changes: Any) -> RunPlan:
    folder.mkdir(exist_ok=True)
    return make_plan(tinyrun.work(tinyrun.trained(folder, **changes), until="trace"))


def test_much_choosing_before_little_training_is_told(tmp_path: Path) -> None:
    advice = plan(tmp_path, **SLOW).advice
    told = re.fullmatch(
        r"choosing widths takes (\d+) times as long as fine-tuning the network that ships: (\d+) epochs for uniform "
        r"widths take as long and may give more \(allot: uniform, retrain.epochs: (\d+)\)",
        advice,
    )
    assert told is not None, advice
    times, epochs, again = map(int, told.groups())
    assert times >= 2
    assert epochs == again >= times  # one epoch was asked for


@pytest.mark.parametrize(
    "changes",
    [
        {**SLOW, "retrain": {"epochs": 1000, "warmup": 0}},
        {**SLOW, "allot": "uniform", "retrain": {"epochs": 8, "warmup": 0}},
    ],
)
def test_runs_that_mostly_train_get_no_advice(tmp_path: Path, changes: dict[str, Any]) -> None:
    assert plan(tmp_path, **changes).advice == ""


def test_a_search_that_is_over_is_not_advised_against(tmp_path: Path) -> None:
    run = tinyrun.work(tinyrun.trained(tmp_path, **SLOW), until="search")
    assert run.done("search")
    assert make_plan(run).advice == ""


def test_widths_that_are_asked_for_take_no_search_and_no_race(tmp_path: Path) -> None:
    retrain = {"epochs": 8, "warmup": 0}
    searched = plan(tmp_path / "searched", retrain=retrain).seconds
    asked = plan(tmp_path / "asked", retrain=retrain, allot="uniform").seconds
    assert searched["search"] > 0
    assert searched["race"] > 0
    assert asked["search"] == 0
    assert "race" not in asked
    assert asked["retrain"] > 0
