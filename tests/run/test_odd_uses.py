"""``bcnet.slim`` on what people really have: wrapped, pruned and half-precision networks, constants beside the weights,
odd targets, losses and data. What comes out is right, or one sentence says what is wrong and how to go on."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import bcnet
from bcnet.errors import BcnetError
from bcnet.training.retraining import evaluate

QUICK: dict[str, Any] = {
    "groups": 4,
    "least": 2,
    "search": {"evaluations": 6, "population": 3},
    "given": {"epochs": 4, "warmup": 0},
    "healing": {"steps": 1, "calibration": 1, "lr": 0.01},
    "race": {"finalists": 2, "rounds": 1},
    "retrain": {"epochs": 2, "warmup": 0},
    "compare": ["full", "uniform"],
    "threads": 1,
}
Y = torch.arange(96) % 3
X = torch.randn(96, 2, 6, 6, generator=torch.Generator().manual_seed(1)) + 2.0 * (Y - 1)[:, None, None, None]
"""The brightness of an image tells its class."""


def body(*head: nn.Module) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(2, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(), *head
    )


def classifier(logits: int = 3) -> nn.Sequential:
    return body(nn.AdaptiveAvgPool2d(1), nn.Flatten(1), nn.Linear(8, logits))


def taught(model: nn.Module) -> nn.Module:
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.1, momentum=0.9)
    for _ in range(40):
        optimizer.zero_grad()
        F.cross_entropy(model(X), Y).backward()
        optimizer.step()
    return model.eval()


@pytest.fixture(scope="module")
def knowing() -> nn.Module:
    torch.manual_seed(0)
    return taught(classifier())


def slim(model: nn.Module, **settings: Any) -> bcnet.Result:
    given: dict[str, Any] = {"train": [(X, Y)], "val": [(X, Y)], "recipe": QUICK, "progress": False, **settings}
    return bcnet.slim(model, given.pop("example", X[:1]), **given)


class Constants(nn.Module):
    """Factors of channels that are no parameters: a buffer that is not saved, and a plain attribute."""

    def __init__(self, persistent: bool | None):
        super().__init__()
        self.mean = torch.full((2, 1, 1), 0.1)
        factors = torch.linspace(0.2, 3, 8)[:, None, None]
        if persistent is None:
            self.factors = factors
        else:
            self.register_buffer("factors", factors, persistent=persistent)
        self.layers = classifier()

    def forward(self, x: Tensor) -> Tensor:
        return self.layers[1:](self.layers[0](x - self.mean) * self.factors)


@pytest.mark.parametrize("persistent", [True, False, None])
def test_constants_of_channels_are_those_of_the_channels_that_stay(persistent: bool | None, tmp_path: Path) -> None:
    """What is given back and exported is what was measured, not the same weights with other channels' constants."""
    torch.manual_seed(0)
    result = slim(taught(Constants(persistent)))
    for name, row in result.networks.items():
        assert evaluate(result.run.network(name), result.run.judged)["loss"] == pytest.approx(row["loss"], rel=1e-4)
    result.export(tmp_path / "slim")
    loaded = bcnet.load(tmp_path / "slim", lambda: Constants(persistent))
    torch.testing.assert_close(loaded(X), result.model(X))


def test_wrappers_are_taken_off(knowing: nn.Module) -> None:
    expected = slim(knowing)
    found = slim(torch.compile(nn.DataParallel(knowing)))  # type: ignore[arg-type]
    assert found.widths == expected.widths
    assert list(found.model.state_dict()) == list(expected.model.state_dict())
    space = bcnet.trace(nn.DataParallel(knowing), X[:2])
    assert type(space.build(space.min)) is nn.Sequential


def _old_weight_norm(model: nn.Sequential) -> nn.Module:
    torch.nn.utils.weight_norm(model[0])  # deprecated, and in many networks
    return taught(model)


def _weight_norm(model: nn.Sequential) -> nn.Module:
    parametrizations.weight_norm(model[0])
    return taught(model)


def _pruned(model: nn.Sequential) -> nn.Module:
    prune.l1_unstructured(taught(model)[0], "weight", 0.5)  # type: ignore[index]
    return model


