"""A run chooses the learning rate of its fine-tuning where the recipe names none."""

from __future__ import annotations

from pathlib import Path

import pytest
import tinyrun

from bcnet.errors import BcnetError
from bcnet.run.pipeline import stages_of
from bcnet.run.recipe import Recipe
from bcnet.run.report import report_data
from bcnet.run.session import Run
from bcnet.run.stages.retrain import fine_tuning
from bcnet.training.rate import FIRST, RATES

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tinyrun.trained(tmp_path_factory.mktemp("given"))
    return tinyrun.work(run, until="given").path("given.safetensors")


def test_all_networks_are_fine_tuned_at_the_best_of_the_probes(tmp_path: Path, weights: Path) -> None:
    heard = tinyrun.Notes()
    run = tinyrun.work(tinyrun.trained(tmp_path, weights), listener=heard)
    chosen = run.read("rate")
    losses = {probe["lr"]: probe["loss"] for probe in chosen["probes"]}
    assert set(losses) <= set(RATES)
    assert next(iter(losses)) == FIRST
    assert losses[chosen["lr"]] == min(loss for loss in losses.values() if loss is not None)
    for name in ("found", "uniform"):
        assert run.read(f"retrain/{name}")["history"][0]["rate"] <= chosen["lr"]
    assert fine_tuning(run)[0].optimisation.lr == chosen["lr"]
    said = f"networks are fine-tuned at a learning rate of {chosen['lr']:g}, the best of {len(losses)} probes"
    assert said in heard.notes
    facts = report_data(run).facts
    assert facts["learning rate"] == f"{chosen['lr']:g}, the best of {len(losses)} probes of {chosen['steps']} steps"
    assert "rate" in facts["time of stages"]


def test_the_choice_is_kept_and_ends_the_same_when_it_is_made_again(tmp_path: Path, weights: Path) -> None:
    run = tinyrun.work(tinyrun.trained(tmp_path, weights), until="rate")
    first = {key: run.read("rate")[key] for key in ("lr", "probes", "steps")}
    tinyrun.work(Run.open(run.folder), until="rate", again=True)
    assert {key: run.read("rate")[key] for key in first} == first
    whole = run.path("rate.json").read_bytes()
    run.path("rate.json").write_bytes(whole[:-30])
    tinyrun.work(Run.open(run.folder), until="rate")
    assert {key: run.read("rate")[key] for key in first} == first


def test_a_rate_that_is_named_is_taken(tmp_path: Path, weights: Path) -> None:
    named = tinyrun.trained(tmp_path, weights, retrain={"epochs": 4, "warmup": 0, "lr": 0.07})
    assert "rate" not in stages_of(named.recipe)
    tinyrun.work(named, until="race")
    assert not named.done("rate")
    assert fine_tuning(named)[0].optimisation.lr == 0.07


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"start": "scratch", "retrain": {"lr": None}}, "retrain.lr is null"),
        ({"given": {"lr": None}}, "given.lr is null"),
        ({"supernet": {"lr": None}}, "supernet.lr is null"),
    ],
)
def test_only_fine_tuning_chooses_its_rate(changes: dict[str, object], words: str) -> None:
    with pytest.raises(BcnetError, match=words + ", but a rate is chosen for fine-tuning only: name one, such as 0.1"):
        Recipe.parse({"model": "zoo:digits_cnn", "data": "digits", **changes})
