"""``bcnet run``, its stages alone and ``bcnet recipe``: what is printed, what is refused, how a run is stopped."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import tinyrun
import yaml
from terminal import hear_ctrl_c, run

from bcnet.run.pipeline import STAGES
from bcnet.run.recipe import Recipe, names
from bcnet.run.session import Run, command_line

ROOT = Path(__file__).parents[2]


def error(*arguments: str) -> str:
    result = run(*arguments)
    assert result.exit_code == 2
    *_, last = result.stderr.splitlines()
    assert last.startswith("error: ")
    return last.removeprefix("error: ")


@pytest.fixture(scope="module")
def recipe_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("recipe")
    path = folder / "tiny.yaml"
    path.write_text(tinyrun.recipe(folder).to_yaml())
    return path


@pytest.fixture(scope="module")
def finished(recipe_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A whole run on the command line: its folder and what was printed."""
    folder = tmp_path_factory.mktemp("runs") / "tiny"
    result = run("run", "--recipe", str(recipe_file), "--trust", "--out", str(folder), "--seed", "1", "--device", "cpu")
    assert result.exit_code == 0, result.stderr
    return folder, result


def test_a_run_ends_with_a_table_and_the_report(finished: Any) -> None:
    folder, result = finished
    for word in ("full", "uniform", "found", "accuracy", "FLOPs", "parameters", "latency", "ms"):
        assert word in result.stdout
    *_, report, following = result.stdout.splitlines()
    assert "At the same budget, scaling all layers alike " in result.stdout
    certain = ("That is more than chance on ", "chance alone makes differences", "So the search was not worth it here")
    assert any(words in result.stdout for words in certain)
    assert report == f"report: {folder / 'report.html'}"
    assert following.startswith(f"next: bcnet export {folder} --trust --to onnx")
    assert "(ships)" in result.stdout
    assert (folder / "report.html").stat().st_size > 1000
    assert (folder / "export" / "weights.safetensors").is_file()
    assert "note: plan: about " in result.stderr
    for line in ("train: train the supernet", "search: search widths within the budget"):
        assert line in result.stderr


def test_the_folder_says_how_to_repeat_it(finished: Any) -> None:
    folder, _ = finished
    opened = Run.open(folder)
    assert opened.recipe.seed == 1
    assert opened.read("run")["seed"] == 1
    assert Path(opened.recipe.model.rpartition(":")[0]).is_absolute()


def test_a_finished_run_prints_its_table_again(finished: Any) -> None:
    folder, result = finished
    again = run("run", "--resume", str(folder), "--trust")
    assert again.exit_code == 0
    assert again.stdout == result.stdout
    assert again.stderr == ""


def test_several_runs_are_reported_on_one_page(finished: Any, tmp_path: Path) -> None:
    folder, _ = finished
    page = tmp_path / "two.html"
    told = run("report", str(folder), str(folder), "--out", str(page))
    assert told.stdout == f"report: {page}\n"
    assert page.read_text("utf-8").count(f"<td>{folder}</td>") == 2


def test_json_for_machines(finished: Any) -> None:
    folder, _ = finished
    answer = json.loads(run("run", "--resume", str(folder), "--trust", "--json").stdout)
    assert answer["run"] == str(folder)
    assert answer["done"] == ["trace", "train", "search", "retrain", "compare", "export", "report"]
    assert answer["report"] == str(folder / "report.html")
    assert [row["name"] for row in answer["networks"]] == ["full", "uniform", "found"]
    assert {"score", "costs", "latency_ms", "widths"} <= set(answer["networks"][0])


def test_stages_alone(recipe_file: Path, tmp_path: Path) -> None:
    folder = str(tmp_path / "run")
    first = run("run", "--recipe", str(recipe_file), "--trust", "--out", folder, "--until", "trace")
    assert first.stdout.startswith(f"trace is done: {folder} (next: `bcnet train {folder} --trust`")
    for stage in ("train", "search"):
        result = run(stage, folder, "--trust")
        assert result.exit_code == 0, result.stderr
        assert result.stderr.startswith(f"{stage}: ")
        assert run(stage, folder, "--trust").stderr == ""
    assert run("search", folder, "--trust", "--again").stderr.startswith("search: ")
    result = run("retrain", folder, "--trust")
    assert "  found 10/10" in result.stderr
    assert not Run(folder).done("compare")
    assert run("report", folder, "--trust").exit_code == 0
    drawn = Path(folder, "report.html")
    drawn.unlink()
    assert f"report: {drawn}\n" in run("report", folder).stdout  # drawing runs no code of the network's
    assert drawn.stat().st_size < 2e6
    assert Run(folder).path("report.html").is_file()


