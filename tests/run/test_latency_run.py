"""Budgets of latency in a run: the table is measured once and kept, holds for what is found, and is shown."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tinyrun
from terminal import run
from torch import nn

from bcnet.latency import compare
from bcnet.latency import table as latency
from bcnet.run.session import Run
from bcnet.run.stages import budgets


class Pretended:
    """A machine on which a weight takes 10 us, and a pass 1 ms more."""

    overhead = 0.0

    def layer(self, operation: Any, batch: int) -> Callable[[], float]:
        return lambda: self._weights(operation.module())

    def network(self, network: nn.Module, inputs: Any) -> Callable[[], float]:
        return lambda: 1e6 + self._weights(network)

    def time(self, once: Callable[[], float]) -> float:
        return once()

    def _weights(self, network: nn.Module) -> float:
        return 1e4 * sum(p.numel() for p in network.parameters() if p.dim() > 1)


@pytest.fixture
def pretended(monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def opened(*_: object) -> Iterator[Pretended]:
        yield Pretended()

    def side_by_side(networks: Mapping[str, nn.Module], *_: object) -> dict[str, float]:
        return {name: Pretended().network(network, ())() / 1e6 for name, network in networks.items()}

    monkeypatch.setattr(latency, "open_timer", opened)
    monkeypatch.setattr(compare, "compare_backend", side_by_side)


def test_a_run_holds_its_latency_budget(tmp_path: Path, pretended: None) -> None:
    notes = tinyrun.Notes()
    finished = tinyrun.work(tinyrun.create(tmp_path, budgets=["latency=60%"]), listener=notes)
    again = Run(finished.folder)
    cost = again.costs["latency"]
    limit = 0.6 * int(cost(again.full)[0])
    assert finished.read("trace")["budgets"][0]["limit"] == pytest.approx(limit)
    best = finished.read("search")["best"]
    assert best["costs"]["latency"] == int(cost(np.array(best["widths"]))[0]) <= limit
    for row in finished.read("compare")["networks"]:
        assert row["predicted_ms"] == row["costs"]["latency"] / 1e6
        assert row["latency_ms"] > 0
    (note,) = (note for note in notes.notes if note.startswith("latency"))
    assert note.startswith("latency was measured layer by layer on cpu, batch: 1, threads: 1; predictions of other ")
    table = run("run", "--resume", str(finished.folder), "--trust", "--until", "compare")
    assert "predicted" in table.stdout
    assert "measured" in table.stdout


def test_predictions_are_right_near_the_budget(
    tmp_path: Path, pretended: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a machine where half of the layers' time is two thirds of a network's."""

    def nanoseconds(network: nn.Module) -> float:
        return 1e3 * Pretended()._weights(network) ** 0.6

    def side_by_side(networks: Mapping[str, nn.Module], *_: object) -> dict[str, float]:
        return {name: nanoseconds(network) / 1e6 for name, network in networks.items()}

    monkeypatch.setattr(compare, "compare_backend", side_by_side)
    traced = tinyrun.work(tinyrun.create(tmp_path, budgets=["latency=60%"]), until="trace")
    for name in ("full", "uniform"):
        widths = traced.read("trace")["widths"][name]
        assert traced.cost_of(widths)["latency"] == pytest.approx(nanoseconds(traced.space.build(widths)), rel=0.1)


def test_a_run_without_such_a_budget_measures_no_layers(tmp_path: Path) -> None:
    begun = tinyrun.work(tinyrun.create(tmp_path), until="trace")
    assert not begun.done("latency")
    assert "latency" not in begun.costs


def test_a_resumed_run_keeps_the_table(tmp_path: Path, pretended: None, monkeypatch: pytest.MonkeyPatch) -> None:
    begun = tinyrun.work(tinyrun.create(tmp_path, budgets=["latency=60%"]), until="trace")
    first = begun.read("trace")["budgets"]
    begun.path("trace.json").unlink()
    monkeypatch.setattr(Pretended, "_weights", lambda *_: 5.0)
    assert tinyrun.work(Run(begun.folder), until="trace").read("trace")["budgets"] == first


def test_an_impossible_latency_is_refused_and_leaves_the_folder_free(tmp_path: Path, pretended: None) -> None:
    path = tmp_path / "tiny.yaml"
    path.write_text(tinyrun.recipe(tmp_path, budgets=["latency=1us"]).to_yaml())
    out = tmp_path / "runs"
    for command in (["run", "--recipe", str(path), "--out", str(out)], ["recipe", "check", str(path)]):
        result = run(*command, "--trust")
        assert result.exit_code == 2
        text = " ".join(result.stderr.split())
        assert "error: budget latency=1us is impossible: the smallest network of this space costs 1." in text
        assert " ms, so the nearest feasible budget is latency=1" in text
        assert text.endswith("ns")
    assert not out.exists()


def test_widths_of_a_run_are_rounded(tmp_path: Path) -> None:
    path = tmp_path / "tiny.yaml"
    path.write_text(tinyrun.recipe(tmp_path).to_yaml())
    out = tmp_path / "runs"
    result = run("run", "--recipe", str(path), "--trust", "--out", str(out), "--set", "round_to=4", "--until", "search")
    assert result.exit_code == 0, result.stderr
    folder = Run.open(out)
    assert [v["candidates"] for v in folder.read("trace")["variables"]] == [[4, 8], [4, 8]]
    assert all(width % 4 == 0 for width in folder.read("search")["best"]["widths"])


@pytest.mark.parametrize(("then", "held"), [(0.55, True), (0.9, False)])
def test_a_budget_is_met_by_what_is_measured(
    tmp_path: Path, pretended: None, monkeypatch: pytest.MonkeyPatch, then: float, held: bool
) -> None:
    shares = itertools.chain([0.9], itertools.repeat(then))

    def measured(networks: dict[str, nn.Module], *_: object) -> dict[str, float]:
        return {"full": 10.0, "slim": 10.0 * next(shares)}

    monkeypatch.setattr(budgets, "compare_backend", measured)
    notes = tinyrun.Notes()
    found = tinyrun.work(tinyrun.create(tmp_path, budgets=["latency=60%"]), until="search", listener=notes)
    checked = found.read("search")["latency"]
    assert checked["held"] is held
    assert checked["limit_ms"] == pytest.approx(0.6 * checked["full_ms"], rel=1e-3)
    assert checked["correction"] > 1
    told = "predictions of latency were corrected by " if held else "the budget latency=60% is not met by measurement: "
    assert any(note.startswith(told) for note in notes.notes)
