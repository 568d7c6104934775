"""Runs that begin with a trained network: it is kept, it teaches, and the best that was trained is what ships."""

from __future__ import annotations

import json
import re
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import reference_kernels as reference
import terminal
import tinyrun
import torch
from safetensors.torch import load_file
from torch import nn

from bcnet.accel.fused_step import PlainStep
from bcnet.report import words
from bcnet.run.report import report_data, write_report
from bcnet.run.session import Run
from bcnet.run.stages import given as given_stage
from bcnet.run.stages import race as race_stage
from bcnet.run.stages import retrain as retrain_stage
from bcnet.search import TrialStore
from bcnet.search.noise import tells_apart
from bcnet.training.retraining import evaluate, learnt

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, weights: Path) -> Run:
    return tinyrun.work(tinyrun.trained(tmp_path_factory.mktemp("finished"), weights), until="report")


def test_a_network_that_knows_nothing_is_trained_first(untrained: tuple[Run, tinyrun.Notes]) -> None:
    run, notes = untrained
    given = run.read("given")
    assert given["knew"] is False
    assert len(given["history"]) == 12
    assert given["val"]["score"] > given["before"]["score"] + 0.2
    (note,) = notes.notes
    assert note.startswith("the network as given knows no more than chance (accuracy ")
    assert note.endswith("% on validation), so it is trained first, epochs: 12")
    assert notes.stages == ["trace", "given"]


def test_a_network_that_knows_something_is_not_trained_again(finished: Run, weights: Path) -> None:
    given = finished.read("given")
    assert given["knew"] is True
    assert given["history"] == []
    for name, tensor in load_file(weights).items():
        assert torch.equal(tensor, finished.tensors("given")[name])


def test_full_is_the_given_network(finished: Run) -> None:
    full = finished.read("retrain/full")
    given = finished.read("given")
    assert (full["score"], full["loss"], full["history"]) == (given["score"], given["loss"], [])
    x = next(iter(finished.data.val.batches(0)))[0]
    assert torch.equal(finished.network("full")(x), finished.given_network()(x))


def test_the_given_weights_are_the_start(finished: Run) -> None:
    """All channels kept is the given network: batch norm is recalibrated only where something was cut."""
    x = next(iter(finished.data.val.batches(0)))[0]
    whole = finished.inherited(finished.full)
    for (name, mine), theirs in zip(whole.named_parameters(), finished.given_network().parameters(), strict=True):
        assert torch.equal(mine, theirs), name
    assert torch.equal(whole.eval()(x), finished.given_network()(x))


def test_a_tiny_rate_leaves_the_inherited_network_as_it_is(tmp_path: Path, weights: Path) -> None:
    still = {"epochs": 1, "lr": 1e-12, "warmup": 0, "weight_decay": 0}
    run = tinyrun.trained(tmp_path, weights, retrain=still, race=None, compare=[])
    tinyrun.work(run)
    found = run.read("retrain/found")["widths"]
    for mine, theirs in zip(run.network("found").parameters(), run.inherited(found).parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-9, rtol=0)


def test_the_teacher_teaches(tmp_path: Path, weights: Path) -> None:
    """Learning from the teacher alone ends nearer to it than learning from the labels."""

    def apart(folder: Path, **changes: Any) -> float:
        folder.mkdir()
        run = tinyrun.work(tinyrun.trained(folder, weights, race=None, compare=["uniform"], **changes), until="retrain")
        x = next(iter(run.data.val.batches(0)))[0]
        slim, full = (network(x).detach().softmax(1) for network in (run.network("uniform"), run.given_network()))
        return float((slim - full).abs().mean())

    taught = apart(tmp_path / "taught", distillation={"alpha": 1.0, "temperature": 1.0})
    assert taught < apart(tmp_path / "alone", distillation=None)


@pytest.mark.parametrize("score", ["cut", "steps", "supernet"])
def test_every_score_finds_a_network(tmp_path: Path, weights: Path, score: str) -> None:
    run = tinyrun.trained(tmp_path, weights, score=score, supernet={"epochs": 2}, race=None, compare=[])
    notes = tinyrun.Notes()
    tinyrun.work(run, listener=notes)
    stages = ["trace", "given", *(["train"] if score == "supernet" else []), "search", "rate", "retrain", "compare"]
    assert notes.stages == stages
    found = run.read("search")
    assert found["scored_by"] == score
    full, slim = run.read("compare")["networks"]  # the given network is there without being asked for
    assert (full["name"], slim["name"]) == ("full", "found")
    assert slim["costs"]["flops"] <= full["costs"]["flops"] / 2
    data = report_data(run)
    assert data.principle == ("ua" if score == "supernet" else None)
    assert words.headline(data).startswith(f"your network: {words.score(data, full['score'])} at 100% → slim: ")
    assert words.comparison(data) == [
        "Nothing else was trained within the budget, so there is nothing to compare it with."
    ]
    assert write_report(run).stat().st_size > 1000


