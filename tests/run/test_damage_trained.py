"""What was damaged of a run from a trained network, of its race and of its targets is made again as it was."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tinyrun
from test_damage import flip

from bcnet.errors import BcnetError
from bcnet.run.folder import DamagedResult
from bcnet.run.pipeline import pick
from bcnet.run.session import Run
from bcnet.run.targets import targets_of

SETTINGS: dict[str, Any] = {
    "start": "trained",
    "given": {"epochs": 3},
    "healing": {"steps": 1, "calibration": 1},
    "search": {"evaluations": 6, "population": 3},
    "race": {"finalists": 2, "rounds": 1},
    "compare": ["uniform"],
}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tinyrun.work(tinyrun.create(tmp_path_factory.mktemp("trained"), **SETTINGS), until="report").folder


@pytest.fixture(scope="module")
def with_targets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    budgets = ["flops=60%", "flops=40%"]
    run = tinyrun.create(tmp_path_factory.mktemp("targets"), **SETTINGS, targets=budgets, budgets=budgets[:1])
    return tinyrun.work(run, until="report").folder


def copied(folder: Path, tmp_path: Path) -> Run:
    shutil.copytree(folder, tmp_path / "run")
    return Run(tmp_path / "run")


def resumed(run: Run) -> tuple[list[str], list[str]]:
    """The stages of a run that is taken up again, and its notes on what is done again."""
    notes = tinyrun.Notes()
    tinyrun.work(Run(run.folder), "report", notes)
    return notes.stages, [note for note in notes.notes if "done again" in note]


LATER = ["compare", "export", "report"]


@pytest.mark.parametrize(
    ("file", "damage", "stages"),
    [
        ("given.safetensors", flip, ["given", "search", "rate", "race", "retrain", *LATER]),
        ("given.json", flip, ["given", "search", "rate", "race", "retrain", *LATER]),
        ("rate.json", flip, ["rate", "race", "retrain", *LATER]),
        ("race.safetensors", flip, ["race", "retrain", *LATER]),
        ("race/1-*.json", flip, ["race", "retrain", *LATER]),
        ("race/1-*.json", os.unlink, ["race", "retrain", *LATER]),
        ("retrain.json", flip, ["retrain", *LATER]),
    ],
)
def test_a_trained_run(
    finished: Path, tmp_path: Path, file: str, damage: Callable[[Path], Any], stages: list[str]
) -> None:
    run = copied(finished, tmp_path)
    path = sorted(run.folder.glob(file))[0]
    damage(path)
    done, notes = resumed(run)
    assert done == stages
    assert len(notes) == 1
    assert notes[0].startswith(f"{path} is damaged (")
    assert tinyrun.outcome(run.folder) == tinyrun.outcome(finished)
    assert resumed(run) == ([], [])


def test_a_damaged_doubt_does_not_stop_a_search(finished: Path, tmp_path: Path) -> None:
    """It is kept only while a search is under way."""
    run = tinyrun.create(tmp_path, **SETTINGS, fallback=True)
    tinyrun.work(run, until="given")
    run.write("search/doubt", {"ranked_by": "loss", "note": ""})
    run.path("search", "doubt.json").write_text("{")
    done, notes = resumed(run)
    assert done[0] == "search"
    assert notes == [f"{run.path('search', 'doubt.json')} is damaged (it cannot be read): search is done again"]


def outcomes(folder: Path) -> list[Any]:
    return [tinyrun.outcome(target) for target in targets_of(Run(folder))]


@pytest.mark.parametrize(
    ("file", "damage"),
    [
        ("targets/flops-40pc/retrain/found.safetensors", flip),
        ("targets/flops-40pc/trials.sqlite", os.unlink),
        ("targets/flops-40pc/run.json", flip),
        ("targets/flops-40pc/report.json", os.unlink),
        ("targets/flops-60pc", shutil.rmtree),
        ("targets.json", flip),
    ],
)
def test_targets(with_targets: Path, tmp_path: Path, file: str, damage: Callable[[Path], Any]) -> None:
    """Resuming the parent makes again what one of its targets lost; what the other has is kept."""
    run = copied(with_targets, tmp_path)
    kept = run.path("given.json").stat().st_mtime_ns
    damage(run.path(*file.split("/")))
    done, notes = resumed(run)
    assert (done[0], done[-1]) == ("targets", "report")
    assert "given" not in done
    assert notes
    assert outcomes(run.folder) == outcomes(with_targets)
    assert run.path("given.json").stat().st_mtime_ns == kept
    assert resumed(run) == ([], [])


def test_what_targets_share_takes_all_of_them_along(with_targets: Path, tmp_path: Path) -> None:
    run = copied(with_targets, tmp_path)
    flip(run.path("given.safetensors"))
    done, notes = resumed(run)
    assert done[:2] == ["given", "targets"]
    assert notes[0].endswith(": given is done again, and so is what follows from it")
    assert outcomes(run.folder) == outcomes(with_targets)


def test_a_pick_says_what_is_damaged_and_resuming_helps(finished: Path, tmp_path: Path) -> None:
    run = copied(finished, tmp_path)
    flip(run.path("given.safetensors"))
    with pytest.raises(DamagedResult, match=r"given.safetensors is damaged .*: resume the run to have it made again$"):
        pick(run, "flops=40%")
    resumed(run)
    target = pick(Run(run.folder), "flops=40%")
    chosen = tinyrun.outcome(target.folder)
    flip(target.path("search.json"))
    again = pick(Run(run.folder), "flops=40%")
    assert again.read("search")["evaluations"] == 0  # chosen from what is known, not searched
    assert tinyrun.outcome(again.folder) == chosen


def test_results_of_another_target_are_not_used(with_targets: Path, tmp_path: Path) -> None:
    run = copied(with_targets, tmp_path)
    one, other = (run.path("targets", name, "search.json") for name in ("flops-40pc", "flops-60pc"))
    shutil.copy(one, other)
    with pytest.raises(BcnetError, match=r"it was made by another recipe"):
        Run(other.parent).read("search")
    resumed(run)
    assert outcomes(run.folder) == outcomes(with_targets)
