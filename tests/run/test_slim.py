"""``bcnet.slim``: a network, loaders, a loss and a score of one's own; regression and segmentation too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from slimmed import EXAMPLE, TINY, body, classifier, images, labels, loader
from torch import nn

import bcnet
from bcnet.errors import BcnetError


def test_five_lines(tmp_path: Path) -> None:
    model, train, val = classifier(), loader(labels(), shuffle=True), loader(labels())
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    result = bcnet.slim(model, EXAMPLE, train, val, budget="flops=50%", recipe=TINY, progress=False)
    assert list(result.widths) == ["0", "3"]
    assert result.networks["found"]["costs"]["flops"] <= result.networks["full"]["costs"]["flops"] / 2
    assert list(result.networks) == ["full", "uniform", "balanced", "found"]
    assert [m.out_channels for m in result.model if isinstance(m, nn.Conv2d)] == list(result.widths.values())
    assert result.model(images(5)).shape == (5, 3)
    costs = [trial["costs"]["flops"] for trial in result.front]
    assert costs == sorted(costs)
    assert result.report(tmp_path / "report.html").stat().st_size > 1000
    result.export(tmp_path / "slim")
    again = bcnet.load(tmp_path / "slim", classifier)
    torch.testing.assert_close(again.eval()(images(5)), result.model(images(5)))
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_batches_too_large_for_the_memory_are_refused_before_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And batches of the size that the sentence names are not."""
    (tmp_path / "meminfo").write_text("MemTotal: 900 kB\nMemAvailable: 150 kB\nSwapFree: 50 kB\n")
    monkeypatch.setattr("bcnet.run.memory.MEMINFO", tmp_path / "meminfo")
    short = {**TINY, "compare": []}
    with pytest.raises(BcnetError, match=r"a training step at 48 inputs .* 200 KiB are free: take batches of \d+ "):
        bcnet.slim(classifier(), EXAMPLE, loader(labels(), 48), loader(labels()), recipe=short, progress=False)
    with pytest.raises(BcnetError) as error:
        bcnet.slim(classifier(), EXAMPLE, loader(labels(), 48), loader(labels()), recipe=short, progress=False)
    fits = int(str(error.value).partition("take batches of ")[2].split()[0])
    assert bcnet.slim(classifier(), EXAMPLE, loader(labels(), fits), loader(labels()), recipe=short, progress=False)


def test_regression() -> None:
    targets = images().mean((2, 3))
    task = bcnet.Task(loss=F.mse_loss, score=lambda output, target: -(output - target).square().mean(1))
    model = body(nn.AdaptiveAvgPool2d(1), nn.Flatten(1), nn.Linear(8, 2))
    data = loader(targets)
    result = bcnet.slim(model, EXAMPLE, data, data, task=task, recipe=TINY, progress=False)
    found = result.networks["found"]
    assert found["score"] == pytest.approx(-found["loss"], rel=1e-4)
    assert result.model(images(4)).shape == (4, 2)


def test_segmentation() -> None:
    """A class for every pixel; the score of an image is its share of right pixels."""
    targets = (images()[:, 0] > 0).long()
    task = bcnet.Task(
        loss=F.cross_entropy,
        score=lambda output, target: (output.argmax(1) == target).float().mean((1, 2)),
        distil=lambda output, teacher: F.mse_loss(output, teacher),
    )
    model = body(nn.Conv2d(8, 2, 1))
    settings = {**TINY, "distillation": {"alpha": 0.5}}
    data = loader(targets)
    result = bcnet.slim(model, EXAMPLE, data, data, test=data, task=task, recipe=settings, progress=False)
    assert result.model(images(4)).shape == (4, 2, 6, 6)
    assert 0 <= result.networks["found"]["score"] <= 1
    assert result.networks["found"]["scored_on"] == "test"


