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
import torch
from terminal import run
from torch import nn

from bcnet.latency import compare
from bcnet.latency import table as latency
from bcnet.run.session import Run
from bcnet.run.slim import Result, slim
from bcnet.run.stages import budgets, retrain
from bcnet.run.stages import search as stage


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
def pretended_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def opened(*_: object) -> Iterator[Pretended]:
        yield Pretended()

    monkeypatch.setattr(latency, "open_timer", opened)


@pytest.fixture
def pretended(pretended_layers: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compare, "compare_backend", side_by_side)


def side_by_side(networks: Mapping[str, nn.Module], *_: object) -> dict[str, float]:
    """Milliseconds on the pretended machine."""
    return {name: Pretended().network(network, ())() / 1e6 for name, network in networks.items()}


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


@pytest.mark.parametrize("searched", [{}, {"allot": "uniform"}], ids=["searched", "allotted"])
@pytest.mark.parametrize(("then", "held"), [(0.55, True), (0.9, False)])
def test_a_budget_is_met_by_what_is_measured(
    tmp_path: Path,
    pretended: None,
    monkeypatch: pytest.MonkeyPatch,
    then: float,
    held: bool,
    searched: dict[str, Any],
) -> None:
    shares = itertools.chain([0.9], itertools.repeat(then))

    def measured(networks: dict[str, nn.Module], *_: object) -> dict[str, float]:
        return {"full": 10.0, "slim": 10.0 * next(shares)}

    monkeypatch.setattr(budgets, "compare_backend", measured)
    notes = tinyrun.Notes()
    begun = tinyrun.create(tmp_path, budgets=["latency=60%"], **searched)
    found = tinyrun.work(begun, until="search", listener=notes)
    checked = found.read("search")["latency"]
    assert checked["held"] is held
    assert checked["limit_ms"] == pytest.approx(0.6 * checked["full_ms"], rel=1e-3)
    assert checked["correction"] > 1
    told = "predictions of latency were corrected by " if held else "the budget latency=60% is not met by measurement: "
    assert any(note.startswith(told) for note in notes.notes)


@pytest.mark.parametrize("fast", [True, False])
def test_the_smallest_network_is_tried_before_a_budget_is_given_up(
    tmp_path: Path, pretended: None, monkeypatch: pytest.MonkeyPatch, fast: bool
) -> None:
    """On a machine where all networks but the smallest take as long as the full one."""
    begun = tinyrun.create(tmp_path, budgets=["latency=60%"], allot="uniform")
    smallest = sum(p.numel() for p in begun.space.build(begun.space.min).parameters())

    def measured(networks: dict[str, nn.Module], *_: object) -> dict[str, float]:
        least = sum(p.numel() for p in networks["slim"].parameters()) == smallest
        return {"full": 10.0, "slim": 5.0 if fast and least else 9.0}

    monkeypatch.setattr(budgets, "compare_backend", measured)
    notes = tinyrun.Notes()
    found = tinyrun.work(begun, until="search", listener=notes).read("search")
    assert found["best"]["widths"] == begun.space.min.tolist()
    assert found["latency"]["held"] is fast
    advice = "; there is no smaller network in this space, but a larger budget may be met"
    assert any(note.endswith(advice) for note in notes.notes) is not fast


