"""Building a table on a tiny space: complete, resumable, and indifferent to a worker's death."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from heard import Heard
from terminal import answer

from bcnet.bench.build import BuildConfig, build_sample, build_table
from bcnet.errors import BcnetError
from bcnet.training.optim import Optimisation
from bcnet.utils.progress import Listener

NET = """
from torch import nn

def tiny():
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, 2, 1), nn.BatchNorm2d(4), nn.ReLU(),
        nn.Conv2d(4, 4, 3, 2, 1), nn.BatchNorm2d(4), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 10),
    )

tiny.input_shape = (1, 8, 8)
"""


@pytest.fixture
def config(tmp_path: Path) -> BuildConfig:
    file = tmp_path / "tiny.py"
    file.write_text(NET)
    training = Optimisation(epochs=1, lr=0.1, nesterov=False, weight_decay=5e-4)
    return BuildConfig(f"{file}:tiny", "digits", groups=2, seeds=2, batch=128, optimisation=training)


def test_a_table_is_built_resumed_and_readable(config: BuildConfig, tmp_path: Path) -> None:
    heard = Heard()
    table = build_table(config, tmp_path / "a", heard)
    assert heard.ended["training networks"]
    assert table.acc.shape == (4, 2)
    lines = (tmp_path / "a" / "results.jsonl").read_text().splitlines()
    rows = {(r["widths"], r["seed"]): r["best"] for r in map(json.loads, lines[1:])}
    assert all(table.acc[i, s] == pytest.approx(best) for (i, s), best in rows.items())

    # A run stopped after three results, the fourth cut short, ends with the same table.
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "results.jsonl").write_text("\n".join(lines[:4]) + "\n" + lines[4][:10])
    heard = Heard()
    again = build_table(config, tmp_path / "b", heard)
    assert heard.steps["training networks"] == [4, 5, 6, 7, 8]
    assert (again.acc == table.acc).all()

    with pytest.raises(BcnetError, match="belongs to work with other settings: choose another folder"):
        build_table(replace(config, seeds=1), tmp_path / "a")


def test_a_killed_worker_is_replaced(config: BuildConfig, tmp_path: Path) -> None:
    killed: list[int] = []

    class KillAWorker(Listener):
        def step(self, name: str, done: int, total: int, figures: Mapping[str, float]) -> None:
            if done == 2 and not killed:
                workers = [p for p in psutil.Process().children() if "spawn_main" in " ".join(p.cmdline())]
                killed.append(workers[0].pid)
                os.kill(workers[0].pid, signal.SIGKILL)

    table = build_table(config, tmp_path / "c", KillAWorker())
    assert killed
    assert len((tmp_path / "c" / "results.jsonl").read_text().splitlines()) == 9
    assert (table.acc > 0).all()


def test_bad_settings() -> None:
    with pytest.raises(BcnetError, match=r"^executor is 'threads', but it must be processes or ray$"):
        BuildConfig("zoo:digits_cnn", "digits", executor="threads")
    with pytest.raises(BcnetError, match=r"^seeds is 0, but it must be at least 1$"):
        BuildConfig("zoo:digits_cnn", "digits", seeds=0)


def test_networks_are_drawn_within_a_budget(config: BuildConfig, tmp_path: Path) -> None:
    drawn = replace(config, seeds=1, networks=1, within="flops=100%")
    found = build_sample(drawn, tmp_path / "drawn")
    assert found["widths"] == [[4, 4]]
    assert 0 <= found["last"][0][0] <= found["best"][0][0] <= 100
    assert (
        build_sample(drawn, tmp_path / "drawn") == found == json.loads((tmp_path / "drawn/networks.json").read_text())
    )
    with pytest.raises(BcnetError, match="only 1 of the networks met use 98% to 100% of flops=100%"):
        build_sample(replace(drawn, networks=2), tmp_path / "more")
    with pytest.raises(BcnetError, match="give both"):
        replace(config, networks=5)


@pytest.mark.parametrize("drawn", [[], ["--networks", "1", "--within", "flops=100%"]])
def test_the_command_tells_programs_what_it_built(config: BuildConfig, tmp_path: Path, drawn: list[str]) -> None:
    small = ["--groups", "2", "--runs", "1", "--epochs", "1", "--batch", "128", "--device", "cpu"]
    found = answer("bench", "build", config.model, "--data", "digits", "--out", str(tmp_path / "out"), *small, *drawn)
    file = found["sample" if drawn else "table"]
    assert Path(file).is_file()
    assert found["networks"] == (1 if drawn else 4)
    assert 0 <= (found["mean"] if drawn else found["best"]["mean"]) <= 100
