"""Commands on a run that was made from Python, whose network and data they do not have."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from terminal import run
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import bcnet

TINY = {
    "given": {"epochs": 1, "warmup": 0},
    "healing": {"steps": 1},
    "race": {"finalists": 2, "rounds": 1},
    "retrain": {"epochs": 1, "warmup": 0},
    "search": {"evaluations": 4, "population": 2},
    "compare": ["uniform"],
}


def network() -> nn.Module:
    body = (nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.AdaptiveAvgPool2d(1))
    return nn.Sequential(*body, nn.Flatten(), nn.Linear(8, 3))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    images = torch.randn(48, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    loader = DataLoader(TensorDataset(images, torch.arange(48) % 3), 24)
    folder = tmp_path_factory.mktemp("python") / "run"
    arguments = {"budget": "flops=60%", "recipe": TINY, "out": folder, "progress": False}
    bcnet.slim(network(), images[:1], loader, loader, **arguments)  # type: ignore[arg-type]
    return folder


def test_its_report_needs_no_code(made: Path) -> None:
    (made / "report.html").unlink(missing_ok=True)
    told = run("report", str(made))
    assert told.exit_code == 0, told.stderr
    assert told.stdout.splitlines()[-1] == f"next: bcnet export {made}"  # what can be done without code
    assert (made / "report.html").stat().st_size > 1000


def test_its_weights_are_exported_without_code(made: Path, tmp_path: Path) -> None:
    told = run("export", str(made), "--out", str(tmp_path / "slim"))
    assert told.exit_code == 0, told.stderr
    assert told.stdout.startswith(f"wrote widths.json, weights.safetensors, MODEL.md to {tmp_path / 'slim'}")
    slim = bcnet.load(tmp_path / "slim", network)
    assert slim(torch.zeros(2, 1, 8, 8)).shape == (2, 3)


def test_other_forms_say_how_to_have_them(made: Path) -> None:
    told = run("export", str(made), "--to", "onnx")
    assert told.exit_code == 2
    call = f"bcnet.slim(..., out={str(made)!r}).export(FOLDER, to='onnx')"
    assert told.stderr == f"error: {made} was made from Python, and onnx needs the network's own code: {call}\n"


def test_another_budget_says_how_to_have_it(made: Path) -> None:
    told = run("pick", str(made), "--budget", "flops=40%")
    assert told.exit_code == 2
    call = f"bcnet.slim(..., out={str(made)!r}).pick('flops=40%')"
    assert told.stderr == f"error: {made} was made from Python, and so is what is picked from it: {call}\n"
