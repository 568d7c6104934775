"""Exports of a run: every format gives the network's own outputs, and comes back."""

from __future__ import annotations

import json

import numpy as np
import pytest
import terminal
import torch
from torch import nn

import bcnet
import bcnet.run.export
from bcnet.errors import BcnetError
from bcnet.run.export import OnnxNetwork, export_run, to_onnx, to_pt2
from bcnet.run.recipe import Recipe
from bcnet.run.session import Run, facts
from bcnet.space.network import trace


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Run:
    """A run whose network was "found" without a search."""
    folder = tmp_path_factory.mktemp("run")
    recipe = Recipe.read("digits")
    Run.create(folder, recipe, facts(["bcnet", "run"], recipe, "cpu"))
    run = Run(folder, device="cpu")
    widths = [(low + high) // 2 for low, high in zip(run.space.min, run.space.max, strict=True)]
    found = {"name": "found", "scored_on": "test", "score": 0.9, "loss": 0.3, "history": [], "widths": widths}
    run.write("retrain/found", {**found, "costs": run.cost_of(widths)}, run.fresh(widths).state_dict())
    run.write("retrain", {"networks": ["found"], "chosen": "found"})
    return run


def images(run: Run) -> torch.Tensor:
    return next(iter(run.data.test.batches(0)))[0][:5]


def test_torch(run):
    result = export_run(run)
    assert result["files"] == ["widths.json", "weights.safetensors", "MODEL.md"]
    assert set(result["latency_ms"]) == {"original", "slim"}
    assert all(value > 0 for value in result["latency_ms"].values())
    x = images(run)
    assert torch.equal(bcnet.load(run.path("export"))(x), run.network("found").cpu()(x))
    known = json.loads(run.path("export", "widths.json").read_text())
    assert known["source"] == "zoo:digits_cnn"
    assert known["inputs"] == [[1, 8, 8]]
    assert known["classes"] == 10
    assert known["normalisation"] == {"mean": [4.884], "std": [6.017]}


@pytest.mark.parametrize("kind", ["onnx", "pt2"])
def test_command(run, kind, tmp_path):
    result = terminal.run("export", str(run.folder), "--to", kind, "--out", str(tmp_path), "--json")
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout)
    assert told["files"] == ["widths.json", "weights.safetensors", f"model.{kind}", "MODEL.md"]
    assert 0 <= told["difference"] < 1e-5
    assert told["any_batch"] is True
    x = images(run)[:3]
    path = tmp_path / f"model.{kind}"
    found = OnnxNetwork(path)(x)[0] if kind == "onnx" else torch.export.load(str(path)).module()(x)
    np.testing.assert_allclose(found.detach(), run.network("found").cpu()(x).detach(), atol=1e-5)


def test_an_onnx_file_says_how_it_is_used_without_bcnet(run, tmp_path, monkeypatch, capsys):
    export_run(run, "onnx", tmp_path)
    card = (tmp_path / "MODEL.md").read_text("utf-8")
    assert "| flops |" in card
    assert "90.00 % accuracy on test images" in card
    session = pytest.importorskip("onnxruntime").InferenceSession(str(tmp_path / "model.onnx"))
    assert [output.name for output in session.get_outputs()] == ["logits"]
    facts = json.loads(session.get_modelmeta().custom_metadata_map["bcnet"])
    assert facts == json.loads((tmp_path / "widths.json").read_text())["facts"]
    assert facts["class_names"] == list("0123456789")
    assert facts["preprocessing"]["values"] == "0 to 16"
    monkeypatch.chdir(tmp_path)
    code = card.split("```python\n")[1].split("```")[0]
    exec(code, {})
    assert capsys.readouterr().out.strip() in facts["class_names"]


def test_command_for_people(run, tmp_path):
    result = terminal.run("export", str(run.folder), "--out", str(tmp_path))
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith(f"wrote widths.json, weights.safetensors, MODEL.md to {tmp_path}")
    assert "latency (torch, CPU, threads: " in result.stdout
    assert "times as fast" in result.stdout


class Stubborn(nn.Module):
    """Its forward knows its width by heart, so it is built from its graph."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(3, 16, 1), nn.Linear(16, 10)

    def forward(self, x):
        return self.head(self.conv(x).mean((2, 3)).reshape(-1, 16))


@pytest.mark.filterwarnings("ignore:Stubborn itself")
def test_network_built_from_its_graph(tmp_path):
    x = torch.randn(4, 3, 8, 8)
    space = trace(Stubborn(), x[:1])
    assert not space.own_class
    network = space.build(space.min).eval()
    difference, any_batch = to_onnx(network, (x,), tmp_path / "model.onnx")
    assert difference < 1e-5
    assert any_batch
    assert to_pt2(network, (x,), tmp_path / "model.pt2") == (0.0, True)


class FixedBatch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv2d(3, 2, 3)

    def forward(self, x):
        return self.layer(x.view(4, 3, 8, 8)).mean((2, 3))


def test_network_tied_to_a_batch_size_says_so(tmp_path):
    x = torch.randn(4, 3, 8, 8)
    assert to_pt2(FixedBatch(), (x,), tmp_path / "model.pt2")[1] is False
    assert to_onnx(FixedBatch(), (x,), tmp_path / "model.onnx")[1] is False


def test_a_file_that_differs_is_removed(run, tmp_path):
    class Random(nn.Module):
        def forward(self, x):
            return x + torch.rand_like(x)

    with pytest.raises(BcnetError, match=r"model.pt2 differed from the network by .* so it was removed") as error:
        to_pt2(Random(), (torch.randn(2, 3),), tmp_path / "model.pt2")
    assert "more than the tolerance of 0.001 allows" in str(error.value)
    assert not (tmp_path / "model.pt2").exists()


def test_unknown_format(run):
    with pytest.raises(BcnetError) as error:
        export_run(run, "onnxx")
    assert str(error.value) == "unknown format 'onnxx': there are torch, onnx, pt2"


def test_missing_onnxruntime(run, monkeypatch):
    def missing(name):
        raise ModuleNotFoundError(name=name)

    monkeypatch.setattr(bcnet.latency.onnx.importlib, "import_module", missing)
    with pytest.raises(BcnetError) as error:
        export_run(run, "onnx")
    assert str(error.value) == 'onnx is not installed: pip install "bcnet[onnx]"'


def test_unfinished_run(run, tmp_path):
    recipe = Recipe.read("digits")
    Run.create(tmp_path / "new", recipe, facts(["bcnet"], recipe, "cpu"))
    result = terminal.run("export", str(tmp_path / "new"))
    assert result.exit_code == 2
    assert result.stderr == f"error: {tmp_path}/new has no retrain.json yet: resume the run to have it made\n"
