"""``bcnet balance``: widths within budgets at once."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from terminal import answer, cells, run

pytestmark = pytest.mark.usefixtures("traced_once")


def test_balanced_widths_hold_every_budget_and_count_layers(tmp_path: Path) -> None:
    budgets = ["--budget", "flops=40%", "--budget", "params=35%"]
    found = answer("balance", "digits_cnn", *budgets)
    full, costs = found["costs"]["full"], found["costs"]["balanced"]
    assert costs["flops"] <= 0.4 * full["flops"]
    assert costs["params"] <= 0.35 * full["params"]
    layers = [len(v["layers"]) for v in answer("show", "digits_cnn")["variables"]]
    worth = {name: layers @ np.log2(found[name]) for name in ("widths", "uniform")}
    assert worth["widths"] > worth["uniform"]
    (tmp_path / "balanced.json").write_text(json.dumps(found))
    counted = answer("cost", "digits_cnn", "--widths", f"@{tmp_path}/balanced.json")
    assert {name: counted[name] for name in costs} == costs


def test_balance_for_people() -> None:
    found = answer("balance", "digits_cnn", "--budget", "flops=40%")
    shown = run("balance", "digits_cnn", "--budget", "flops=40%").stdout
    rows = cells(shown)
    assert [int(row[5]) for row in rows[:5]] == found["widths"]
    assert rows[5][0] == "FLOPs"
    assert rows[5][3] == f"{found['costs']['balanced']['flops']:,}"
    assert shown.endswith("Balanced widths are experimental: they did not win a trial against uniform scaling.\n")


def test_an_impossible_budget_is_refused() -> None:
    result = run("balance", "digits_cnn", "--budget", "flops=1k")
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("error: budget flops=1k is impossible: the smallest network of this space costs ")
