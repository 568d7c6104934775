"""A run from end to end: what its folder holds, that it resumes to the same end, and what it refuses."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import terminal
import tinyrun
import torch
from torch import nn

from bcnet.accel import SharedEvaluator
from bcnet.errors import BcnetError
from bcnet.run.pipeline import run_stages, stages_of
from bcnet.run.recipe import Recipe
from bcnet.run.session import Run
from bcnet.search import LogWidthModel, TrialStore
from bcnet.supernet.loss_log import LossLog

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A whole run; tests read it and change nothing."""
    folder = tmp_path_factory.mktemp("finished")
    notes = tinyrun.Notes()
    run = tinyrun.work(tinyrun.create(folder), listener=notes)
    assert notes.stages == ["trace", "train", "search", "retrain", "compare"]
    return run


def test_the_folder_holds_every_result(finished: Run) -> None:
    run = Run.open(finished.folder)
    assert run.recipe == finished.recipe
    facts = run.read("run")
    assert facts["command"] == ["test"]
    assert facts["seed"] == 0
    assert facts["versions"]["torch"].split("+")[0] == torch.__version__.split("+")[0]
    traced = run.read("trace")
    assert [v["name"] for v in traced["variables"]] == ["0", "3"]
    assert traced["widths"]["full"] == [8, 8]
    assert traced["budgets"][0]["limit"] == traced["costs"]["full"]["flops"] / 2
    train = run.read("train")
    assert [row["epoch"] for row in train["history"]] == [1, 2]
    assert train["paths"] == 4 * train["steps"]
    found = run.read("search")
    assert found["evaluations"] in (11, 12)  # what the model chose may have been scored before
    assert found["best"]["costs"]["flops"] <= traced["budgets"][0]["limit"]
    assert not run.path("checkpoints").exists()


def test_the_search_used_the_prior_and_every_trial_is_stored(finished: Run) -> None:
    found = finished.read("search")
    assert found["prior"]["sampled"] > 0
    with TrialStore(finished.path("trials.sqlite"), read_only=True) as store:
        trials = store.trials()
    assert len(trials) == found["evaluations"]
    assert list(trials[found["best"]["number"]].widths) == found["best"]["widths"]


def test_the_supernet_of_the_folder_gives_the_scores_of_the_search(finished: Run) -> None:
    torch.set_num_threads(1)
    score = SharedEvaluator(finished.supernet(), finished.data.val.batches(0), finished.task).score
    found = finished.read("search")
    assert found["ranked_by"] == "score"
    assert score(found["best"]["widths"]) == found["best"]["score"]
    assert score(finished.full) == found["reference"]["full"]


def test_the_law_of_all_scores_chose(finished: Run) -> None:
    found = finished.read("search")
    with TrialStore(finished.path("trials.sqlite")) as store:
        trials = store.trials()
    model = LogWidthModel.fit([t.widths for t in trials[:11]], [t.score for t in trials[:11]])
    assert found["log_width"]["gains"] == pytest.approx(model.gains.tolist())
    assert found["best"]["widths"] == model.best(finished.constraints).tolist()
    assert tuple(found["best"]["widths"]) in [t.widths for t in trials]


def test_front_shows_what_was_chosen(finished: Run) -> None:
    told = json.loads(terminal.run("front", str(finished.folder), "--json").output)
    assert told["chosen"] == finished.read("search")["best"]
    assert "chosen" in terminal.run("front", str(finished.folder)).output


def test_a_search_by_loss_that_takes_the_best_score(tmp_path: Path) -> None:
    run = tinyrun.create(tmp_path, rank_by="loss", search={**tinyrun.SETTINGS["search"], "choose": "score"})
    run_stages(run, until="search")
    found = run.read("search")
    assert (found["ranked_by"], found["log_width"]) == ("loss", None)
    with TrialStore(run.path("trials.sqlite")) as store:
        assert found["best"]["score"] == max(t.score for t in store.trials() if t.feasible and t.score is not None) < 0


def test_the_loss_log_of_the_folder_can_be_read(finished: Run) -> None:
    tensors = {k[4:]: t for k, t in finished.tensors("train").items() if k.startswith("log.")}
    log = LossLog.from_tensors(tensors)
    assert len(log) == finished.read("train")["paths"]


def test_networks_come_back_with_their_weights(finished: Run) -> None:
    network = finished.network("found")
    widths = finished.read("retrain/found")["widths"]
    assert [m.out_channels for m in network if isinstance(m, nn.Conv2d)] == widths
    assert not network.training
    x, y = next(iter(finished.data.test.batches(0)))
    correct = (network(x).argmax(1) == y).float().mean()
    assert float(correct) == pytest.approx(finished.read("retrain/found")["score"])


