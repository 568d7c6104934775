"""The command line itself, and ``bcnet fairness``."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest
from terminal import run, shell

import bcnet
from bcnet.cli.fairness import PLOT_WIDTH, plot


def test_version_and_help():
    assert run("--version").stdout == f"bcnet {bcnet.__version__}\n"
    assert "fairness" in run().stdout
    assert run().exit_code == 0
    assert "--principle" in run("fairness", "--help").stdout
    assert "<bool>" not in run("fairness", "--help").stdout  # flags take no value


def test_fairness_json_of_one_principle():
    result = run("fairness", "--max", "64", "--groups", "20", "--base", "5", "--principle", "bcv2", "--json")
    assert result.exit_code == 0
    assert json.loads(result.stdout) == {"principle": "bcv2", "total": 80, "cardinality": [16] * 80, "fair": True}


def test_fairness_json_of_all_principles():
    result = run("fairness", "--max", "20", "--groups", "20", "--base", "5", "--principle", "all", "--json")
    reports = json.loads(result.stdout)["principles"]
    assert [(r["principle"], r["total"], r["fair"]) for r in reports] == [
        ("ua", 20, False),
        ("bc", 20, False),
        ("bcv2", 25, True),
        ("bcv2-printed", 24, False),
    ]
    assert reports[0]["cardinality"] == [16] * 5 + list(range(15, 0, -1))


def test_fairness_table_holds_every_channel_side_by_side():
    out = shell("fairness", "--max", "6", "--groups", "3", "--base", "1", "--principle", "all").stdout
    cells = [[cell.strip() for cell in line.strip("│").split("│")] for line in out.splitlines() if line[:1] == "│"]
    assert cells == [
        ["1-2", "3", "4", "3", "4"],
        ["3-4", "2", "4", "3", "4"],
        ["5-6", "1", "4", "3", "4"],
        ["7-8", "-", "-", "3", "-"],
    ]
    assert "candidates (3): 2, 4, 6" in out
    assert "ua: 6 channels, used 1x to 3x: not fair" in out
    assert "bcv2: 8 channels, each used 3x: fair" in out


def test_fairness_of_a_huge_layer_stays_short():
    out = run("fairness", "--max", "100000", "--groups", "100000", "--base", "1", "--principle", "ua").stdout
    assert "The table has 100000 rows; --json prints the cardinality of every channel." in out
    assert len(out) < 3000


def test_output_is_plain_without_a_terminal_and_in_ascii():
    for environment in ({}, {"NO_COLOR": "1"}, {"COLUMNS": "20"}):
        out = shell("fairness", "--principle", "all", **environment).stdout
        assert "\x1b" not in out
        assert "…" not in out
        assert "bcv2-printed ┃" in out
    plain = shell("fairness", PYTHONIOENCODING="ascii")
    assert plain.returncode == 0
    assert plain.stdout.isascii()


def test_plot_draws_bars_to_scale():
    assert plot(np.array([4, 2, 1]), top=4, height=2) == ["4 │█", "  │██▄", "0 └───", "   1 3"]
    assert plot(np.array([2, 1]), top=2, height=2, ascii_only=True) == ["2 |#", "  |##", "0 +--", "   12"]
    assert plot(np.array([5]), top=5, height=1) == ["5 │█", "0 └─", "   1"]
    assert len(plot(np.arange(1, 500), top=499, height=3)[-2]) == len("499 └") + PLOT_WIDTH


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["fairness", "--principle", "bcv3"], "unknown principle 'bcv3': did you mean 'bcv2' or 'bc'?"),
        (["fairness", "--base", "21"], "base is 21, but it counts groups and must lie in 1..20"),
        (["fairness", "--groups", "0"], "groups is 0, but a space needs at least 1 group"),
        (["fairness", "--max", "0"], "a width variable needs at least 1 channel, not 0"),
        (
            ["fairness", "--max", "9999999999"],
            "9999999999 channels are too many: a width variable may have at most 1048576",
        ),
    ],
)
def test_mistakes_get_one_line_and_exit_code_2(arguments, text):
    result = run(*arguments)
    assert (result.exit_code, result.stdout, result.stderr) == (2, "", f"error: {text}\n")


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["fairness", "--max", "many"], "--max"),
        (["fairness", "--max"], "--max"),
        (["fairness", "--nonsense"], "--nonsense"),
        (["fairness", "extra"], "extra"),
        (["fairnes"], "fairnes"),
    ],
)
def test_usage_errors_get_one_line_and_exit_code_2(arguments, part):
    result = shell(*arguments)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith("error: ")
    assert part in result.stderr
    assert result.stderr.count("\n") == 1


def test_starting_needs_no_torch():
    code = "import sys; from bcnet.cli import app; app(['fairness'], standalone_mode=False); print(sorted(sys.modules))"
    modules = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    assert "'bcnet.cli.fairness'" in modules
    assert "'torch'" not in modules