def test_the_same_call_goes_on_where_it_stopped(tmp_path: Path) -> None:
    def call(val: Any) -> bcnet.Result:
        train = loader(labels(), shuffle=True)
        return bcnet.slim(classifier(), EXAMPLE, train, val, recipe=TINY, out=tmp_path / "run", progress=False)

    class Fails:
        calls = 0

        def __len__(self) -> int:
            return 1

        def __iter__(self) -> Any:
            self.calls += 1
            if self.calls == 4:  # after training, when widths are scored: trace looks three times
                raise ConnectionError("the server is gone")
            yield images(), labels()

    with pytest.raises(ConnectionError):
        call(Fails())
    first = call([(images(), labels())])
    assert first.run.done("compare")
    again = call([(images(), labels())])
    assert again.widths == first.widths


def test_a_folder_of_another_recipe_or_network_is_refused(tmp_path: Path) -> None:
    data = [(images(), labels())]
    out = tmp_path / "run"
    bcnet.slim(classifier(), EXAMPLE, data, data, recipe=TINY, out=out, progress=False)
    with pytest.raises(BcnetError) as caught:
        bcnet.slim(classifier(), EXAMPLE, data, data, recipe={**TINY, "seed": 4}, out=out, progress=False)
    assert str(caught.value) == f"{out} holds a run with another seed: use the same recipe, or another folder"
    other = nn.Sequential(nn.Conv2d(2, 6, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(1), nn.Linear(6, 3))
    with pytest.raises(BcnetError) as caught:
        bcnet.slim(other, EXAMPLE, data, data, recipe=TINY, out=out, progress=False)
    assert str(caught.value) == f"{out} holds a run with another network: choose another folder"


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"example": [1, 2]}, "example must be one batch of inputs, such as torch.randn(1, 3, 32, 32)"),
        ({"example": torch.randn(1, 5, 6, 6)}, "the model does not run on the example: "),
        ({"train": [(images(), labels() + 7)]}, "label 9 is out of range: 3 classes have labels 0..2"),
        ({"model": body(nn.Conv2d(8, 3, 1))}, "the network gives a tensor of float32 of shape (2, 3, 6, 6), but "),
        ({"recipe": {"epochs": 3}}, "unknown key epochs: "),
        ({"budget": "speed=3"}, "unknown budget 'speed': "),
        ({"task": bcnet.Task(F.cross_entropy, lambda o, t: o)}, "the task's score gives "),
        ({"task": bcnet.Task(F.mse_loss, lambda o, t: o[:, 0])}, "the task's loss fails on outputs "),
    ],
)
def test_mistakes_get_one_sentence(given: dict[str, Any], sentence: str) -> None:
    data = [(images(), labels())]
    settings = {"model": classifier(), "example": EXAMPLE, "train": data, "val": data, "recipe": TINY, **given}
    with pytest.raises(BcnetError) as caught:
        bcnet.slim(**settings, progress=False)
    assert str(caught.value).startswith(sentence)


def test_importing_bcnet_imports_no_torch() -> None:
    import subprocess
    import sys

    code = "import sys, bcnet; assert 'torch' not in sys.modules; print(bcnet.__all__)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "slim" in found.stdout
    with pytest.raises(AttributeError, match=r"^module 'bcnet' has no attribute 'slam'$"):
        _ = bcnet.slam  # type: ignore[attr-defined]


def test_everything_bcnet_offers_is_there_and_documented() -> None:
    """Also in a process that has imported nothing else."""
    import subprocess
    import sys

    code = (
        "import bcnet; print([n for n in bcnet.__all__ if n[0] != '_' and len(getattr(bcnet, n).__doc__ or '') < 20])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout == "[]\n"


def test_small_batches_of_a_loader_are_scored_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batch norm uses the statistics of the scoring batch, so batches of a few images would tell little."""
    from bcnet.run.stages import scoring

    sizes: list[int] = []

    opened = scoring.open_evaluator

    def watched(net: Any, batches: Any, *more: Any, **settings: Any) -> Any:
        sizes.extend(len(x) for x, _ in batches)
        return opened(net, batches, *more, **settings)

    monkeypatch.setattr(scoring, "open_evaluator", watched)
    settings = {**TINY, "compare": [], "loading": {"eval_batch_size": 12}}
    bcnet.slim(classifier(), EXAMPLE, loader(labels()), loader(labels(), 5), recipe=settings, progress=False)
    assert sizes == [12, 12]  # of half of 48 images: the others judge what is found