def test_the_comparison_has_a_row_for_every_network(finished: Run) -> None:
    rows = {row["name"]: row for row in finished.read("compare")["networks"]}
    assert list(rows) == ["full", "uniform", "found"]
    limit = finished.read("trace")["budgets"][0]["limit"]
    assert rows["uniform"]["costs"]["flops"] <= limit
    assert rows["found"]["costs"]["flops"] <= limit
    assert all(row["latency_ms"] > 0 and row["scored_on"] == "test" for row in rows.values())


def test_a_stage_that_is_done_is_skipped(finished: Run) -> None:
    notes = tinyrun.Notes()
    tinyrun.work(Run(finished.folder), listener=notes)
    assert notes.stages == []
    assert notes.steps == 0


def test_the_recipe_of_the_folder_repeats_the_run(finished: Run, tmp_path: Path) -> None:
    recipe = Recipe.read(finished.path("recipe.yaml"))
    again = Run.create(tmp_path / "again", recipe, {})
    tinyrun.work(again, until="retrain")
    assert tinyrun.outcome(again.folder) == tinyrun.outcome(finished.folder)


@pytest.mark.parametrize("number", [1, 6, 15, 37, 49])
def test_a_run_stopped_anywhere_ends_the_same(finished: Run, tmp_path: Path, number: int) -> None:
    run = tinyrun.create(tmp_path)
    with pytest.raises(tinyrun.Stopped):
        tinyrun.work(run, listener=tinyrun.StopAt(number))
    tinyrun.work(Run(run.folder), until="retrain")
    assert tinyrun.outcome(run.folder) == tinyrun.outcome(finished.folder)


def test_a_stage_again_forgets_those_after_it(tmp_path: Path) -> None:
    run = tinyrun.work(tinyrun.create(tmp_path), until="search")
    before = run.read("search")["best"]
    notes = tinyrun.Notes()
    tinyrun.work(Run(run.folder), until="train", listener=notes, again=True)
    assert notes.stages == ["train"]
    assert not run.done("search")
    assert not run.path("trials.sqlite").exists()
    tinyrun.work(Run(run.folder), until="search")
    assert {**run.read("search")["best"], "seconds": 0} == {**before, "seconds": 0}


def test_random_and_distillation(tmp_path: Path) -> None:
    run = tinyrun.create(
        tmp_path,
        compare=["random", "balanced"],
        random={"networks": 2, "epochs": 1},
        distillation={"alpha": 0.5, "temperature": 2.0},
        retrain={"epochs": 2, "ema": 0.9},
    )
    tinyrun.work(run)
    assert run.read("retrain")["networks"] == ["full", "balanced", "random", "found"]
    balanced = run.read("retrain/balanced")["widths"]
    assert run.constraints.feasible(np.array([balanced]))[0]
    assert balanced == LogWidthModel.balanced(run.space).best(run.constraints).tolist()
    random = run.read("retrain/random")
    assert len(random["tried"]) == 2
    best = max(random["tried"], key=lambda row: row["score"])
    assert random["widths"] == best["widths"]
    assert all(run.cost_of(row["widths"])["flops"] <= run.constraints.budgets[0].limit for row in random["tried"])


def test_a_wider_network_is_searched_around_the_given_one(tmp_path: Path) -> None:
    run = tinyrun.create(tmp_path, widen=1.5, budgets=["flops=100%"])
    tinyrun.work(run, until="search")
    assert run.space.max.tolist() == [12, 12]
    assert run.full.tolist() == [8, 8]
    full = run.read("trace")["costs"]["full"]["flops"]
    assert run.read("trace")["budgets"][0]["limit"] == pytest.approx(full)
    assert run.read("search")["best"]["costs"]["flops"] <= full
    assert [m.out_channels for m in run.fresh(np.array([10, 9])) if isinstance(m, nn.Conv2d)] == [10, 9]


def test_without_a_quadratic_budget_the_search_begins_at_random(tmp_path: Path) -> None:
    run = tinyrun.work(tinyrun.create(tmp_path, budgets=["memory=90%"]), until="search")
    found = run.read("search")
    assert found["prior"] is None
    note = "no budget is one of FLOPs or parameters, so the search began at random, without the prior"
    assert note in found["notes"]


def test_two_processes_cannot_work_in_one_folder(finished: Run) -> None:
    with finished.lock():
        with pytest.raises(BcnetError) as caught, Run(finished.folder).lock():
            pass
        sentence = (
            f"process {os.getpid()} is working in {finished.folder}: wait until it ends, or choose another folder"
        )
        assert str(caught.value) == sentence
    with Run(finished.folder).lock():
        pass


def test_a_folder_with_something_in_it_is_left_alone(finished: Run, tmp_path: Path) -> None:
    with pytest.raises(BcnetError) as caught:
        Run.create(finished.folder, finished.recipe, {})
    sentence = f"{finished.folder} holds a run already: resume it with --resume, or choose another folder"
    assert str(caught.value) == sentence
    (tmp_path / "letter.txt").write_text("dear")
    with pytest.raises(BcnetError) as caught:
        Run.create(tmp_path, finished.recipe, {})
    assert str(caught.value) == f"{tmp_path} holds other files: choose an empty folder"
    with pytest.raises(BcnetError) as caught:
        Run.open(tmp_path)
    assert str(caught.value) == f"{tmp_path} is not the folder of a run: it has neither run.json nor recipe.yaml"


