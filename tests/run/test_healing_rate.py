"""The rate at which cut networks are fine-tuned before they are scored, where a recipe names none."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import tinyrun

from bcnet.run.session import Run
from bcnet.run.stages.scoring import HEALING, RATES, cut_scorer

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tinyrun.trained(tmp_path_factory.mktemp("given"))
    return tinyrun.work(run, until="given").path("given.safetensors")


def begun(folder: Path, weights: Path, **healing: float) -> Run:
    folder.mkdir(exist_ok=True)
    run = tinyrun.trained(folder, weights, healing={"steps": 4, "calibration": 2, **healing})
    return tinyrun.work(run, until="given")


def uniform_loss(run: Run) -> float:
    return -float(cut_scorer(run, "steps").parts(run.constraints.uniform(), "loss").mean())


def test_no_other_rate_leaves_a_lower_loss(tmp_path: Path, weights: Path) -> None:
    chosen = begun(tmp_path / "chosen", weights)
    losses = {rate: uniform_loss(begun(tmp_path / str(rate), weights, lr=rate)) for rate in RATES}
    assert uniform_loss(chosen) == min(losses.values())
    assert losses[chosen.read(HEALING)["lr"]] == min(losses.values())
    assert len(set(losses.values())) == len(RATES)  # the rate matters here


def test_a_search_says_how_it_healed_and_a_stopped_one_goes_on_so(tmp_path: Path, weights: Path) -> None:
    run = begun(tmp_path / "whole", weights)
    tinyrun.work(run, until="search")
    (note,) = [note for note in run.read("search")["notes"] if note.startswith("healing")]
    words = r"healing at (\S+), the best of 4 rates, takes uniform widths from a loss of \S+ to \S+( .*)?"
    found = re.fullmatch(words, note.replace(", so it does harm", " so it does harm"))
    assert found
    assert float(found[1]) in RATES
    assert not run.done(HEALING)  # it is kept only while a search is under way

    stopped = begun(tmp_path / "stopped", weights)
    other = next(rate for rate in RATES if rate != float(found[1]))
    stopped.write(HEALING, {"lr": other, "note": "healing as before"})
    tinyrun.work(stopped, until="search")
    assert "healing as before" in stopped.read("search")["notes"]
    assert stopped.read("search")["best"]["score"] != run.read("search")["best"]["score"]


def test_a_rate_that_is_named_is_taken(tmp_path: Path, weights: Path) -> None:
    run = begun(tmp_path, weights, lr=0.03)
    assert cut_scorer(run, "steps").healing.optimisation.lr == 0.03
    tinyrun.work(run, until="search")
    assert not [note for note in run.read("search")["notes"] if note.startswith("healing")]