@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated:FutureWarning")
@pytest.mark.parametrize("made", [_old_weight_norm, _weight_norm, _pruned])
def test_weights_that_are_computed(made: Callable[[nn.Sequential], nn.Module]) -> None:
    torch.manual_seed(0)
    model = made(classifier())
    result = slim(model)
    torch.testing.assert_close(result.run.network("full")(X), model.eval()(X))
    measured = result.networks[result.run.chosen]
    assert measured["score"] > 0.9
    assert evaluate(result.model, result.run.judged)["loss"] == pytest.approx(measured["loss"], rel=1e-4)


@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16, torch.float64])
def test_other_precisions(kind: torch.dtype, knowing: nn.Module) -> None:
    model, data = copy.deepcopy(knowing).to(kind), [(X.to(kind), Y)]
    result = slim(model, example=X[:1].to(kind), train=data, val=data)
    assert result.model(X.to(kind)).dtype == kind
    assert result.networks[result.run.chosen]["score"] > 0.9


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, lambda: torch.autocast("cpu")])
def test_blocks_that_the_call_stands_in(mode: Callable[[], Any], knowing: nn.Module) -> None:
    expected = slim(knowing)
    with mode():
        found = slim(knowing, train=[(X.clone(), Y.clone())])
        assert torch.is_grad_enabled() == (mode not in (torch.no_grad, torch.inference_mode))
    assert found.networks[found.run.chosen]["loss"] == expected.networks[expected.run.chosen]["loss"]


class Stream(IterableDataset[Any]):
    def __len__(self) -> int:
        return len(X)

    def __iter__(self) -> Iterator[Any]:
        yield from zip(X, Y, strict=True)


def test_loaders_of_all_kinds(knowing: nn.Module) -> None:
    """A last batch of one image, batches left out, a stream with a length."""
    pairs = TensorDataset(X, Y)
    for train in (DataLoader(pairs, 95), DataLoader(pairs, 40, drop_last=True), DataLoader(Stream(), 32)):
        result = slim(knowing, train=train, val=DataLoader(pairs, 95))
        assert result.networks[result.run.chosen]["score"] > 0.9


