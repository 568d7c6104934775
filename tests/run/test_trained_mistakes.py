"""What a run from a trained network refuses: weights that do not fit, recipes that cannot be meant, no logits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import terminal
import tinyrun
import torch
from safetensors.torch import load_file, save_file

from bcnet.errors import BcnetError

pytestmark = pytest.mark.usefixtures("one_thread")


def altered(weights: Path, folder: Path, change: Any) -> Path:
    state = load_file(weights)
    change(state)
    path = folder / "altered.safetensors"
    save_file(state, path)
    return path


def _half(state: dict[str, torch.Tensor]) -> None:
    for name in list(state)[::2]:
        del state[name]


def _other(state: dict[str, torch.Tensor]) -> None:
    for name in list(state):
        state[f"body.{name}"] = state.pop(name)


def _wide(state: dict[str, torch.Tensor]) -> None:
    state["8.weight"] = torch.zeros(10, 9)


def _nan(state: dict[str, torch.Tensor]) -> None:
    state["8.weight"] = torch.full_like(state["8.weight"], torch.nan)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (_half, " tensors are missing ("),
        (_other, " are unexpected (body."),
        (_wide, "does not fit Sequential: 1 has another shape (8.weight is (10, 9), not (10, 8))"),
        (_nan, "holds numbers that are not finite in 8.weight: take an earlier checkpoint"),
    ],
)
def test_weights_that_do_not_fit(tmp_path: Path, weights: Path, change: Any, sentence: str) -> None:
    run = tinyrun.trained(tmp_path, altered(weights, tmp_path, change))
    with pytest.raises(BcnetError) as caught:
        tinyrun.work(run)
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not run.done("trace")


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        (
            {"start": "scratch", "weights": "a.pt"},
            "weights needs start: trained, as start: scratch throws the weights of the network away",
        ),
        (
            {"pretrained": True, "weights": "a.pt"},
            "weights and pretrained both say where the weights come from: keep one of them",
        ),
        ({"widen": 1.5}, "widen needs start: scratch, as a trained network has no weights for more channels"),
        ({"race": {"rounds": 0}}, "race.rounds is 0, but it must be at least 1"),
        ({"healing": {"steps": 0}}, "healing.steps is 0, but it must be at least 1"),
        ({"allot": "full"}, "allot is 'full', but the full network is not slim: name another, such as uniform"),
        (
            {"allot": "l2-global", "start": "scratch"},
            "allot is 'l2-global', which judges trained channels: it needs start: trained",
        ),
        ({"least": 0}, "least is 0, but it must be at least 1"),
        ({"keep": "l3"}, "keep is 'l3', but it must be l1, l2, bn-scale, taylor, fpgm, lamp or random"),
    ],
)
def test_recipes_that_cannot_be_meant(tmp_path: Path, settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(BcnetError) as caught:
        tinyrun.trained(tmp_path, **settings)
    assert str(caught.value) == sentence


def test_published_weights_of_the_zoo_are_refused() -> None:
    result = terminal.run("run", "zoo:digits_cnn", "--data", "digits", "--pretrained", "--out", "nowhere")
    assert result.exit_code == 2
    assert "error: there are no pretrained weights of zoo:digits_cnn: give a file of weights, or take " in result.output
    assert not Path("nowhere").exists()


def test_a_network_that_gives_no_logits(tmp_path: Path) -> None:
    path = tmp_path / "maps.py"
    path.write_text(
        "from torch import nn\n\ndef maps():\n"
        "    return nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Conv2d(8, 10, 3))\n"
        "maps.input_shape = (1, 8, 8)\n"
    )
    run = tinyrun.trained(tmp_path, model=f"{path}:maps")
    with pytest.raises(BcnetError) as caught:
        tinyrun.work(run)
    assert str(caught.value).startswith(
        "the network gives a tensor of float32 of shape (2, 10, 4, 4), but classification"
    )
    assert not run.done("given")
