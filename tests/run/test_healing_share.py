"""A search heals for no longer than the network that ships is fine-tuned, unless its recipe says otherwise."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tinyrun
from hypothesis import given
from hypothesis import strategies as st

from bcnet.errors import BcnetError
from bcnet.run.plan import make_plan
from bcnet.run.recipe import Recipe
from bcnet.run.session import Run
from bcnet.run.targets import FOLDER
from bcnet.search import Trial, TrialStore

pytestmark = pytest.mark.usefixtures("one_thread")

STEPS, EPOCHS, ASKED = 2, 4, 20
SEARCH = {"strategy": "enumerate", "evaluations": ASKED, "population": 3}
"""Asks for more than can be healed in the steps of four epochs; there are more within 90 % of the FLOPs, too."""

counts = st.integers(1, 500)


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tinyrun.trained(tmp_path_factory.mktemp("given"))
    return tinyrun.work(run, until="given").path("given.safetensors")


def begin(folder: Path, weights: Path, share: float | None = None, **changes: Any) -> Run:
    healing = {"steps": STEPS, "calibration": 2, "lr": 0.01, **({} if share is None else {"share": share})}
    usual = {"healing": healing, "search": SEARCH, "budgets": ["flops=90%"]}
    folder.mkdir(exist_ok=True)
    return tinyrun.trained(folder, weights, **{**usual, **changes})


def trials(run: Run) -> list[Trial]:
    with TrialStore(run.path("trials.sqlite"), read_only=True) as store:
        return list(store.trials())


def scores(run: Run) -> list[tuple[tuple[int, ...], float | None]]:
    return [(trial.widths, trial.score) for trial in trials(run)]


def bounds(run: Run) -> list[str]:
    return [note for note in run.read("search")["notes"] if "healing.share" in note]


def recipe(epochs: int, steps: int, share: float, evaluations: int, population: int, **changes: Any) -> Recipe:
    groups = {
        "retrain": {"epochs": epochs, "warmup": 0},
        "healing": {"steps": steps, "share": share},
        "search": {"evaluations": evaluations, "population": population},
    }
    return Recipe.parse({"model": "zoo:digits_cnn", "data": "digits", **groups, **changes})


@given(counts, counts, counts, st.floats(0, allow_infinity=False), counts, st.integers(2, 60))
def test_healing_takes_the_share_of_fine_tuning_that_is_allowed(
    epochs: int, batches: int, steps: int, share: float, evaluations: int, population: int
) -> None:
    settings = epochs, steps, share, evaluations, population
    most = recipe(*settings).most_scored(batches)
    assert min(evaluations, population) <= most <= evaluations
    allowed = share * epochs * batches
    if share == 0:
        assert most == evaluations
    elif most > population:
        assert most * steps <= allowed * (1 + 1e-9)
    if population <= most < evaluations:  # and no fewer than are allowed
        assert (most + 1) * steps > allowed * (1 - 1e-9)
    assert recipe(epochs + 1, *settings[1:]).most_scored(batches) >= most
    for unhealed in ({"score": "cut"}, {"score": "supernet"}, {"start": "scratch"}):
        assert recipe(*settings, **unhealed).most_scored(batches) == evaluations


def test_a_search_scores_what_it_may_and_says_so(tmp_path: Path, weights: Path) -> None:
    run, heard = begin(tmp_path, weights), tinyrun.Notes()
    tinyrun.work(run, until="search", listener=heard)
    tuning = EPOCHS * len(run.data.train)
    assert len(trials(run)) == run.read("search")["evaluations"] == tuning // STEPS < ASKED
    (note,) = bounds(run)
    assert note == (
        f"the search scores at most {tuning // STEPS} configurations instead of {ASKED}, because {STEPS} steps heal "
        f"each of them and fine-tuning the network that ships takes {tuning} (healing.share: 1): for more, set "
        "healing.share: 0 or raise retrain.epochs"
    )
    assert heard.notes.count(note) == 1


@pytest.mark.parametrize("way_out", [{"share": 0}, {"retrain": {"epochs": 3 * EPOCHS, "warmup": 0}}])
def test_the_advice_is_followed(tmp_path: Path, weights: Path, way_out: dict[str, Any]) -> None:
    run = tinyrun.work(begin(tmp_path, weights, **way_out), until="search")
    assert len(trials(run)) == ASKED
    assert not bounds(run)


def test_a_bounded_search_that_was_stopped_goes_on_as_it_was(tmp_path: Path, weights: Path) -> None:
    whole = tinyrun.work(begin(tmp_path / "whole", weights), until="search")
    stopped = begin(tmp_path / "stopped", weights)
    tinyrun.work(stopped, until="given")
    with pytest.raises(tinyrun.Stopped):
        tinyrun.work(stopped, until="search", listener=tinyrun.StopAt(4))
    assert 0 < len(trials(stopped)) < len(trials(whole))
    again = tinyrun.work(Run(stopped.folder, "cpu"), until="search")
    assert scores(again) == scores(whole)
    assert again.read("search")["best"]["widths"] == whole.read("search")["best"]["widths"]
    assert bounds(again) == bounds(whole) != []


def test_every_target_has_a_fine_tuning_of_its_own(tmp_path: Path, weights: Path) -> None:
    targets = ["flops=90%", "flops=80%"]
    run = begin(tmp_path, weights, share=0.5, budgets=targets[:1], targets=targets, race=None, compare=[])
    tinyrun.work(run, until="targets")
    for folder in run.path(FOLDER).iterdir():
        target = Run.open(folder)
        assert len(trials(target)) == EPOCHS * len(run.data.train) // 2 // STEPS
        assert len(bounds(target)) == 1


def test_a_plan_knows_the_bound(tmp_path: Path, weights: Path) -> None:
    asked = {"search": {**SEARCH, "evaluations": 49}}

    def planned(name: str, share: float) -> float:
        run = tinyrun.work(begin(tmp_path / name, weights, share, **asked), until="trace")
        return make_plan(run).seconds["search"]

    assert planned("bounded", 0.01) < planned("unbounded", 0)


@pytest.mark.parametrize("share", [-0.5, float("nan"), float("inf")])
def test_shares_that_mean_nothing_are_refused(share: float) -> None:
    with pytest.raises(BcnetError, match=r"^healing.share is \S+, but it must be (at least 0|a finite number)$"):
        recipe(1, 1, share, 10, 2)