def test_options_change_the_recipe(recipe_file: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    arguments = ["--budget", "flops=40%", "--budget", "params=90%", "--seed", "3", "--set", "supernet.epochs=1"]
    more = ["--set", "compare=[uniform]", "--set", "distillation.alpha=0.25", "--until", "trace"]
    result = run("run", "--recipe", str(recipe_file), "--trust", "--out", str(folder), *arguments, *more)
    assert result.exit_code == 0, result.stderr
    recipe = Run.open(folder).recipe
    assert recipe.budgets == ("flops=40%", "params=90%")
    assert (recipe.seed, recipe.supernet.epochs, recipe.compare) == (3, 1, ("uniform",))
    assert recipe.distillation is not None
    assert recipe.distillation.alpha == 0.25


def test_a_plan_comes_from_some_steps_and_leaves_nothing(
    recipe_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    told = run("run", "--recipe", str(recipe_file), "--trust", "--plan", "--json")
    plan = json.loads(told.stdout)
    assert list(plan["seconds"]) == ["train", "search", "retrain", "compare", "export", "report"]
    assert all(plan["seconds"][name] > 0 for name in ("train", "search", "retrain"))
    assert plan["disk"] > 0
    assert not list(tmp_path.iterdir())
    shorter = ["--effort", "quick", "--compare", "none", "--plan", "--json"]
    less = json.loads(run("run", "--recipe", str(recipe_file), "--trust", *shorter).stdout)
    assert less["seconds"]["retrain"] < plan["seconds"]["retrain"]
    wrong = "--effort is 'lazy', but it must be one of quick, normal, paper"
    assert error("run", "--effort", "lazy") == wrong


def test_a_plan_tells_what_a_run_would(recipe_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Notes were lost: a plan for images of 48 x 40 said nothing of their being enlarged to 224 x 224."""
    stage, about = STAGES["trace"]

    def trace(run: Run) -> None:
        stage(run)
        run.listener.note("images are enlarged")

    monkeypatch.setitem(STAGES, "trace", (trace, about))
    monkeypatch.setattr("bcnet.cli.plan.LONG", 0.0)
    told = run("run", "--recipe", str(recipe_file), "--trust", "--plan")
    assert told.stderr.splitlines() == ["note: images are enlarged"]
    assert "shorter: --effort quick" in told.stdout


def test_a_report_names_the_command_as_it_is_typed(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("/usr/bin/bcnet", "/home/me/bcnet/__main__.py"):
        monkeypatch.setattr(sys, "argv", [name, "run", "--plan"])
        assert command_line() == ["bcnet", "run", "--plan"]


def test_a_run_without_a_folder_gets_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recipe_file: Path) -> None:
    monkeypatch.chdir(tmp_path)
    for number in (1, 2):
        result = run("run", "--recipe", str(recipe_file), "--trust", "--until", "trace")
        assert result.stdout.startswith(f"trace is done: runs/tiny-{number} (next: ")


def test_with_nothing_said_it_is_the_digits_in_clutter(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    assert run("run", "--out", str(folder), "--until", "trace").exit_code == 0
    assert Run.open(folder).recipe == Recipe.read("cluttered_digits")


def test_mistakes_get_one_sentence(recipe_file: Path, tmp_path: Path) -> None:
    out = str(tmp_path / "run")
    missing = (
        "the data is missing: add --data digits, cluttered_digits, cifar10:FOLDER or imagefolder:FOLDER, or --recipe"
    )
    assert error("run", "zoo:digits_cnn") == missing
    model = "the model is missing: name one, such as zoo:mobilenetv2_cifar, or add --recipe"
    assert error("run", "--data", "digits") == model
    refused = "--resume goes on with the recipe in its folder: leave out --seed"
    assert error("run", "--resume", out, "--seed", "1") == refused
    assert error("run", "--resume", out, "--effort", "quick") == refused.replace("--seed", "--effort")
    assert error("run", "zoo:digits_cnn", "--resume", out) == refused.replace("--seed", "MODEL")
    no_run = f"{tmp_path} is not the folder of a run: it has neither run.json nor recipe.yaml"
    assert error("train", str(tmp_path)) == no_run
    assert error("run", "--resume", str(tmp_path)) == no_run
    assert error("run", "--set", "seed") == "--set 'seed' must read key=value, such as supernet.epochs=30"
    assert error("run", "--set", "supernet.epoch=3") == "unknown key supernet.epoch: did you mean 'epochs'?"
    assert error("run", "--device", "toaster", "--out", out) == "unknown device 'toaster': say cpu, cuda or cuda:1"
    nowhere = "torch finds no device cuda:99 on this machine: say cpu, or check its driver"
    assert error("run", "--device", "cuda:99", "--out", out) == nowhere
    assert error("run", "--recipe", "nothing.yaml").startswith("there is no recipe 'nothing.yaml': ")
    assert error("run", "--until", "lunch", "--out", out).startswith("there is no stage 'lunch': ")
    assert not list(tmp_path.iterdir())


def test_a_bad_budget_or_data_stops_before_training(tmp_path: Path) -> None:
    budget = error("run", "--out", str(tmp_path / "a"), "--budget", "speed=3")
    assert budget.startswith("unknown budget 'speed': this space knows ")
    data = error("run", "zoo:digits_cnn", "--data", f"imagefolder:{tmp_path}", "--out", str(tmp_path / "b"))
    assert data == f"{tmp_path} has no folder 'train': images are looked for in train/CLASS/ and val/CLASS/"
    (tmp_path / "train" / "cat").mkdir(parents=True)
    one = error("run", "zoo:digits_cnn", "--data", f"imagefolder:{tmp_path}", "--out", str(tmp_path / "c"))
    assert one == f"{tmp_path / 'train'} has one class only, 'cat': at least two are needed to learn from"
    (tmp_path / "train" / "dog").mkdir()
    empty = error("run", "zoo:digits_cnn", "--data", f"imagefolder:{tmp_path}", "--out", str(tmp_path / "d"))
    assert empty.startswith(f"{tmp_path / 'train' / 'cat'} holds no images: ")
    assert [path.name for path in tmp_path.iterdir()] == ["train"]


def test_another_process_at_work_is_named(finished: Any) -> None:
    folder, _ = finished
    with Run(folder).lock():
        sentence = error("run", "--resume", str(folder), "--trust")
    assert sentence == f"process {os.getpid()} is working in {folder}: wait until it ends, or choose another folder"


def test_ctrl_c_stops_cleanly_and_resumes(recipe_file: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    settings = ["--set", "supernet.epochs=500", "--set", "checkpoint_minutes=60"]
    command = [
        sys.executable,
        "-m",
        "bcnet",
        "run",
        "--recipe",
        str(recipe_file),
        "--trust",
        "--out",
        str(folder),
        *settings,
    ]
    pipes: dict[str, Any] = {"stderr": subprocess.PIPE, "stdout": subprocess.DEVNULL, "text": True}
    process = subprocess.Popen(command, cwd=ROOT, preexec_fn=hear_ctrl_c, **pipes)
    assert process.stderr is not None
    for line in process.stderr:
        if line.startswith("train: "):
            break
    time.sleep(1)
    process.send_signal(signal.SIGINT)
    rest = process.stderr.read()
    assert process.wait(120) == 130
    assert rest.splitlines()[-1] == f"error: stopped, nothing is lost: go on with `bcnet run --resume {folder} --trust`"
    assert list((folder / "checkpoints" / "train").glob("checkpoint-*"))
    assert not Run(folder).done("train")


def test_recipe_list_and_show() -> None:
    listed = json.loads(run("recipe", "list", "--json").stdout)["recipes"]
    assert [row["name"] for row in listed] == names()
    assert "mobilenetv2_cifar" in run("recipe", "list").stdout
    shown = run("recipe", "show", "vgg19_cifar").stdout
    assert Recipe.parse(yaml.safe_load(shown)) == Recipe.read("vgg19_cifar")
    assert json.loads(run("recipe", "show", "vgg19_cifar", "--json").stdout)["groups"] == 20


def test_recipe_check(recipe_file: Path, tmp_path: Path) -> None:
    good = run("recipe", "check", str(recipe_file), "--trust")
    assert good.exit_code == 0, good.stderr
    assert good.stdout.startswith(f"{recipe_file} is in order: ")
    bad = tmp_path / "bad.yaml"
    content = yaml.safe_load(recipe_file.read_text())
    bad.write_text(yaml.safe_dump({**content, "budgets": ["flops=0.001%"]}))
    assert error("recipe", "check", str(bad), "--trust").startswith("budget flops=0.001% is impossible: ")
    bad.write_text(yaml.safe_dump({**content, "sed": 3}))
    assert error("recipe", "check", str(bad)) == f"{bad}: unknown key sed: did you mean 'seed'?"
