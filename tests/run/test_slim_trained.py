"""``bcnet.slim`` from trained networks: their own weights, several targets, another point, a task of one's own."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from slimmed import EXAMPLE, TINY, body, classifier, images, labels
from torch import Tensor, nn

import bcnet
from bcnet.errors import BcnetError
from bcnet.report.words import comparison
from bcnet.run.report import report_data

TRAINED: dict[str, Any] = {
    **{key: value for key, value in TINY.items() if key not in ("start", "supernet")},
    "least": 2,
    "given": {"epochs": 8, "warmup": 0},
    "healing": {"steps": 1, "calibration": 1},
    "race": {"finalists": 2, "rounds": 1},
    "retrain": {"epochs": 2, "warmup": 0},
}


def bright(n: int = 96) -> list[tuple[Tensor, Tensor]]:
    """Images of which the brightness of a channel tells the class."""
    targets = torch.arange(n) % 3
    return [(images(n) + 2.0 * (targets - 1)[:, None, None, None], targets)]


@pytest.fixture(scope="module")
def knowing() -> nn.Module:
    """A classifier that has learnt."""
    torch.manual_seed(0)
    return taught(classifier())


def taught(model: nn.Module) -> nn.Module:
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    for _ in range(40):
        for x, y in bright():
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
    return model.eval()


def test_the_models_own_weights_are_used(knowing: nn.Module, tmp_path: Path) -> None:
    data, out = bright(), tmp_path / "run"
    result = bcnet.slim(knowing, EXAMPLE, data, data, recipe=TRAINED, seed=3, out=out, progress=False)
    assert result.run.read("given")["knew"] is True
    assert result.run.recipe.seed == 3
    for name, tensor in knowing.state_dict().items():
        assert torch.equal(tensor, result.run.tensors("given")[name])
    assert result.report() == out / "report.html"
    shown = repr(result).splitlines()
    assert shown[0].startswith("your network: ")
    assert [line.split()[0] for line in shown[1:4]] == ["full", "uniform", "found"]
    assert sum(line.endswith("  ships") for line in shown) == 1
    assert shown[4:] == comparison(report_data(result.run))
    assert " scaling all layers alike " in shown[4]
    html = result._repr_html_()
    assert html.count("<tr>") == 3
    assert "% accuracy" in html
    assert html.endswith(f"<p>{shown[-1]}</p>")


def test_another_budget_is_picked_from_the_scores_that_are_there(knowing: nn.Module, tmp_path: Path) -> None:
    data, out = bright(), tmp_path / "run"
    result = bcnet.slim(knowing, EXAMPLE, data, data, recipe=TRAINED, out=out, progress=False)
    point = result.front[0]
    picked = result.pick(f"flops={point['costs']['flops']}", point["widths"], progress=False)
    assert picked.run.read("retrain/found")["widths"] == point["widths"]
    assert list(picked.networks) == ["full", "uniform", "found"]
    assert picked.model(images(2)).shape == (2, 3)
    assert picked.report().parent.parent == out / "targets"
    with pytest.raises(BcnetError) as caught:
        result.pick(0.4)  # type: ignore[arg-type]
    assert str(caught.value) == 'budget is 0.4, but it must be a text such as "flops=40%"'


def test_targets_from_python(knowing: nn.Module, tmp_path: Path) -> None:
    data = bright()
    asked = ["flops=70%", "flops=40%"]
    result = bcnet.slim(
        knowing, EXAMPLE, data, data, targets=asked, recipe=TRAINED, out=tmp_path / "run", progress=False
    )
    assert list(result.targets) == asked
    costs = [one.networks[one.run.chosen]["costs"]["flops"] for one in result.targets.values()]
    full = result.targets["flops=70%"].networks["full"]["costs"]["flops"]
    assert costs[0] <= 0.7 * full
    assert costs[1] <= 0.4 * full
    assert result.targets["flops=40%"].model(images(2)).shape == (2, 3)
    assert repr(result).startswith("flops=70%: your network: ")
    assert "<h4>flops=40%</h4>" in result._repr_html_()
    page = result.report()
    assert page == tmp_path / "run" / "report.html"
    assert (tmp_path / "run" / "targets" / "flops-40pc" / "report.html").is_file()
    with pytest.raises(BcnetError) as caught:
        _ = result.model
    assert str(caught.value) == "there is a slim network for every target: take targets['flops=70%']"


def test_a_task_without_a_teachers_loss_learns_from_the_targets(capsys: pytest.CaptureFixture[str]) -> None:
    """Its score has a name and a unit, of which less is better."""
    torch.manual_seed(0)
    x = images(96)
    data = [(x, 10 * x.mean((2, 3)))]
    task = bcnet.Task(
        loss=F.mse_loss,
        score=lambda output, target: (output - target).abs().mean(1),
        name="MAE",
        unit="mm",
        higher_is_better=False,
    )
    model = body(nn.AdaptiveAvgPool2d(1), nn.Flatten(1), nn.Linear(8, 2))
    settings = {**TRAINED, "given": {"epochs": 60, "lr": 0.05, "warmup": 0}}
    result = bcnet.slim(model, EXAMPLE, data, data, task=task, recipe=settings)
    told = " ".join(capsys.readouterr().err.split())
    assert re.search(r"plan: about \d+ s \(.*\), memory: .* disk: .*given: score the network .* left in all\)", told)
    assert "the task has no `distil` loss, so slim networks learn from the targets alone" in told
    assert "the network as given knows no more than chance (MAE " in told
    networks = result.networks
    assert networks["found"]["score"] < 0  # negated, so that higher is better wherever networks are compared
    shown = repr(result)
    assert f"{-networks['found']['score']:.4g}\N{NO-BREAK SPACE}mm MAE" in shown
    assert "-0" not in shown.partition("interval")[0]


class Plain(nn.Module):
    pass


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"budget": 50}, 'budget is 50, but it must be a text such as "flops=50%", or a list of them'),
        ({"budget": []}, 'budget is [], but it must be a text such as "flops=50%", or a list of them'),
        ({"targets": [0.5]}, 'targets is [0.5], but it must be a text such as "flops=50%", or a list of them'),
        ({"budget": "flops=0.5"}, "budget 'flops=0.5' is below 1: did you mean flops=50%?"),
        (
            {"budget": "flops=50%", "targets": ["flops=40%"]},
            "targets and budgets both say how slim the network must be: keep one of them",
        ),
        ({"seed": -1}, "seed is -1, but it must be at least 0"),
        ({"model": Plain}, "model is the class Plain, not a network: make one, Plain(...)"),
        ({"model": {}}, "model is a state_dict: load it into your network, and give that"),
        ({"model": F.relu}, "model is a function, but it must be a network, an nn.Module"),
        (
            {"model": nn.ReLU()},
            "model has no parameters, so there is nothing to slim: give a network with convolutions",
        ),
        (
            {"model": classifier().requires_grad_(False)},
            "all parameters of model are frozen, so nothing can be trained: model.requires_grad_(True)",
        ),
        ({"train": []}, "a loader gives no batches: its data set is empty, or smaller than a batch it drops"),
        ({"val": []}, "a loader gives no batches: its data set is empty, or smaller than a batch it drops"),
    ],
)
def test_what_cannot_be_slimmed(given: dict[str, Any], sentence: str) -> None:
    data = [(images(), labels())]
    settings = {"model": classifier(), "example": EXAMPLE, "train": data, "val": data, "recipe": TRAINED, **given}
    with pytest.raises(BcnetError) as caught:
        bcnet.slim(**settings, progress=False)
    assert str(caught.value) == sentence


def test_weights_that_are_no_numbers() -> None:
    model = classifier()
    with torch.no_grad():
        model[0].weight[0] = torch.nan
    data = [(images(), labels())]
    with pytest.raises(BcnetError) as caught:
        bcnet.slim(model, EXAMPLE, data, data, recipe=TRAINED, progress=False)
    assert str(caught.value) == (
        "the network as given holds numbers that are not finite in 0.weight: give weights that were trained well, or "
        "a network that is not trained yet"
    )


def test_a_folder_goes_on_with_what_it_was_given_only(tmp_path: Path) -> None:
    """Same widths, yet another activation, other weights, data or task; and nothing at all once it is finished."""

    def given(activation: type[nn.Module] = nn.ReLU) -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Conv2d(2, 8, 3),
            activation(),
            nn.Conv2d(8, 8, 3),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(1),
            nn.Linear(8, 3),
        )

    out, data, shifted = tmp_path / "run", bright(), [(bright()[0][0] + 1, bright()[0][1])]
    settings = {**TRAINED, "given": {"epochs": 1, "warmup": 0}, "retrain": {"epochs": 1, "warmup": 0}}

    def call(model: nn.Module, train: Any = data, task: bcnet.Task | None = None) -> bcnet.Result:
        return bcnet.slim(model, EXAMPLE, train, data, task=task, recipe=settings, out=out, progress=False)

    first = call(given())
    task = bcnet.Task(F.cross_entropy, lambda output, target: (output.argmax(1) == target).float())
    for words, refused in (
        ("another network", lambda: call(given(nn.SiLU))),
        ("other weights", lambda: call(taught(given()))),
        ("other data", lambda: call(given(), shifted)),
        ("another task", lambda: call(given(), task=task)),
    ):
        with pytest.raises(BcnetError) as caught:
            refused()
        assert str(caught.value) == f"{out} holds a run with {words}: choose another folder"
    assert call(given()).networks == first.networks