@pytest.mark.parametrize("name", ["l1-global", "l2-isomorphic", "uniform", "balanced"])
def test_widths_by_a_method_need_no_search(tmp_path: Path, weights: Path, name: str) -> None:
    """They are what is compared under that name, whatever else is."""
    run = tinyrun.trained(tmp_path, weights, allot=name, compare=[name])
    notes = tinyrun.Notes()
    tinyrun.work(run, listener=notes)
    assert "race" not in notes.stages
    found = run.read("retrain/found")
    assert found["widths"] == run.read(f"retrain/{name}")["widths"]
    assert run.constraints.feasible([found["widths"]])[0]
    assert run.read("search")["notes"] == [f"the widths are those of {name}, as asked for: nothing was searched"]


def test_methods_on_the_command_line(tmp_path: Path) -> None:
    asked = ["run", "zoo:digits_cnn", "--data", "digits", "--until", "trace"]
    for name, expected in (("fpgm-global", ("fpgm-global", "fpgm", "bcv2")), ("ua", (None, "l2", "ua"))):
        folder = tmp_path / name
        assert terminal.run(*asked, "--method", name, "--out", str(folder)).exit_code == 0
        recipe = Run(folder).recipe
        assert (recipe.allot, recipe.keep, recipe.method) == expected
    answer = terminal.run(*asked, "--method", "l2", "--out", str(tmp_path / "no"))
    assert answer.exit_code == 2
    assert answer.stderr.startswith("error: unknown method 'l2': there are ")


def test_what_ships_is_the_best_on_validation(finished: Run) -> None:
    rivals = {name: finished.read(f"retrain/{name}")["val"]["loss"] for name in ("uniform", "found")}
    assert finished.chosen == min(rivals, key=lambda name: rivals[name])
    compared = finished.read("compare")
    assert compared["chosen"] == finished.chosen
    x = next(iter(finished.data.val.batches(0)))[0]
    assert torch.equal(finished.network()(x), finished.network(finished.chosen)(x))


def test_where_uniform_ships_page_and_closing_lines_say_so(finished: Run, tmp_path: Path) -> None:
    import shutil

    folder = tmp_path / "run"
    shutil.copytree(finished.folder, folder)
    run = Run(folder)
    with run.lock():
        for name in ("retrain", "compare"):
            result = {key: value for key, value in run.read(name).items() if key != "version"}
            run.write(name, {**result, "chosen": "uniform"})
    sentence = (
        "On validation images scaling all layers alike did better than what the search found, so that is what ships."
    )
    data = report_data(run)
    assert sentence in words.verdict(data)
    assert any("At the same budget, what the search found " in said for said in words.verdict(data))
    assert not any("same budget, scaling all layers alike" in said for said in words.verdict(data))
    assert data.found == data.networks["uniform"]
    assert sentence in write_report(run).read_text("utf-8")
    shown = terminal.run("report", str(folder), "--trust")
    assert sentence in " ".join(shown.output.split())
    widths = json.loads(json.dumps(run.read("retrain/uniform")["widths"]))
    assert [m.out_channels for m in run.network().modules() if hasattr(m, "out_channels")] == widths


def test_the_headline_says_what_became_of_the_network(finished: Run) -> None:
    data = report_data(finished)
    assert words.headline(data).startswith(f"your network: {100 * data.full.score:.2f}% at 100% → slim: ")
    page = finished.path("report.html").read_text("utf-8")
    assert "On validation images, epoch by epoch" in page
    assert {row["shown"] for row in data.validated} == {*data.networks}
    assert all(row["loss"] > 0 for row in data.validated)
    assert "started with the most important channels of your network" in page


def test_a_network_that_has_not_learnt_is_called_that(tmp_path: Path, weights: Path) -> None:
    """Labels of which the images say nothing: whatever was trained on them cannot have learnt."""
    healing = {"steps": 2, "calibration": 2, "share": 0}  # as many as for a longer training: no note of that
    retrain = {"epochs": 1, "lr": 30.0, "warmup": 0}
    run = tinyrun.trained(tmp_path, weights, race=None, compare=[], healing=healing, retrain=retrain)
    notes = tinyrun.Notes()
    tinyrun.work(run, listener=notes)
    first, *others = notes.notes
    assert first.startswith("the network as given has accuracy ")
    assert others == [f"the slim network has not learnt anything. {words.NOT_LEARNT}"]
    data = report_data(run)
    assert words.headline(data).startswith("the slim network has not learnt anything: ")
    assert words.NOT_LEARNT in words.verdict(data)


def test_learnt_means_more_than_a_guess(finished: Run) -> None:
    val, task = finished.data.val, finished.task
    assert learnt(finished.given_network(), val, task)
    fresh = finished.fresh(finished.full)
    assert not learnt(fresh, val, task)
    with torch.no_grad():  # always the same class: right as often as that class is there
        fresh[-1].weight.zero_()
        fresh[-1].bias.copy_(torch.arange(10.0))
    assert evaluate(fresh, val, task)["score"] > 0.05
    assert not learnt(fresh, val, task)