def test_a_search_begins_where_no_rule_holds_the_budget(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tinyrun.work(tinyrun.trained(tmp_path), until="given")
    monkeypatch.setattr(stage, "rules_of_thumb", lambda run: {"uniform": run.full.tolist()})
    first = stage.proposals(run)
    assert first is not None
    assert run.constraints.feasible(first).all()


def slimmed(folder: Path, given: int, **recipe: Any) -> Result:
    """A small untrained network, slimmed from Python to 80 % of its latency."""
    x, y = torch.randn(64, 1, 8, 8), torch.arange(64) % 2
    model = nn.Sequential(nn.Conv2d(1, 16, 3), nn.ReLU(), nn.Conv2d(16, 16, 3), nn.Flatten(), nn.Linear(256, 2))
    loader, short = [(x[:32], y[:32]), (x[32:], y[32:])], {"epochs": 1}
    return slim(
        *(model, x[:given], loader, loader), budget="latency=80%", out=folder / "run", progress=False,
        recipe={"given": short, "retrain": short, "race": None, "score": "cut", **recipe},
    )  # fmt: skip


@pytest.mark.parametrize("given", [1, 5], ids=["one-example", "five-examples"])
@pytest.mark.parametrize("batch", [1, 16])
def test_all_latencies_are_of_as_many_inputs_as_the_recipe_says(
    tmp_path: Path, pretended_layers: None, monkeypatch: pytest.MonkeyPatch, batch: int, given: int
) -> None:
    seen: set[tuple[int, ...]] = set()

    def timed(networks: Mapping[str, nn.Module], example: torch.Tensor) -> dict[str, float]:
        seen.add(tuple(example.shape))
        return side_by_side(networks)

    monkeypatch.setattr(compare, "compare_latency", timed)
    search = {"evaluations": 4, "population": 2}
    result = slimmed(tmp_path, given, latency={"batch": batch, "threads": 1}, fallback=False, search=search)
    assert seen == {(batch, 1, 8, 8)}
    assert result.run.read("compare")["timed_by"].endswith("one input" if batch == 1 else f"{batch} inputs at once")


def test_python_says_that_a_budget_is_not_met(tmp_path: Path, pretended: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compare, "compare_latency", lambda networks, _: dict.fromkeys(networks, 1.0))
    found = repr(slimmed(tmp_path, 1, latency={"threads": 1}, allot="uniform"))
    assert "The budget latency=80% is not met: measured, it takes 1 ms, and 800 us are allowed." in found


def test_what_is_too_slow_when_measured_neither_races_nor_ships(
    tmp_path: Path, pretended: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Predictions say that uniform widths hold the budget, as the search's choice does; measured, they do not."""
    measured: list[list[str]] = []

    def clocked(networks: dict[str, nn.Module], *_: object) -> dict[str, float]:
        measured.append(list(networks))
        return {name: {"uniform": 9.0}.get(name, 10.0 if "full" in name else 5.0) for name in networks}

    monkeypatch.setattr(budgets, "compare_backend", clocked)
    notes = tinyrun.Notes()
    race = {"finalists": 4, "rounds": 1}
    begun = tinyrun.trained(tmp_path, budgets=["latency=60%"], race=race, compare=["uniform"], retrain={"epochs": 2})
    raced = tinyrun.work(begun, until="race", listener=notes)
    assert any("uniform" in names for names in measured)
    assert "uniform" not in raced.read("race")["finalists"]
    assert raced.read("search")["best"]["widths"] in raced.read("race")["finalists"].values()
    assert "slower than the budget when measured, so left out of the race: uniform" in notes.notes

    better = {"found": 2.0, "uniform": 1.0}

    def trained(run: Run, name: str) -> list[dict[str, Any]]:
        return [{"val": {"loss": better[name], "score": -better[name]}}]

    monkeypatch.setattr(retrain, "trainings", trained)
    assert tinyrun.work(raced, until="retrain").read("retrain")["chosen"] == "found"
    for name in ("retrain", "search/rivals"):
        raced.remove(name)
    monkeypatch.setattr(budgets, "compare_backend", lambda networks, *_: dict.fromkeys(networks, 5.0) | {"full": 10.0})
    monkeypatch.setattr(budgets, "limit_ms", lambda *_: 6.0)
    assert tinyrun.work(Run(raced.folder), until="retrain").read("retrain")["chosen"] == "uniform"


def test_a_resumed_race_has_the_same_finalists(
    tmp_path: Path, pretended: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = tinyrun.trained(
        tmp_path, budgets=["latency=60%"], race={"finalists": 3, "rounds": 1}, retrain={"epochs": 2}
    )
    raced = tinyrun.work(begun, until="race")
    first = raced.read("race")["finalists"]
    raced.remove("race")

    def slower(networks: dict[str, nn.Module], *_: object) -> dict[str, float]:
        raise AssertionError("finalists are measured once")

    monkeypatch.setattr(budgets, "compare_backend", slower)
    assert tinyrun.work(Run(raced.folder), until="race").read("race")["finalists"] == first


def test_what_holds_is_known_of_the_configurations_that_were_measured(
    tmp_path: Path, pretended: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    searched = tinyrun.work(tinyrun.trained(tmp_path, budgets=["latency=60%"]), until="search")
    small, large = searched.space.min.tolist(), searched.full.tolist()
    takes = iter([5.0, 9.0])

    def clocked(networks: dict[str, nn.Module], *_: object) -> dict[str, float]:
        return dict.fromkeys(networks, next(takes)) | {"full": 10.0}

    monkeypatch.setattr(budgets, "compare_backend", clocked)
    with searched.lock():
        assert budgets.holding(searched, "rivals", {"one": small}) == ["one"]
        for _ in range(2):  # measured once
            assert budgets.holding(searched, "rivals", {"one": large}) == []