class Pair(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, x


def mse(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def errors(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().flatten(1).mean(1)


def own_errors(output: Tensor, target: Tensor) -> Tensor:
    return (output[:, 0] - target).square()


def right(output: Any, target: Tensor) -> Tensor:
    return (output[0].argmax(1) == target).float()


def with_nan(x: Tensor) -> Tensor:
    return torch.where(torch.arange(len(x))[:, None, None, None] == 3, torch.nan, x)


def quantized() -> nn.Module:
    model = classifier()
    torch.ao.nn.quantized.dynamic.Linear  # noqa: B018, it is imported lazily
    model[7] = torch.ao.nn.quantized.dynamic.Linear(8, 3)
    return model


def of(x: Tensor, y: Tensor) -> dict[str, Any]:
    return {"train": [(x, y)], "val": [(x, y)]}


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (
            lambda: {"example": (X[:1], X[:1])},
            "example holds 2 inputs, but slim takes networks of one: give a module that takes one tensor, splits it, "
            "and calls yours",
        ),
        (
            lambda: {"model": torch.jit.script(classifier())},
            "the network is a TorchScript module, which has no Python code left: give the one it was made of",
        ),
        (
            lambda: {"model": quantized()},
            "layer 7 of the network is quantized: slim it before that, and quantize the slim one",
        ),
        (
            lambda: {"model": nn.Sequential(nn.LazyConv2d(8, 3), nn.Flatten(1), nn.LazyLinear(3))},
            "Sequential has layers that take their sizes from the first input: run it once on the example input first",
        ),
        (
            lambda: of(X, Y.int()),
            "the targets are a tensor of int32 of shape (2,), but classification needs labels (n,) of int64: make them "
            "targets.long(), or give a Task with a loss and a score of your own",
        ),
        (
            lambda: of(X, F.one_hot(Y).float()),
            "the targets are a tensor of float32 of shape (2, 3), but classification needs labels (n,) of int64: make "
            "them targets.argmax(1), or give a Task with a loss and a score of your own",
        ),
        (
            lambda: of(X, Y[:, None]),
            "the targets are a tensor of int64 of shape (2, 1), but classification needs labels (n,) of int64: make "
            "them targets[:, 0].long(), or give a Task with a loss and a score of your own",
        ),
        (
            lambda: {"model": classifier(1), **of(X, Y % 2)},
            "the network gives one value, but classification needs a logit for every class: give a Task with a loss "
            "and a score of your own",
        ),
        (
            lambda: {"model": classifier(1), **of(X, Y.float()), "task": bcnet.Task(mse, errors)},
            "the task's score of an example depends on the others of its batch, with outputs (2, 1) and targets (2,): "
            "each must be scored for itself",
        ),
        (
            lambda: {"model": classifier(1), **of(X, Y.float()), "task": bcnet.Task(mse, own_errors)},
            "the task's loss holds every output against every target, as torch broadcasts outputs (2, 1) and targets "
            "(2,): make them alike, as by targets[:, None]",
        ),
        (
            lambda: {
                "model": nn.Sequential(classifier(), Pair()),
                "task": bcnet.Task(lambda o, t: F.cross_entropy(o[0], t), right, distil=F.mse_loss),
            },
            "the task's distil fails on outputs a tuple and targets a tuple: 'tuple' object has no attribute 'size'",
        ),
        (
            lambda: {"train": TensorDataset(X, Y)},
            "TensorDataset is a data set that gives single samples: torch.utils.data.DataLoader makes batches",
        ),
        (
            lambda: {"val": [(X[:2], Y[:2])]},
            "the validation data has 2 inputs, but one half is for the search and one for the choice: give at least 4, "
            "better hundreds",
        ),
        (
            lambda: {"val": [(X, Y * 0)]},
            "all targets of the validation data are the same, so it tells no network from another: shuffle before you "
            "split",
        ),
        (
            lambda: {"model": classifier(), "train": [(X, Y), (with_nan(X), Y)]},
            "batch 2 of the training data holds values that are infinite or NaN: clean it",
        ),
        (
            lambda: {"train": [(with_nan(X), Y)]},
            "the training data holds values that are infinite or NaN: clean it",
        ),
    ],
)
def test_one_sentence(given: Callable[[], dict[str, Any]], sentence: str, knowing: nn.Module) -> None:
    settings = {"model": knowing, **given()}
    with pytest.raises(BcnetError) as caught:
        slim(**settings)
    assert str(caught.value) == sentence


def test_the_advice_is_followed(knowing: nn.Module) -> None:
    """Each of these is what a sentence above asks for."""

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = knowing

        def forward(self, x: Tensor) -> Tensor:
            one, other = x.chunk(2, 1)
            return self.layers(one + 0 * other)

    double = torch.cat([X, X], 1)
    assert slim(Both(), example=double[:1], **of(double, Y)).widths
    task = bcnet.Task(mse, errors, name="MSE", higher_is_better=False)
    assert slim(classifier(1), **of(X, Y.float()[:, None]), task=task).widths
    assert slim(knowing, **of(X, F.one_hot(Y).float().argmax(1))).widths
    assert slim(knowing, val=[(X[:4], Y[:4])]).widths


@pytest.mark.parametrize(
    ("given", "note"),
    [
        (
            lambda: {"budget": "flops=150%"},
            "the network as given is within flops=150% already, so nothing has to go",
        ),
        (
            lambda: {"targets": ["flops=100%", "flops=50%"]},
            "the network as given is within flops=100% already, so nothing has to go",
        ),
        (
            lambda: {"example": torch.randn(1, 2, 12, 12)},
            "the example is 12x12, but training inputs 6x6: FLOPs, memory and latency are those of the example",
        ),
        (
            lambda: {"val": [(X[:20], Y[:20])]},
            "there are 20 validation inputs, and half of them decide, so chance has a large share: give hundreds",
        ),
        (
            lambda: {
                "task": bcnet.Task(F.cross_entropy, lambda o, t: F.cross_entropy(o, t, reduction="none"), name="NLL")
            },
            "NLL is higher with the targets of other inputs than with their own: if lower is better, say Task(..., "
            "higher_is_better=False)",
        ),
    ],
)
def test_what_may_be_a_mistake_is_noted(
    given: Callable[[], dict[str, Any]], note: str, knowing: nn.Module, capsys: pytest.CaptureFixture[str]
) -> None:
    slim(knowing, **given(), progress=True)
    assert f"note: {note}" in " ".join(capsys.readouterr().err.split())