def test_a_full_disk_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tinyrun.create(tmp_path)

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(BcnetError) as caught:
            tinyrun.work(run)
    sentence = f"no space is left for {run.folder}: free some and resume, what is there is kept"
    assert str(caught.value) == sentence
    assert sorted(p.name for p in run.folder.iterdir()) == ["lock", "recipe.yaml", "run.json"]
    tinyrun.work(run, until="trace")


def test_an_unknown_stage_is_refused(finished: Run) -> None:
    with pytest.raises(BcnetError) as caught:
        run_stages(finished, "trian")
    assert str(caught.value) == f"this run has no stage 'trian': it has {', '.join(stages_of(finished.recipe))}"
    with pytest.raises(BcnetError, match=r"^this run has no stage 'race': it has trace, train, search, "):
        run_stages(finished, "race")


@pytest.mark.parametrize(
    ("network", "sentence"),
    [
        (
            "nn.Sequential(nn.Conv2d(3, 8, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(1), nn.Linear(8, 10))",
            "the network does not run on inputs of shape (1, 8, 8): ",
        ),
        (
            "nn.Sequential(nn.Conv2d(1, 8, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(1), nn.Linear(8, 7))",
            "the network gives 7 logits, but the data has 10 classes: change its last layer",
        ),
        (
            "nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Conv2d(8, 10, 3))",
            "the network gives a tensor of float32 of shape (2, 10, 4, 4), but classification needs logits",
        ),
    ],
)
def test_a_network_that_does_not_suit_the_data(tmp_path: Path, network: str, sentence: str) -> None:
    path = tmp_path / "other.py"
    path.write_text(f"from torch import nn\ndef other():\n    return {network}\n")
    run = tinyrun.create(tmp_path, model=f"{path}:other")
    with pytest.raises(BcnetError) as caught:
        tinyrun.work(run)
    assert str(caught.value).startswith(sentence)


def test_an_impossible_budget_is_refused_before_training(tmp_path: Path) -> None:
    run = tinyrun.create(tmp_path, budgets=["flops=1"])
    with pytest.raises(BcnetError, match=r"^budget flops=1 is impossible: the smallest network of this space costs "):
        tinyrun.work(run)
    assert not run.done("trace")


def test_memory_that_ends_while_scoring_halves_the_batches(tmp_path: Path) -> None:
    run = tinyrun.work(tinyrun.create(tmp_path), until="train")
    whole = next(iter(run.data.val.batches(0)))[0]
    score = run.task.score

    def little_memory(output: Any, target: Any) -> Any:
        if len(target) > len(whole) // 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return score(output, target)

    run.task = replace(run.task, score=little_memory)
    notes = tinyrun.Notes()
    tinyrun.work(run, until="search", listener=notes)
    assert notes.notes == ["a scoring batch does not fit into the memory of cpu: it is halved"]
    assert run.done("search")


def test_warnings_become_notes(tmp_path: Path) -> None:
    """A class that cannot run at other widths is built from its graph, which is said once."""
    (tmp_path / "fixed.py").write_text(
        """
from torch import nn

class Fixed(nn.Module):
    input_shape = (1, 8, 8)

    def __init__(self):
        super().__init__()
        self.conv, self.last = nn.Conv2d(1, 8, 3), nn.Linear(8, 10)

    def forward(self, x):
        return self.last(self.conv(x).mean((2, 3)).view(-1, 8))
"""
    )
    notes = tinyrun.Notes()
    run = tinyrun.create(tmp_path, model=f"{tmp_path / 'fixed.py'}:Fixed")
    tinyrun.work(run, until="trace", listener=notes)
    assert len(notes.notes) == 1
    assert notes.notes[0].startswith("Fixed itself does not run at other widths")
    assert run.read("trace")["own_class"] is False


def test_killed_twice_a_run_ends_the_same(finished: Run, tmp_path: Path) -> None:
    """SIGKILL, as benchmarks/kill.py does it 20 times with the default run."""
    run = tinyrun.create(tmp_path)
    script = """
import os, signal, sys
sys.path.insert(0, "tests/helpers")
import tinyrun
from bcnet.run.session import Listener, Run

class Kill(Listener):
    left = int(sys.argv[2])
    def step(self, *_):
        self.left -= 1
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGKILL)

tinyrun.work(Run(sys.argv[1]), "retrain", Kill())
"""
    for number in (7, 24):
        command = [sys.executable, "-c", script, str(run.folder), str(number)]
        ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900, check=False)
        assert ended.returncode == -9, ended.stderr
    tinyrun.work(Run(run.folder), until="retrain")
    assert tinyrun.outcome(run.folder) == tinyrun.outcome(finished.folder)
