"""The benchmarks that start from trained networks: training side by side, base networks, tables and rivals."""

from __future__ import annotations

import copy
import importlib
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def benchmark() -> Any:
    """Imports a benchmark by name, as a script there imports another."""
    sys.path.insert(0, str(BENCHMARKS))

    def load(name: str) -> ModuleType:
        if name in ("channels", "pruners", "inherited_table", "inherited_report", "rivals", "rivals_fifth"):
            pytest.importorskip("torch_pruning", reason="Torch-Pruning is a rival, not a dependency")
        return importlib.import_module(name)

    yield load
    sys.path.remove(str(BENCHMARKS))


@pytest.fixture(scope="module")
def base(benchmark: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of tiny networks that were trained a little."""
    folder = tmp_path_factory.mktemp("base")
    flags = ["--quick", "--out", str(folder), "--most-epochs", "2", "--batch", "120", "--lr", "0.05", "--cutout", "2"]
    benchmark("rivals_base").main([*flags, "--warmup", "0.5"])
    return folder


class Exact(nn.Module):
    """Two layers without batch norm in double precision: rounding does not grow in it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 14 * 14, 10)).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x.double())


def test_students_learn_what_sgd_teaches_each_alone(benchmark: Any) -> None:
    side, images = benchmark("side_by_side"), benchmark("parts").Images.synthetic("cpu")
    torch.manual_seed(0)
    models = [Exact(), Exact()]
    teacher = Exact()
    alone = copy.deepcopy(models)
    training = side.Training(epochs=2, batch=60, lr=0.02, decay_all=True, taught=0.7, temperature=3.0)
    side.SideBySide(models, images, training, teacher).run()
    for model, trained in zip(alone, models, strict=True):
        sgd = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9, nesterov=True, weight_decay=5e-4)
        done = 0
        for epoch in range(2):
            for x, y in images.train(60, 0)(epoch):
                sgd.param_groups[0]["lr"] = training.rate(done / images.batches(60))
                sgd.zero_grad()
                logits, soft = model(x), (teacher(x) / 3).softmax(1)
                taught = functional.kl_div((logits / 3).log_softmax(1), soft, reduction="batchmean")
                (0.3 * functional.cross_entropy(logits, y) + 0.7 * 9 * taught).backward()
                sgd.step()
                done += 1
        for a, b in zip(model.parameters(), trained.parameters(), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def test_steps_in_a_context_leave_no_trace(benchmark: Any) -> None:
    side, parts = benchmark("side_by_side"), benchmark("parts")
    torch.manual_seed(0)
    together = side.SideBySide(
        [parts.network("vgg19_cifar", True)], parts.Images.synthetic("cpu"), side.Training(), None
    )
    before = copy.deepcopy(together.students[0].model.state_dict())
    with together.unchanged():
        together.heal(2)
        after = together.students[0].model.state_dict()
        assert any(not torch.equal(after[name], old) for name, old in before.items())
    for name, old in before.items():
        assert torch.equal(together.students[0].model.state_dict()[name], old)


def test_rate_rises_and_falls(benchmark: Any) -> None:
    training = benchmark("side_by_side").Training(epochs=10, lr=0.1, warmup=2)
    assert training.rate(1) == pytest.approx(0.05, rel=1e-2)
    assert training.rate(2) == pytest.approx(0.1)
    assert training.rate(6) == pytest.approx(0.05)
    assert training.rate(10) == pytest.approx(0, abs=1e-9)


def test_base_networks_are_kept_as_they_were_evaluated(benchmark: Any, base: Path) -> None:
    report = json.loads((base / "base.json").read_text())
    side, images = benchmark("side_by_side"), benchmark("parts").Images.synthetic("cpu")
    assert report["training"]["epochs"] == 2
    assert [row["epoch"] for row in report["history"]] == [1, 2]
    for name, result in report["networks"].items():
        loaded = benchmark("rivals_base").load_base(base, name, True)
        assert side.evaluate(loaded, images.test) == result["test"]


def test_large_states_are_saved_in_parts(benchmark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = benchmark("rivals_base")
    monkeypatch.setattr(module, "PART", 60_000)
    state = module.half(benchmark("parts").network("vgg19_cifar", True).state_dict())
    files = module.save_base(tmp_path, "vgg19_cifar", state)
    assert len(files) > 1
    assert max((tmp_path / file).stat().st_size for file in files) < 60_000 + 8_000
    loaded = module.load_base(tmp_path, "vgg19_cifar", True).state_dict()
    assert all(torch.equal(loaded[name].float(), tensor.float()) for name, tensor in state.items())


def test_cut_networks_are_the_channels_kept(benchmark: Any, base: Path) -> None:
    channels, parts = benchmark("channels"), benchmark("parts")
    model = benchmark("rivals_base").load_base(base, "vgg19_cifar", True)
    images = parts.Images.synthetic("cpu")
    space = parts.space_of(model, images)
    cutter = channels.Cutter(model, space)
    widths = parts.uniform(space, 0.4 * cutter.flops(space.max))
    kept = cutter.best(widths, cutter.importance())
    cut = cutter.cut(kept)
    assert torch.equal(cut.conv1.conv.weight, model.conv1.conv.weight[kept[0]])
    assert torch.equal(cut.conv2.conv.weight, model.conv2.conv.weight[kept[1]][:, kept[0]])
    assert torch.equal(cut.classifier.weight, model.classifier.weight[:, kept[-1]])
    assert cutter.params(widths) == sum(p.numel() for p in cut.parameters())


def test_published_widths_come_in_order_of_first_use(benchmark: Any, tmp_path: Path) -> None:
    file = tmp_path / "widths.json"
    file.write_text(json.dumps({"net": {"1M": {"widths": "12 9 6:43/7 12:44/86/28 16:528 896"}}}))
    found = benchmark("inherited_table").published_widths(file, "net", "1M")
    assert found.tolist() == [12, 9, 43, 6, 7, 44, 12, 86, 28, 528, 16, 896]


@pytest.mark.parametrize("method", ["tp-local-l2", "tp-global-bn", "tp-isomorphic-taylor"])
def test_pruners_fill_the_budget(benchmark: Any, base: Path, method: str) -> None:
    channels, parts = benchmark("channels"), benchmark("parts")
    model = benchmark("rivals_base").load_base(base, "vgg19_cifar", True)
    images = parts.Images.synthetic("cpu")
    cutter = channels.Cutter(model, parts.space_of(model, images))
    flops = 0.5 * cutter.flops(cutter.space.max)
    kept = benchmark("pruners").prune(cutter, method, flops, images.val)
    found = cutter.flops(np.array([len(stay) for stay in kept]))
    assert 0.85 * flops <= found <= flops  # single channels of a tiny network are large
    assert cutter.cut(kept)(images.test[0][0][:2]).shape == (2, 10)


@pytest.mark.parametrize("method", ["tp-local-l2", "tp-global-l2", "tp-isomorphic-fpgm"])
def test_the_widest_network_that_holds_is_found_on_the_way_that_is_pruned(
    benchmark: Any, base: Path, method: str
) -> None:
    channels, parts = benchmark("channels"), benchmark("parts")
    model = benchmark("rivals_base").load_base(base, "vgg19_cifar", True)
    cutter = channels.Cutter(model, parts.space_of(model, parts.Images.synthetic("cpu")))
    limit = 0.5 * cutter.flops(cutter.space.max)

    def flops(kept: Any) -> int:
        return int(cutter.flops(np.array([len(stay) for stay in kept])))

    kept = benchmark("pruners").widest(cutter, method, lambda kept: flops(kept) <= limit, 9)
    assert 0.85 * limit <= flops(kept) <= limit
    assert benchmark("pruners").widest(cutter, method, lambda kept: False, 9) is None


def test_a_table_goes_on_where_it_ended(benchmark: Any, base: Path, tmp_path: Path, capsys: Any) -> None:
    table, report = benchmark("inherited_table"), benchmark("inherited_report")
    planned, out = tmp_path / "networks.json", tmp_path / "table.jsonl"
    planned.write_text(json.dumps({f"n{k}": [4] * 25 if k == 0 else _tiny(k) for k in range(3)}))
    flags = ["--quick", "--base", str(base), "--networks", str(planned), "--out", str(out), "--epochs", "1"]
    flags += ["--batch", "180", "--heals", "1", "--at-once", "2"]
    table.main([*flags, "--seconds", "0"])
    assert "3 networks are left for another call" in capsys.readouterr().out
    table.main(flags)
    table.main(flags)
    rows = [row for row in table.read_rows(out) if "name" in row]
    assert [row["name"] for row in rows] == ["n0", "n1", "n2"]
    assert {"flops", "balanced", "cut_ce_5000", "steps1_kl_1000"} <= set(rows[0]["opinions"])
    lines = report.table(rows)
    assert lines[0].startswith("3 networks; test accuracy ")
    assert any(line.startswith("| steps1_ce_5000 | ") for line in lines)


def _tiny(more: int) -> list[int]:
    """Widths of the tiny MobileNetV2 that differ with ``more``."""
    return [4] * 24 + [20 * more]


def test_rivals_are_planned_and_tuned(benchmark: Any, base: Path, tmp_path: Path, capsys: Any) -> None:
    rivals = benchmark("rivals")
    plan, ours, out = tmp_path / "plan.json", tmp_path / "ours.json", tmp_path / "results.jsonl"
    common = ["--quick", "--base", str(base), "--networks", "vgg19_cifar", "--budgets", "50%"]
    methods = ["uniform", "uniform8", "random-0", "random-1", "tp-local-l2", "published", "bcnet-uniform"]
    methods += ["bcnet-isomorphic"]
    rivals.main(["plan", *common, "--out", str(plan), "--methods", *methods])
    entries = json.loads(plan.read_text())["vgg19_cifar"]["50%"]
    assert set(entries) == set(methods) - {"published"}
    ours.write_text(json.dumps({"vgg19_cifar": {"50%": {"ours": {"widths": entries["uniform"]["widths"]}}}}))
    tune = ["tune", *common, "--out", str(out), "--plans", str(plan), str(ours), "--epochs", "1", "--batch", "180"]
    rivals.main([*tune, "--seeds", "0", "1"])
    rivals.main([*tune, "--seeds", "0", "1"])
    rows = [row for row in rivals.read_rows(out) if "method" in row]
    first = {row["method"]: row for row in rows if row["seed"] == 0}
    ours_made = {"bcnet-uniform", "bcnet-isomorphic"}
    assert set(first) == {"uniform", "uniform8", "random-0", "tp-local-l2", "ours"} | ours_made
    assert first["bcnet-uniform"]["widths"] == first["uniform"]["widths"]
    assert first["bcnet-uniform"]["test"] != first["uniform"]["test"]
    assert first["ours"]["same_as"] == first["tp-local-l2"]["same_as"] == "uniform"
    assert len(rows) == 14
    assert {row["method"] for row in rows if row["seed"] == 1} == set(first) - {"random-0"} | {"random-1"}


def test_a_path_trains_as_the_network_alone(benchmark: Any, base: Path) -> None:
    pytest.importorskip("torch_pruning", reason="Torch-Pruning is a rival, not a dependency")
    """Widths that are no multiples of eight: the channels beyond them stay zero, the others learn as in the network."""
    paths, side, parts = benchmark("paths"), benchmark("side_by_side"), benchmark("parts")
    images = parts.Images.synthetic("cpu")
    model = benchmark("rivals_base").load_base(base, "vgg19_cifar", True)
    space = parts.space_of(model, images)
    widths = np.minimum(space.max, np.maximum(3, space.max * 2 // 3))
    network = space.build(widths, weights_of=model, keep="l2").train()
    training = side.Training(epochs=1, batch=60, lr=0.02, taught=0.7, decay_all=True)
    together = paths.Class(space, training, paths.Lessons(images, training, model), 1)
    (path,) = together.load([(widths, network.state_dict())])
    optimizer = side.Sgd(network, training, torch.tensor(0.0))
    for number, lesson in enumerate(together.lessons.first(3)):
        x, y, answers = lesson
        together.teach([path], lesson, 0.01 * number)
        optimizer.lr.fill_(0.01 * number)
        optimizer.forget()
        side.loss_of(network(x), y, answers, training).backward()
        optimizer.step()
    for name, tensor in path.state().items():
        if "num_batches" not in name:
            torch.testing.assert_close(tensor, network.state_dict()[name], rtol=1e-3, atol=1e-4)
    assert (path.widths >= widths).all()
    assert (path.widths > widths).any()
    held = sum(float(t.detach().abs().sum()) for name, t in path.whole.items() if "num_batches" not in name)
    own = sum(float(t.abs().sum()) for name, t in path.state().items() if "num_batches" not in name)
    assert held == pytest.approx(own)


def test_the_search_near_rules_gives_a_plan(benchmark: Any, base: Path, tmp_path: Path) -> None:
    pytest.importorskip("torch_pruning", reason="Torch-Pruning is a rival, not a dependency")
    ours, out = benchmark("rivals_bcnet"), tmp_path / "ours.json"
    flags = ["--quick", "--base", str(base), "--out", str(out), "--network", "vgg19_cifar", "--budget", "40%"]
    ours.main([*flags, "--population", "5", "--evaluations", "3", "--steps", "1", "--groups", "8", "--seconds", "60"])
    written = json.loads(out.read_text())
    entries, facts = written["vgg19_cifar"]["40%"], written["facts"]
    assert set(entries) == {*(f"bcnet-near-{number}" for number in range(1, 5)), "bcnet-mean", "bcnet-lamp"}
    losses = [trial["loss"] for trial in facts["trials"]]
    assert losses == sorted(losses)
    assert len(losses) >= 5
    most = max(entry["flops"] for entry in entries.values())
    assert all(entry["flops"] > 0.9 * most for entry in entries.values())


def test_the_race_of_a_report_halves_its_finalists(benchmark: Any) -> None:
    pytest.importorskip("torch_pruning", reason="Torch-Pruning is a rival, not a dependency")
    report = benchmark("rivals_report")

    def row(losses: list[float]) -> dict[str, Any]:
        return {"rounds": [{"loss": loss} for loss in losses], "test": {"accuracy": 90.0}}

    results = {"bcnet-a": {1: row([1.0, 0.2])}, "bcnet-b": {1: row([0.5, 0.4])}, "bcnet-c": {1: row([0.6, 0.3])}}
    results |= {"other": {1: row([0.1, 0.1])}}
    won = report.raced(results, "bcnet")
    assert won[1] is results["bcnet-c"][1]  # of three two go on, and a, the best in the end, is not among them


def test_a_call_keeps_its_time_and_goes_on(benchmark: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Epochs at equal seconds, the better rate, what is known already, and what a call has no time for."""
    fifth = benchmark("rivals_fifth")
    args = fifth.arguments(["--out", str(tmp_path), "--seconds", "30", "--jobs", "none"])
    rows = []
    for lr, loss in ((0.05, 0.3), (0.01, 0.2)):
        seconds = {"making_seconds": 1.0, "lesson_seconds": 5.0}
        for method, price, tuning in (("bcnet", 34.0, 20.0), ("uniform", 0.0, 5.0)):
            made = {"plan_seconds": price, "tuning_seconds": tuning, "val": {"loss": loss}, **seconds}
            rows.append({**fifth.key(args, "44M", 5, lr, 1, method), **made})
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    calls = fifth.Calls(args, None, fifth.time.perf_counter())
    assert calls._best_rate("44M", 5) == 0.01
    assert calls._epochs("44M", 5, 0.01) == 30  # 60 s of bcnet, 2 s for an epoch of uniform and its lessons
    assert calls._known("44M", 5, 0.01, 1, "uniform")
    assert not calls._known("44M", 5, 0.01, 2, "uniform")
    calls.job("bcnet:44M:5:0.01")  # seed 1 is there, and the first of a kind may take more than 30 s
    assert capsys.readouterr().out == "left for another call: bcnet 44M 5\n" * 2
    with pytest.raises(Exception, match="unknown job 'nothing'"):
        calls.job("nothing")
