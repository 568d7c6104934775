"""The race: how it is laid out, who wins it, and that no stop changes how it ends."""

from __future__ import annotations

import itertools
import math
import shutil
from pathlib import Path

import pytest
import tinyrun
import torch
from hypothesis import given
from hypothesis import strategies as st

from bcnet.errors import BcnetError
from bcnet.run.session import Run, facts
from bcnet.training.race import RaceConfig

pytestmark = pytest.mark.usefixtures("one_thread")

CONFIGS = st.builds(
    RaceConfig,
    finalists=st.integers(1, 40),
    rounds=st.integers(1, 8),
    epochs=st.none() | st.integers(1, 100),
)


@given(race=CONFIGS, epochs=st.integers(1, 300))
def test_milestones_rise_within_the_training(race: RaceConfig, epochs: int) -> None:
    milestones = race.milestones(epochs)
    assert milestones == sorted(set(milestones))
    assert 1 <= len(milestones) <= race.rounds
    assert milestones[0] >= 1
    assert milestones[-1] == min(race.epochs or max(1, epochs // 2), epochs)
    for shorter, longer in itertools.pairwise(milestones):
        assert longer <= 2 * shorter  # a round is about twice as long as all before it


@given(race=CONFIGS, epochs=st.integers(1, 300))
def test_the_field_halves_to_one(race: RaceConfig, epochs: int) -> None:
    alive = race.finalists
    rounds = race.milestones(epochs)
    for number in range(1, len(rounds) + 1):
        left = race.survivors(alive, last=number == len(rounds))
        assert 1 <= left <= math.ceil(alive / 2)
        alive = left
    assert alive == 1


@pytest.mark.parametrize(
    ("name", "value", "wanted"),
    [
        ("finalists", 0, "at least 1"),
        ("rounds", True, "a whole number"),
        ("epochs", -1, "at least 1"),
        ("epochs", 1.5, "a whole number"),
    ],
)
def test_a_race_that_cannot_be_run(name: str, value: object, wanted: str) -> None:
    with pytest.raises(BcnetError) as caught:
        RaceConfig(**{name: value})  # type: ignore[arg-type]
    assert str(caught.value) == f"{name} is {value!r}, but it must be {wanted}"


@pytest.fixture(scope="module")
def searched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run whose finalists are known."""
    run = tinyrun.trained(tmp_path_factory.mktemp("race"), race={"finalists": 4, "rounds": 3, "epochs": 3})
    return tinyrun.work(run, until="search").folder


def race_in(folder: Path) -> Run:
    return tinyrun.work(Run.open(folder), until="race")


@pytest.fixture(scope="module")
def raced(searched: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The race, never stopped."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    shutil.copytree(searched, folder)
    return race_in(folder)


def test_the_winner_is_the_best_of_the_last_round(raced: Run) -> None:
    result = raced.read("race")
    rounds = result["rounds"]
    last = max(row["round"] for row in rounds)
    final = [row for row in rounds if row["round"] == last]
    assert result["winner"] == min(final, key=lambda row: row["loss"])["name"]
    assert len(result["finalists"]) == len([row for row in rounds if row["round"] == 1])
    for number in range(1, last):
        here = sorted((row["loss"], row["name"]) for row in rounds if row["round"] == number)
        after = {row["name"] for row in rounds if row["round"] == number + 1}
        assert after == {name for _, name in here[: len(after)]}


def test_the_winner_is_trained_to_the_end_and_found(raced: Run) -> None:
    tinyrun.work(raced, until="retrain")
    result = raced.read("race")
    found = raced.read("retrain/found")
    assert len(result["history"]) == raced.recipe.retrain.epochs
    assert (found["finalist"], found["widths"]) == (result["winner"], result["finalists"][result["winner"]])
    for name, tensor in raced.tensors("race").items():
        assert torch.equal(tensor, raced.tensors("retrain/found")[name])
    assert not raced.path("checkpoints", "race").exists()


def test_every_stop_ends_the_same(searched: Path, raced: Run, tmp_path: Path) -> None:
    """Twenty stops, each some steps after the one before: bit for bit the race that was never stopped."""
    folder = tmp_path / "run"
    shutil.copytree(searched, folder)
    run = Run.open(folder)
    stops = 0
    for number in [1, 2] * 10:
        try:
            tinyrun.work(run, until="race", listener=tinyrun.StopAt(number))
        except tinyrun.Stopped:
            stops += 1
        if stops % 7 == 0:
            run = Run.open(folder)  # as another process would
    assert stops == 20
    tinyrun.work(run, until="race")
    mine, theirs = run.read("race"), raced.read("race")
    for key in ("winner", "finalists", "rounds", "history"):
        assert mine[key] == theirs[key]
    for name, tensor in raced.tensors("race").items():
        assert torch.equal(run.tensors("race")[name], tensor)


def test_one_finalist_needs_no_rounds(searched: Path, tmp_path: Path) -> None:
    run = _changed(searched, tmp_path, race={"finalists": 1})
    notes = tinyrun.Notes()
    tinyrun.work(run, until="race", listener=notes)
    result = run.read("race")
    assert result["winner"] == "search"
    assert result["rounds"] == []
    assert notes.notes[-1] == "there is one finalist, so there is nothing to race against"


def test_without_a_race_the_search_decides(searched: Path, tmp_path: Path) -> None:
    run = _changed(searched, tmp_path, race=None)
    tinyrun.work(run, until="retrain")
    assert not run.done("race")
    assert run.read("retrain/found")["widths"] == run.read("search")["best"]["widths"]


def _changed(searched: Path, tmp_path: Path, **changes: object) -> Run:
    """A run by the recipe of ``searched`` with some keys changed; it is a new one, as a run keeps to its recipe."""
    recipe = Run.open(searched).recipe.changed(**changes)
    return Run.create(tmp_path / "run", recipe, facts(["test"], recipe, "cpu"))
