"""What was changed after it was written is never used, and a run that is taken up again makes it anew."""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tinyrun
import torch

from bcnet.errors import BcnetError
from bcnet.run.folder import DamagedResult, RunFolder
from bcnet.run.recipe import Recipe
from bcnet.run.report import report_data
from bcnet.run.session import Run
from bcnet.training import checkpoint

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A whole run, to be copied."""
    return tinyrun.work(tinyrun.create(tmp_path_factory.mktemp("finished")), until="report").folder


@pytest.fixture
def copied(finished: Path, tmp_path: Path) -> Run:
    shutil.copytree(finished, tmp_path / "run")
    return Run(tmp_path / "run")


def resumed(run: Run, until: str = "report") -> tuple[list[str], list[str]]:
    """The stages and notes of a run that is taken up again."""
    notes = tinyrun.Notes()
    tinyrun.work(Run(run.folder), until, notes)
    return notes.stages, notes.notes


def flip(path: Path) -> None:
    """Change one bit, near the end, where tensors have their values."""
    data = bytearray(path.read_bytes())
    data[-9] ^= 1
    path.write_bytes(data)


def miscount(path: Path) -> None:
    """Change one digit of a stored trial."""
    data = bytearray(path.read_bytes())
    data[data.rindex(b'"flops": ') + 9] ^= 1
    path.write_bytes(data)


def piped(path: Path) -> None:
    """A pipe in the place of a file, which whoever opens it would wait for."""
    path.unlink()
    os.mkfifo(path)


def test_a_whole_run_has_nothing_to_mend(copied: Run) -> None:
    assert resumed(copied) == ([], [])


@pytest.mark.parametrize(
    ("file", "damage", "stages"),
    [
        ("retrain/found.safetensors", flip, ["retrain", "compare", "export", "report"]),
        ("retrain/found.safetensors", os.unlink, ["retrain", "compare", "export", "report"]),
        ("retrain/found.json", os.unlink, ["retrain", "compare", "export", "report"]),
        ("retrain/uniform.json", flip, ["retrain", "compare", "export", "report"]),
        ("train.safetensors", flip, ["train", "search", "retrain", "compare", "export", "report"]),
        ("search.json", flip, ["search", "retrain", "compare", "export", "report"]),
        ("trials.sqlite", os.unlink, ["search", "retrain", "compare", "export", "report"]),
        ("trials.sqlite", piped, ["search", "retrain", "compare", "export", "report"]),
        ("trials.sqlite", miscount, ["search", "retrain", "compare", "export", "report"]),
        ("compare.json", lambda path: path.write_text("[]"), ["compare", "export", "report"]),
        ("export/weights.safetensors", flip, ["export", "report"]),
        ("export/widths.json", os.unlink, ["export", "report"]),
        ("report.html", os.unlink, ["report"]),
        ("report.html", piped, ["report"]),
        ("report.json", lambda path: path.write_text("{"), ["report"]),
    ],
)
def test_what_is_damaged_is_made_again(
    finished: Path, copied: Run, file: str, damage: Callable[[Path], Any], stages: list[str]
) -> None:
    """The same run comes out, with a note on it, and in one go."""
    damage(copied.path(file))
    done, notes = resumed(copied)
    assert done == stages
    notes = [note for note in notes if "is done again" in note]
    assert len(notes) == 1
    assert notes[0].startswith(f"{copied.path(file)} is damaged (") or file == "trials.sqlite"
    follows = ", and so is what follows from it" if len(stages) > 1 else ""
    assert notes[0].endswith(f": {stages[0]} is done again{follows}")
    assert tinyrun.outcome(copied.folder) == tinyrun.outcome(finished)
    assert resumed(copied) == ([], [])


def test_a_folder_in_the_place_of_a_file_is_said_and_the_advice_works(finished: Path, copied: Run) -> None:
    """Any file of a run, the lock included; and nothing of what a user keeps in such a folder is touched."""
    for file in (path.relative_to(finished) for path in finished.rglob("*") if path.is_file()):
        place, kept = copied.path(str(file)), copied.folder.parent / "moved"
        whole = place.read_bytes()
        place.unlink()
        place.mkdir()
        (place / "notes.txt").write_text("mine")
        with pytest.raises(BcnetError, match=r"is a folder, (but|so).* move it away and resume") as caught:
            resumed(copied)
        assert str(place) in str(caught.value)
        assert (place / "notes.txt").read_text() == "mine"
        place.rename(kept)
        if file.suffix in (".html", ".yaml") or file.name == "lock":
            resumed(copied)  # made again; that other files are too has a test of its own
        else:
            place.write_bytes(whole)
        shutil.rmtree(kept)
    assert resumed(copied) == ([], [])
    assert tinyrun.outcome(copied.folder) == tinyrun.outcome(finished)


def test_networks_that_are_whole_are_not_trained_again(copied: Run) -> None:
    flip(copied.path("retrain", "found.safetensors"))
    kept = copied.path("retrain", "full.json").stat().st_mtime_ns
    resumed(copied)
    assert copied.path("retrain", "full.json").stat().st_mtime_ns == kept


def test_trials_that_were_changed_do_not_decide(finished: Path, copied: Run) -> None:
    with sqlite3.connect(copied.path("trials.sqlite")) as connection:
        connection.execute("UPDATE trials SET score = 1 WHERE number = 5")
    connection.close()
    with pytest.raises(BcnetError, match=r"are damaged \(a trial was changed after it was stored\)"):
        report_data(copied.folder)
    assert resumed(copied)[0][0] == "search"
    assert tinyrun.outcome(copied.folder) == tinyrun.outcome(finished)


def test_what_is_damaged_is_not_read(copied: Run) -> None:
    flip(copied.path("retrain", "found.safetensors"))
    with pytest.raises(DamagedResult) as caught:
        copied.network("found")
    path = copied.path("retrain", "found.safetensors")
    sentence = f"{path} is damaged (it was changed after it was written): resume the run to have it made again"
    assert str(caught.value) == sentence
    score = copied.path("compare.json")
    score.write_text(score.read_text().replace('"score": 0.', '"score": 0.9', 1))
    with pytest.raises(DamagedResult) as caught:
        copied.read("compare")
    sentence = f"{score} is damaged (it was changed after it was written): resume the run to have it made again"
    assert str(caught.value) == sentence
    with pytest.raises(BcnetError) as missing:
        copied.read("retrain/random")
    assert str(missing.value) == f"{copied.folder} has no retrain/random.json yet: resume the run to have it made"


def test_results_of_another_version_are_left_alone(copied: Run) -> None:
    path = copied.path("compare.json")
    old = json.loads(path.read_text())
    del old["integrity"]
    path.write_text(json.dumps({**old, "version": 1}))
    with pytest.raises(BcnetError) as caught:
        resumed(copied)
    assert not isinstance(caught.value, DamagedResult)
    assert str(caught.value) == (
        f"{path} has format version 1, but this bcnet reads 2: use the bcnet that made it, "
        "or begin anew in another folder"
    )


def test_a_result_of_the_wrong_structure_is_one_sentence(copied: Run) -> None:
    """Also where its digest is right, as in a file that was made to harm."""
    kept = copied.read("search")
    for change, fault in (
        ({"best": []}, "best: input should be a valid dictionary or instance of TrialRecord"),
        ({"best": {**kept["best"], "widths": [3, "x"]}}, "best.widths.1: input should be a valid integer"),
        ({"reference": {"full": float("inf")}}, "reference.full: input should be a finite number"),
        ({"notes": None}, "notes: input should be a valid list"),
    ):
        copied.write("search", {**kept, **change})
        with pytest.raises(DamagedResult) as caught:
            copied.read("search")
        assert str(caught.value) == (
            f"{copied.path('search.json')} is damaged ({fault}): resume the run to have it made again"
        )


def test_a_text_that_cannot_be_written_is_damage(copied: Run) -> None:
    """Half of a pair of surrogates, which no page or terminal can show; whole pairs are letters as others."""
    kept = copied.read("search")
    copied.write("search", {**kept, "notes": ["\U0001f600"]})
    assert copied.read("search")["notes"] == ["\U0001f600"]
    copied.write("search", {**kept, "notes": ["\ud800"]})
    with pytest.raises(DamagedResult, match=r"search.json is damaged \(it cannot be read\)"):
        copied.read("search")


def test_results_of_another_recipe_are_not_used(copied: Run, tmp_path: Path) -> None:
    elsewhere = Run.create(tmp_path / "other", copied.recipe.changed(seed=3), {})
    shutil.copy(copied.path("trace.json"), elsewhere.path("trace.json"))
    with pytest.raises(DamagedResult, match=r"trace.json is damaged \(it was made by another recipe\)"):
        elsewhere.read("trace")


@pytest.mark.parametrize("damage", [flip, os.unlink, lambda path: path.write_bytes(b"")])
@pytest.mark.parametrize("file", ["run.json", "recipe.yaml"])
def test_run_json_and_recipe_yaml_stand_in_for_each_other(
    copied: Run, file: str, damage: Callable[[Path], Any]
) -> None:
    recipe, text = copied.recipe, copied.path("recipe.yaml").read_text()
    damage(copied.path(file))
    stages, notes = resumed(copied)
    assert stages == []
    assert len(notes) == 1
    assert RunFolder.open(copied.folder).recipe == recipe
    assert copied.path("recipe.yaml").read_text() == text
    assert resumed(copied) == ([], [])


def test_an_edited_recipe_is_kept_but_not_used(copied: Run) -> None:
    path = copied.path("recipe.yaml")
    path.write_text(path.read_text().replace("seed: 0", "seed: 7"))
    assert RunFolder(copied.folder).recipe.seed == 0
    _, notes = resumed(copied)
    assert notes == [
        "recipe.yaml is not the one this run began with, which is put back; the other is kept as recipe.changed.yaml"
    ]
    assert "seed: 0" in path.read_text()
    assert "seed: 7" in copied.path("recipe.changed.yaml").read_text()


def test_without_both_a_run_cannot_go_on(copied: Run) -> None:
    copied.path("run.json").write_text("{")
    copied.path("recipe.yaml").write_text("]")
    with pytest.raises(
        BcnetError, match=rf"^neither run.json nor recipe.yaml of {copied.folder} can be read \(.*: begin"
    ):
        resumed(copied)


def test_checkpoints_that_are_all_damaged_begin_the_training_anew(finished: Path, tmp_path: Path) -> None:
    run = tinyrun.create(tmp_path)
    with pytest.raises(tinyrun.Stopped):
        tinyrun.work(run, listener=tinyrun.StopAt(6))
    for path in run.path("checkpoints", "train").glob("*/tensors.safetensors"):
        flip(path)
    _, notes = resumed(run, "retrain")
    assert notes[0].startswith(f"no checkpoint in {run.path('checkpoints', 'train')} can be read: ")
    assert notes[0].endswith("; the training begins anew")
    assert tinyrun.outcome(run.folder) == tinyrun.outcome(finished)


def test_a_folder_that_is_removed_during_training_is_noticed(tmp_path: Path) -> None:
    run = tinyrun.create(tmp_path)

    class Remove(tinyrun.Listener):
        def step(self, name: str, done: int, total: int, figures: dict[str, float]) -> None:
            if done == 3:
                shutil.rmtree(run.folder)

    with pytest.raises(BcnetError) as caught:
        tinyrun.work(run, listener=Remove())
    place = run.path("checkpoints", "train")
    assert str(caught.value) == f"{place} was removed or replaced during the training: begin it anew"
    assert not run.folder.exists()


def test_a_folder_that_is_removed_during_another_stage_is_noticed(copied: Run) -> None:
    with copied.lock():
        shutil.rmtree(copied.folder)
        with pytest.raises(BcnetError) as caught:
            copied.write("report", {"path": "report.html"})
    assert str(caught.value) == (
        f"{copied.folder} was removed or replaced while this run worked in it: begin the run anew"
    )


def test_a_removed_lock_file_lets_nobody_in(copied: Run) -> None:
    with copied.lock():
        copied.path("lock").unlink()
        with pytest.raises(BcnetError, match=r"^process unknown is working in "), Run(copied.folder).lock():
            pass
        with copied.lock():  # who holds it may take it again
            pass
        with pytest.raises(BcnetError, match=r"^process .* is working in "), Run(copied.folder).lock():
            pass
    with Run(copied.folder).lock():
        pass


def test_nobody_takes_a_run_between_its_beginning_and_its_work(tmp_path: Path) -> None:
    """A second process tries to resume the folder as soon as it appears, and must never get in."""
    folder = tmp_path / "run"
    script = textwrap.dedent("""
        import sys, time
        from pathlib import Path
        from bcnet.errors import BcnetError
        from bcnet.run.folder import RunFolder
        print("ready", flush=True)
        folder = Path(sys.argv[1])
        got_in, end = 0, time.monotonic() + 60
        while not folder.exists() and time.monotonic() < end:
            pass
        while folder.exists() and not (folder / "trace.json").exists() and time.monotonic() < end:
            try:
                with RunFolder(folder).lock():
                    got_in += (folder / "run.json").exists() and not (folder / "trace.json").exists()
            except BcnetError:
                pass
        print(got_in)
    """)
    watcher = subprocess.Popen([sys.executable, "-c", script, str(folder)], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert watcher.stdout is not None
    assert watcher.stdout.readline() == "ready\n"
    path = tinyrun.network_file(tmp_path)
    command = [sys.executable, "-m", "bcnet", "run", f"{path}:tiny", "--data", "digits", "--until", "trace"]
    for _ in range(20):  # the other may hold the lock of the folder while there is nothing in it
        done = subprocess.run([*command, "--out", str(folder)], cwd=ROOT, capture_output=True, text=True, check=False)
        if done.returncode == 0:
            break
        assert "is working in" in done.stderr
    assert watcher.communicate(timeout=120)[0] == "0\n"


def test_a_checkpoint_folder_keeps_its_place(tmp_path: Path) -> None:
    place = checkpoint.prepare(tmp_path / "a")
    checkpoint.save(tmp_path / "a", {"x": torch.ones(2)}, {}, place)
    shutil.rmtree(tmp_path / "a")
    with pytest.raises(BcnetError, match=r"was removed or replaced during the training"):
        checkpoint.save(tmp_path / "a", {"x": torch.ones(2)}, {}, place)
    assert not (tmp_path / "a").exists()


def test_a_recipe_survives_in_run_json(copied: Run) -> None:
    assert Recipe.from_yaml(copied.read("run")["recipe"]) == copied.recipe