def test_scores_that_say_nothing_give_way_to_uniform_widths(tmp_path: Path, weights: Path) -> None:
    """A teacher of no help and a cut beyond repair: scores that are all alike decide nothing."""
    run = tinyrun.trained(tmp_path, weights, fallback=True, rank_by="score", compare=["uniform"])
    tinyrun.work(run, until="given")
    run.task = _blind(run)
    tinyrun.work(run, until="search")
    found = run.read("search")
    (note,) = [note for note in found["notes"] if not note.startswith("healing")]
    assert re.fullmatch(
        r"the scores of \d+ configurations differ by no more than chance, and so do their losses, so nothing was "
        r"searched and uniform widths were taken: more epochs may help",
        note,
    )
    from bcnet.run.stages.configurations import configuration

    assert found["best"]["widths"] == configuration(run, "uniform")
    del run.task
    tinyrun.work(run, until="report")
    assert "nothing was searched" in run.path("report.html").read_text("utf-8")


def _blind(run: Run) -> Any:
    from bcnet.training.task import Task

    return Task(loss=lambda o, t: 0 * o.sum() + 1.0, score=lambda o, t: 0 * o[:, 0])


def test_noise_is_told_from_differences() -> None:
    rng = torch.Generator().manual_seed(0)
    noise = torch.randn(16, 4, generator=rng)
    assert not tells_apart(noise)
    assert tells_apart(noise + 5 * torch.arange(16.0)[:, None])
    assert not tells_apart(noise + 5 * torch.arange(4.0)[None])  # parts may differ as they like
    assert not tells_apart(torch.ones(16, 4))
    assert tells_apart(torch.arange(16.0)[:, None].expand(16, 4))
    assert not tells_apart(torch.full((16, 4), torch.nan))


def test_networks_trained_more_than_once_have_intervals_over_trainings(tmp_path: Path, weights: Path) -> None:
    run = tinyrun.work(tinyrun.trained(tmp_path, weights, repeats=2, race=None))
    rows = {row["name"]: row for row in run.read("compare")["networks"]}
    assert {name: row["trainings"] for name, row in rows.items()} == {"full": 1, "uniform": 2, "found": 2}
    first, again = run.read("retrain/uniform"), run.read("retrain/uniform-2")
    assert first["widths"] == again["widths"]
    assert first["loss"] != again["loss"]
    assert rows["uniform"]["score"] == pytest.approx((first["score"] + again["score"]) / 2)
    assert rows["full"]["lead"]["error"] > 0
    assert report_data(run).repeats == 2


def test_a_layer_keeps_some_channels_unless_asked(tmp_path: Path, weights: Path) -> None:
    run = tinyrun.trained(tmp_path, weights, least=4)
    tinyrun.work(run, until="trace")
    assert [v["candidates"][0] for v in run.read("trace")["variables"]] == [4, 4]


def test_a_run_by_the_fused_step_is_resumed_as_it_was(
    tmp_path: Path, weights: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every network of a run as on a GPU, with the reference kernels in their place: stopped in the middle, it ends bit
    for bit as if it had not been."""
    made: list[nn.Module] = []

    def fast(run: Run) -> Any:
        def make(network: nn.Module, x: torch.Tensor, loss: Any, teacher: Any) -> PlainStep:
            made.append(network)
            return PlainStep(network, x, loss, teacher, reference, torch.float32)

        return make

    for stage in (given_stage, race_stage, retrain_stage):
        monkeypatch.setattr(stage, "fast_step", fast)
    folders = tmp_path / "whole", tmp_path / "stopped"
    for folder in folders:
        folder.mkdir()
    whole, stopped = (tinyrun.trained(folder, weights, bf16=True) for folder in folders)
    tinyrun.work(whole, until="retrain")
    assert len(made) > 3
    with pytest.raises(tinyrun.Stopped):
        tinyrun.work(stopped, until="retrain", listener=tinyrun.StopAt(30))
    tinyrun.work(Run(stopped.folder, "cpu"), until="retrain")
    for name, tensor in whole.tensors("retrain/found").items():
        assert torch.equal(tensor, stopped.tensors("retrain/found")[name]), name


def test_a_small_space_is_scored_as_a_whole(tmp_path: Path) -> None:
    """By a search near the best so far, too, which is what recipes take where nothing else is said."""
    search = {"strategy": "neighbours", "evaluations": 12, "population": 6}
    given, retrain = {"epochs": 1, "warmup": 0}, {"epochs": 8, "warmup": 0}  # long enough to heal them all
    run = tinyrun.trained(tmp_path, groups=3, fallback=False, given=given, search=search, retrain=retrain)
    tinyrun.work(run, until="search")
    rows = np.array(list(product(*(v.candidates for v in run.space.variables))))
    within = [tuple(row) for row in rows[run.constraints.feasible(rows)].tolist()]
    assert 1 < len(within) < len(rows) <= 12
    with TrialStore(run.path("trials.sqlite"), read_only=True) as store:
        assert sorted(trial.widths for trial in store.trials()) == within
    assert f"all {len(within)} configurations within the budgets were scored" in run.read("search")["notes"]
