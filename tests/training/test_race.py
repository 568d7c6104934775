"""The race: how it is laid out, who wins it, and that no stop changes how it ends."""

from __future__ import annotations

import itertools
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tinyrun
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from bcnet.data.source import from_loaders
from bcnet.errors import BcnetError
from bcnet.run.session import Run, facts
from bcnet.training.optim import Optimisation
from bcnet.training.race import Finalist, RaceConfig, Racing
from bcnet.training.retraining import Retraining

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
    assert milestones[-1] == min(race.epochs or max(1, epochs // 4), epochs)
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


def test_the_work_of_a_race() -> None:
    """Six for an epoch, three for one more, two for two more, and the winner's last twelve."""
    assert RaceConfig(finalists=6, rounds=3).work(16) == (6 + 3 + 2 * 2 + 12, 6 + 3 + 2)


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


def test_the_winner_is_the_first_of_those_that_none_beats_in_the_last_round(raced: Run) -> None:
    result = raced.read("race")
    rounds = result["rounds"]
    last = max(row["round"] for row in rounds)
    final = sorted((row for row in rounds if row["round"] == last), key=lambda row: row["loss"])
    close = {row["name"] for row in final if not _clearly_worse(row, final[0], 1)}
    assert result["winner"] == next(name for name in result["finalists"] if name in close)
    assert len(result["finalists"]) == len([row for row in rounds if row["round"] == 1])
    for number in range(1, last):
        here = sorted((row for row in rounds if row["round"] == number), key=lambda row: row["loss"])
        after = {row["name"] for row in rounds if row["round"] == number + 1}
        half = math.ceil(len(here) / 2)
        assert {row["name"] for row in here[:half]} <= after
        for row in here[half:]:
            assert (row["name"] in after) != _clearly_worse(row, here[half - 1])


def _clearly_worse(one: dict[str, Any], other: dict[str, Any], errors: float = 2) -> bool:
    difference = np.array(one["parts"]) - np.array(other["parts"])
    return bool(difference.mean() > errors * difference.std(ddof=1) / len(difference) ** 0.5)


class _Nowhere:
    """Results that are not kept."""

    def known(self, name: str) -> None:
        return None

    def keep(self, name: str, result: dict[str, Any]) -> None:
        pass


def _classifier(bias: float) -> nn.Module:
    """A network that answers by the sign of its input, the surer the larger ``bias``."""
    network = nn.Linear(1, 2)
    with torch.no_grad():
        network.weight.copy_(torch.tensor([[-bias], [bias]]))
        network.bias.zero_()
    return network


@pytest.mark.parametrize(
    ("first", "second", "rounds", "wins"),
    [
        (1.0, 1.001, 2, "first"),  # too close to call, so the first of them
        (0.7, 0.9, 2, "first"),  # it has the higher loss, but by less than a standard error
        (1.0, 0.9, 2, "second"),  # by more than one, but less than two
        (1.0, 0.2, 1, "first"),
        (0.2, 1.0, 1, "second"),
    ],
)
def test_a_finalist_leaves_only_when_it_is_worse_by_more_than_chance(
    tmp_path: Path, first: float, second: float, rounds: int, wins: str
) -> None:
    torch.manual_seed(0)
    x = torch.randn(400, 1)
    y = ((x[:, 0] + torch.randn(400)) > 0).long()
    batches = [(x[:200], y[:200]), (x[200:], y[200:])]
    still = Retraining(Optimisation(epochs=2, lr=1e-9, warmup=0.0))
    racing = Racing(RaceConfig(finalists=2, rounds=2, epochs=2), from_loaders(batches, batches), still)
    entries = [Finalist("first", lambda: _classifier(first)), Finalist("second", lambda: _classifier(second))]
    winner = racing.run(entries, tmp_path, _Nowhere())
    assert [len(entry.rounds) for entry in entries] == [rounds, rounds]  # alone, a finalist needs no further round
    assert winner.name == wins
    assert len(entries[0].rounds[0]["parts"]) >= 40


def test_the_winner_is_trained_to_the_end_and_found(raced: Run) -> None:
    tinyrun.work(raced, until="retrain")
    result = raced.read("race")
    found = raced.read("retrain/found")
    assert len(result["history"]) == raced.recipe.retrain.epochs
    seen = [row["epochs"] for row in (*result["rounds"], *result["curve"]) if row["name"] == result["winner"]]
    assert sorted(seen) == list(range(1, raced.recipe.retrain.epochs))  # the last is in retrain/found.json
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
    assert result["winner"] == "mean-of-best"
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
