"""Plain mistakes get one plain sentence, on the command line and from Python."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import terminal
import tinyrun
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import bcnet
from bcnet.cli.stage import STAGES
from bcnet.errors import BcnetError

ROOT = Path(__file__).parents[2]
TINY = {
    "supernet": {"epochs": 1},
    "retrain": {"epochs": 1},
    "search": {"evaluations": 6, "population": 3},
    "groups": 4,
    "threads": 1,
}


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--set", "about=2001-99-99"], "--set about: this YAML cannot be read: month must be in 1..12"),
        (
            ["--seed", "9" * 5000],
            "Invalid value for '--seed': Unable to parse input string as an integer, exceeded maximum size",
        ),
        (
            ["--set", f"seed={'9' * 5000}"],
            "--set seed: this YAML cannot be read: Exceeds the limit (4300 digits) for integer string "
            "conversion: value has 5000 digits",
        ),
        (["--set", f"about={'[' * 5000}"], "--set about: this YAML has over 16 levels, more than are read"),
        (["--set", "about=*a"], "--set about: this is not YAML: found undefined alias 'a' in line 1"),
        (
            ["zoo:digits_cnn", "--data", "cifar10:~nosuchuser/x"],
            "'~nosuchuser/x' is not a path: Could not determine home directory",
        ),
        (["--set", 'data="cifar10:a\\0b"'], "'a\\x00b' is not a path: embedded null byte"),
        (["--set", 'model="a\\0b.py:tiny"'], "'a\\x00b.py' is not a path: embedded null byte"),
        (["--device", "meta"], "bcnet does not run on the device 'meta': say cpu, cuda or cuda:1"),
        (["--device", "mps"], "bcnet does not run on the device 'mps': say cpu, cuda or cuda:1"),
        (["--device", "xpu"], "bcnet does not run on the device 'xpu': say cpu, cuda or cuda:1"),
        (["--set", "threads=100000"], "threads is 100000, but it must be at most 256"),
        (["--compare", "unifrom"], "compare.0 is 'unifrom': did you mean 'uniform'?"),
        (["--start", "train"], "start is 'train', but it must be trained or scratch"),
        (
            ["--set", "lr=0.1"],
            "unknown key lr: did you mean given.lr or healing.lr or supernet.lr or retrain.lr?",
        ),
    ],
)
def test_on_the_command_line(words: list[str], sentence: str, tmp_path: Path) -> None:
    told = terminal.run("run", *words, "--out", str(tmp_path / "run"))
    assert (told.exit_code, told.stderr) == (2, f"error: {sentence}\n")
    assert not (tmp_path / "run").exists()


def test_names_that_no_file_can_have(tmp_path: Path) -> None:
    told = terminal.run("run", "--out", str(tmp_path / ("a" * 300)))
    assert told.exit_code == 2
    assert told.stderr.startswith("error: cannot use '/")
    assert told.stderr.endswith(": File name too long\n")
    told = terminal.run("recipe", "check", "a" * 5000)
    assert (told.exit_code, told.stderr.count("\n")) == (2, 1)


@pytest.mark.parametrize("name", ["a\\0b", "a\\eb"])
def test_names_are_told_without_control_characters(name: str, tmp_path: Path) -> None:
    told = terminal.run("run", "--set", f'weights="{name}"', "--out", str(tmp_path / "run"))
    assert told.exit_code == 2
    assert told.stderr.splitlines()[-1] in ("error: there is no file a\\x00b", "error: there is no file a\\x1bb")


def test_a_choice_without_a_score_is_on_the_front(tmp_path: Path) -> None:
    run = tinyrun.work(tinyrun.create(tmp_path, allot="uniform"), until="search")
    told = terminal.run("front", str(run.folder))
    assert told.exit_code == 0
    (row,) = terminal.cells(told.stdout)
    widths = " ".join(map(str, run.read("search")["best"]["widths"]))
    assert (row[0], row[1], row[-1]) == ("chosen", "-", widths)


def test_losses_of_a_front_are_called_that_and_have_no_minus(tmp_path: Path) -> None:
    run = tinyrun.work(tinyrun.create(tmp_path, rank_by="loss"), until="search")
    told = terminal.run("front", str(run.folder))
    assert told.exit_code == 0
    assert "┃ loss " in told.stdout
    chosen = terminal.cells(told.stdout)[-1]
    assert (chosen[0], float(chosen[1])) == ("chosen", pytest.approx(-run.read("search")["best"]["score"], rel=1e-5))


@pytest.mark.parametrize("out", ["file", "file/run"])
def test_a_file_where_a_folder_should_be(out: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    told = terminal.run("run", "--out", str(tmp_path / out))
    obstacle = "a file is where a folder should be, so move it away or choose another folder"
    assert (told.exit_code, told.stderr) == (2, f"error: cannot write {tmp_path / out}: {obstacle}\n")
    assert (tmp_path / "file").read_text() == "mine"


def test_commands_to_copy_work_where_paths_have_spaces(tmp_path: Path) -> None:
    (tmp_path / "meine Läufe").mkdir()
    run = tinyrun.create(tmp_path / "meine Läufe")
    told = terminal.run("trace", str(run.folder), "--trust")
    command = re.findall(r"`bcnet ([^`]*)`", " ".join(told.stdout.split()))[0]
    assert shlex.split(command) == ["train", str(run.folder), "--trust"]
    assert terminal.run(*shlex.split(command)).exit_code == 0


def test_latency_that_was_not_measured_cannot_be_picked(tmp_path: Path) -> None:
    run = tinyrun.work(tinyrun.create(tmp_path))
    told = terminal.run("pick", str(run.folder), "--budget", "latency=50%", "--trust")
    sentence = f"error: latency was not measured in {run.folder}: begin a run with --budget latency=50%\n"
    assert (told.exit_code, told.stderr) == (2, sentence)


@pytest.mark.parametrize("group", ["recipe", "bench"])
def test_a_group_alone_says_what_there_is(group: str) -> None:
    told = terminal.run(group)
    assert (told.exit_code, told.stderr) == (0, "")
    assert "--help" in told.stdout


def test_output_that_cannot_be_written() -> None:
    if not Path("/dev/full").exists():
        pytest.skip("this system has no /dev/full")
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "bcnet", "models", "--json"]
        ended = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, cwd=ROOT, check=False)
    assert (ended.returncode, ended.stderr) == (2, "error: cannot write the output: No space left on device\n")


@pytest.mark.parametrize("after", [0.3, 1.0])
def test_ctrl_c_in_the_first_second(after: float, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "bcnet", "run", "--out", str(tmp_path / "run")]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=ROOT, preexec_fn=terminal.hear_ctrl_c)
    time.sleep(after)
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=120)[1].endswith("error: interrupted\n")
    assert process.returncode in (130, -signal.SIGINT)


def test_a_python_file_of_a_received_folder_is_run_with_trust_only(tmp_path: Path) -> None:
    trap, sprung = tmp_path / "trap.py", tmp_path / "sprung"
    trap.write_text(f"open({str(sprung)!r}, 'w')\n{tinyrun.NETWORK}")
    run = tinyrun.create(tmp_path, model=f"{trap}:tiny")
    sentence = f"error: this would run the Python file {trap}: add --trust if you know what it does\n"
    folder, recipe = str(run.folder), str(run.path("recipe.yaml"))
    stages = [[stage, folder] for stage in (*STAGES, "report")]
    for command in (
        *stages,
        ["run", "--resume", folder],
        ["run", "--recipe", recipe, "--out", str(tmp_path / "other")],
        ["pick", folder, "--budget", "flops=40%"],
        ["export", folder],
        ["recipe", "check", recipe],
    ):
        told = terminal.run(*command)
        assert (told.exit_code, told.stderr) == (2, sentence)
        assert not sprung.exists()
    assert not (tmp_path / "other").exists()
    for command in (["recipe", "check", recipe], ["run", "--resume", folder, "--until", "trace"]):
        assert terminal.run(*command, "--trust").exit_code == 0
        assert sprung.exists()
        sprung.unlink()


def network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(1), nn.Linear(8, 3),
    )  # fmt: skip


def frozen() -> nn.Module:
    return network().requires_grad_(False)


def quoted() -> nn.Module:
    model = network()
    model.add_module('a"b', nn.Linear(3, 3))
    return model


def accuracy(output: Tensor, target: Tensor) -> Tensor:
    return (output.argmax(1) == target).float()


X, Y = torch.randn(48, 2, 6, 6, generator=torch.Generator().manual_seed(0)), torch.arange(48) % 3


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (
            lambda: {"train": [(X[:0], Y[:0])]},
            "a loader gave a batch without a single input: leave such batches out",
        ),
        (
            lambda: {"val": []},
            "a loader gives no batches: its data set is empty, or smaller than a batch it drops",
        ),
        (
            lambda: {"model": frozen()},
            "all parameters of model are frozen, so nothing can be trained: model.requires_grad_(True)",
        ),
        (
            lambda: {"task": bcnet.Task(lambda o, t: F.cross_entropy(o, t).detach(), accuracy)},
            "the first training step, on inputs of float32 (48, 2, 6, 6), fails: element 0 of tensors does not require "
            "grad and does not have a grad_fn",
        ),
        (
            lambda: {"train": [(X.double(), Y)]},
            "the network does not run on inputs of shape (2, 6, 6): Input type (double) and bias type (float) should "
            "be the same",
        ),
        (
            lambda: {"test": [(X.double(), Y)]},
            "the network does not run on inputs of shape (2, 6, 6): Input type (double) and bias type (float) should "
            "be the same",
        ),
        (
            lambda: {"train": [(X, Y), (torch.zeros(48, 3, 6, 6), Y)]},
            "a loader gave inputs of float32 with 3 channels after some of float32 with 2: all must be alike",
        ),
        (
            lambda: {"val": [(X * float("nan"), Y)]},
            "a loader for scoring gave values that are infinite or NaN: clean its data",
        ),
        (lambda: {"model": accuracy}, "model is a function, but it must be a network, an nn.Module"),
        (lambda: {"task": "classification"}, "task must be a bcnet.Task, not str"),
        (lambda: {"budget": 5}, 'budget is 5, but it must be a text such as "flops=50%", or a list of them'),
        (lambda: {"budget": [5]}, 'budget is [5], but it must be a text such as "flops=50%", or a list of them'),
        (
            lambda: {"recipe": 5},
            "recipe is 5, but it must be a recipe, its name or file, or the keys to change",
        ),
        (
            lambda: {"model": quoted()},
            "'a\"b.weight' has a quote, backslash or line end in its name: rename that layer",
        ),
        (lambda: {"out": "a\0b"}, "cannot use 'a\\x00b': embedded null byte"),
        (lambda: {"device": "meta"}, "bcnet does not run on the device 'meta': say cpu, cuda or cuda:1"),
    ],
)
def test_from_python(given: Callable[[], dict[str, Any]], sentence: str) -> None:
    settings = {"model": network(), "example": X[:1], "train": [(X, Y)], "val": [(X, Y)], "recipe": TINY, **given()}
    with pytest.raises(BcnetError) as caught:
        bcnet.slim(**settings, progress=False)
    assert str(caught.value) == sentence


def test_random_numbers_are_given_back() -> None:
    import random

    import numpy as np

    model, data = network(), [(X, Y)]
    draws: list[Any] = []
    for work in (lambda: None, lambda: bcnet.slim(model, X[:1], data, data, recipe=TINY, progress=False).model):
        torch.manual_seed(3)
        np.random.seed(3)  # noqa: NPY002
        random.seed(3)
        work()
        draws.append((torch.rand(2).tolist(), np.random.rand(2).tolist(), random.random()))  # noqa: NPY002
    assert draws[0] == draws[1]


def test_a_pipe_instead_of_a_recipe(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.yaml")
    told = terminal.run("recipe", "check", str(tmp_path / "pipe.yaml"))
    assert told.exit_code == 2
    assert told.stderr.startswith("error: there is no recipe ")
