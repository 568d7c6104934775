"""``bcnet bench rank`` on a tiny network with a table of its own: every method, switches, resuming, what it writes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import terminal
import torch
from heard import Heard

from bcnet.bench import ChannelBench
from bcnet.bench.correlation import correlations
from bcnet.bench.rank import RankConfig, bench_space, rank
from bcnet.data import LoadOptions, load_data
from bcnet.errors import BcnetError
from bcnet.search import LogWidthModel
from bcnet.supernet.scoring import Evaluator
from bcnet.supernet.supernet import Supernet
from bcnet.supernet.tas import _stretch
from bcnet.training import checkpoint

NET = """
from torch import nn

def tiny():
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, 2, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU(),
        nn.Conv2d(8, 8, 3, 2, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10),
    )

tiny.input_shape = (1, 8, 8)
"""
METHODS = ("bcv2", "bcv2-alternate", "bcv2-printed", "bc", "ua", "autoslim", "tas", "meta")


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def config(tmp_path: Path) -> RankConfig:
    (tmp_path / "tiny.py").write_text(NET)
    return RankConfig("tiny", "bcv2", epochs=1, bf16=False, model=f"{tmp_path / 'tiny.py'}:tiny")


@pytest.fixture
def table(config: RankConfig) -> ChannelBench:
    """Accuracies that grow with both widths, and noise: no network was trained for it."""
    space = bench_space(config)
    empty = ChannelBench(space, np.zeros((space.size, 1)))
    noise = np.random.default_rng(0).normal(size=(space.size, 3))
    return ChannelBench(space, 60 + empty.widths.sum(1, keepdims=True) + noise)


def data() -> Any:
    return load_data("digits", options=LoadOptions(batch_size=128, eval_batch_size=64))


@pytest.mark.parametrize("method", METHODS)
def test_every_method_trains_and_ranks_with_four_paths_a_step(
    config: RankConfig, table: ChannelBench, method: str
) -> None:
    report = rank(replace(config, method=method), data(), table)
    assert report["paths_per_step"] == (2 if method == "bcv2-alternate" else 4)
    sides = ["left"] if method in ("ua", "autoslim", "tas", "meta") else ["left", "right"]
    for part in ("held_out", "test"):
        found = report[part]
        assert [k for k in found if k.startswith("accuracy_")] == [f"accuracy_{s}" for s in sides]
        assert all(-1 <= found[k][n] <= 1 for k in ("accuracy", "loss") for n in ("pearson", "spearman", "kendall"))
        assert set(found["regret"]) <= {"25%", "50%", "75%"}
        assert all(0 <= r["top10"] <= r["top1"] for r in found["regret"].values())
        assert 0 < found["mean"]["accuracy"] < 1
    assert report["kendall"] == report["held_out"]["accuracy"]["kendall"]


def test_the_scores_are_those_of_the_trained_paths(config: RankConfig, table: ChannelBench, tmp_path: Path) -> None:
    """The stored scores correlate as reported, and are what one-by-one scoring of the stored supernet gives."""
    parts = data()
    heard = Heard()
    report = rank(config, parts, table, "cpu", tmp_path, heard)
    folder = tmp_path / config.name
    stored = np.load(folder / "scores.npz")
    assert stored["held_out_accuracy"].shape == (2, len(table))
    assert correlations(stored["held_out_loss"].mean(0) * -1.0, table.mean)["kendall"] == pytest.approx(
        report["held_out"]["loss"]["kendall"], abs=1e-3
    )
    first = report["held_out"]["effects"][0]
    narrow = table.widths[:, 0] == first["candidates"][0]
    mean = 100 * stored["held_out_accuracy"].mean(0)
    assert first["score"][0] == pytest.approx(mean[narrow].mean() - mean.mean(), abs=1e-3)
    assert first["table"][0] == pytest.approx(table.mean[narrow].mean() - table.mean.mean())
    assert first["table"] == sorted(first["table"])
    levels = np.stack([table.widths[:, i] == c for i in range(2) for c in np.unique(table.widths[:, i])], 1)
    fitted = levels @ np.linalg.lstsq(levels, mean, rcond=None)[0]
    assert report["held_out"]["additive"] == pytest.approx(correlations(fitted, table.mean), abs=1e-3)
    model = LogWidthModel.fit(table.widths, stored["held_out_accuracy"].mean(0), table.space.layer_counts)
    told = report["held_out"]["log_width"]
    expected = correlations(model.predict(table.widths), table.mean)
    assert {k: told[k] for k in expected} == pytest.approx(expected, abs=1e-3)
    assert set(told["regret"]) == set(report["held_out"]["regret"])
    assert len(heard.steps[config.name]) == len(parts.train)
    assert all(heard.ended[f"{config.name}, {part} images"] for part in ("held out", "test"))
    assert (folder / "scatter.svg").read_text().count("<circle") == len(table)

    net = Supernet(bench_space(config), "bcv2")
    net.load_state_dict(checkpoint.unpack(*checkpoint.load(folder / "checkpoints"))["net"])
    rows = [0, 5, 15]
    scores = Evaluator(net, list(parts.val.batches(0))).measure(table.widths[rows])
    np.testing.assert_allclose(scores.by_side["score"], stored["held_out_accuracy"][:, rows].T, atol=1e-4)
    np.testing.assert_allclose(scores.by_side["loss"], stored["held_out_loss"][:, rows].T, rtol=1e-4)


@pytest.mark.parametrize("method", ["bcv2", "tas", "meta"])
def test_a_finished_experiment_is_read_and_a_stopped_one_goes_on(
    config: RankConfig, table: ChannelBench, tmp_path: Path, method: str
) -> None:
    mine = replace(config, method=method, epochs=2)
    whole = rank(mine, data(), table, "cpu", tmp_path / "whole")
    assert rank(mine, data(), table, "cpu", tmp_path / "whole") == whole

    with pytest.raises(KeyboardInterrupt):
        rank(mine, data(), table, "cpu", tmp_path / "stopped", Heard(stop_at=13))
    heard = Heard()
    resumed = rank(mine, data(), table, "cpu", tmp_path / "stopped", heard)
    assert heard.steps[mine.name][0] == 14
    assert resumed["held_out"] == whole["held_out"]


def test_settings_have_folders_of_their_own(config: RankConfig) -> None:
    names = [config, replace(config, lr=0.4), replace(config, complement=False), replace(config, seed=1)]
    assert len({c.name for c in names}) == 4
    assert RankConfig(lr=0.4, images=2048).name == "mobilenet-bcv2-26ep-seed0-lr0.4-images2048"


def test_fewer_images_and_their_batches(config: RankConfig, table: ChannelBench) -> None:
    first = len(next(iter(data().val.batches(0)))[0])
    one = rank(replace(config, images=first), data(), table)
    same = rank(replace(config, images=first, score_batch=first), data(), table)
    other = rank(replace(config, images=first, score_batch=first // 2), data(), table)
    assert one["held_out"] == same["held_out"] != other["held_out"]


def test_batches_that_do_not_fit_are_scored_in_parts(
    config: RankConfig, table: ChannelBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = replace(config, score_batch=128, on_test=False)
    monkeypatch.setattr("bcnet.bench.rank._memory", lambda device: 1 << 20)
    heard = Heard()
    report = rank(config, data(), table, listener=heard)
    batch = report["held_out"]["batch"]
    assert batch < 128
    assert heard.notes == [
        "batches of 128 images do not fit into the 1 MiB that scoring may hold: they are scored in parts of "
        f"{batch}, whose batch norm sees fewer images"
    ]
    monkeypatch.undo()
    small = rank(replace(config, score_batch=batch), data(), table)
    assert small["held_out"] == report["held_out"]


def test_without_the_test_images(config: RankConfig, table: ChannelBench) -> None:
    report = rank(replace(config, on_test=False), data(), table)
    assert "test" not in report
    assert report["on_test"] is False


def test_predictors_need_no_training(config: RankConfig, table: ChannelBench) -> None:
    report = rank(replace(config, method="flops"), data(), table)
    assert report["kendall"] == pytest.approx(correlations(table.costs["flops"], table.mean)["kendall"])
    report = rank(replace(config, method="widths"), data(), table)
    worth = np.log2(table.widths) @ [len(v.layers) or 1 for v in table.space.variables]
    assert report["spearman"] == pytest.approx(correlations(worth, table.mean)["spearman"])


def test_ablations(config: RankConfig, table: ChannelBench) -> None:
    report = rank(replace(config, complement=False, sides="left", base=2), data(), table)
    assert report["paths_per_step"] == 2
    assert "accuracy_right" in report["held_out"]


def test_a_taught_bilateral_supernet_has_as_many_paths_as_the_others(config: RankConfig, table: ChannelBench) -> None:
    report = rank(replace(config, method="bcv2-alternate", sandwich=True), data(), table)
    assert report["paths_per_step"] == 4
    assert "accuracy_right" in report["held_out"]


def test_interpolation_is_adaptive_pooling_over_channels() -> None:
    x = torch.randn(2, 5, 3, 3)
    rows = torch.nn.functional.adaptive_avg_pool1d(x.permute(0, 2, 3, 1).reshape(18, 1, 5), 12)
    torch.testing.assert_close(_stretch(x, 12), rows.reshape(2, 3, 3, 12).permute(0, 3, 1, 2))


def test_the_command(config: RankConfig, table: ChannelBench, tmp_path: Path) -> None:
    table.save(tmp_path / "table.json")
    arguments = ["bench", "rank", "tiny", "--model", config.model, "--table", str(tmp_path / "table.json")]
    recipe = {"lr": 0.2, "warmup": 0.5, "weight_decay": 0.001, "head": 8.0, "extremes": 0.5}
    arguments += ["--data", "digits", "--epochs", "1", "--seeds", "0,1", "--out", str(tmp_path / "out")]
    arguments += ["--device", "cpu", *(f"--{name.replace('_', '-')}={value}" for name, value in recipe.items())]
    done = terminal.run(*arguments, "--json")
    assert done.exit_code == 0, done.output
    reports = json.loads(done.stdout)
    assert [r["seed"] for r in reports] == [0, 1]
    assert all({name: r[name] for name in recipe} == recipe for r in reports)
    assert {"space", "method", "epochs", "seed", "pearson", "spearman", "kendall", "commit", "command"} <= set(
        reports[0]
    )
    shown = terminal.run(*arguments)
    assert shown.exit_code == 0, shown.output
    assert "Kendall" in shown.stdout


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"space": "mobile"}, "unknown space 'mobile': there are mobilenet, resnet, or give a model and its own table"),
        (
            {"method": "bcv3"},
            "unknown method 'bcv3': there are bcv2, bcv2-alternate, bcv2-printed, bc, ua, autoslim, tas, meta, "
            "flops, params, widths",
        ),
    ],
)
def test_bad_settings(settings: dict[str, str], sentence: str) -> None:
    with pytest.raises(BcnetError) as error:
        RankConfig(**settings)
    assert str(error.value) == sentence


def test_recalibrated_statistics_and_drawn_networks(config: RankConfig, table: ChannelBench, tmp_path: Path) -> None:
    drawn = replace(config, recalibrate=3, networks=10)
    report = rank(drawn, data(), table, folder=tmp_path / "runs")
    with np.load(tmp_path / "runs" / drawn.name / "scores.npz") as kept:
        assert kept["held_out_accuracy"].shape == kept["test_loss"].shape == (2, 10)
        assert set(kept["truth"].tolist()) <= set(table.mean.astype(np.float32).tolist())
    assert report["recalibrate"] == 3
    assert rank(replace(config, recalibrate=3), data(), table)["kendall"] != rank(config, data(), table)["kendall"]
    with pytest.raises(BcnetError, match="networks are drawn for recalibrated statistics"):
        RankConfig(networks=10)
