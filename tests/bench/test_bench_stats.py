"""Channel-Bench-Macro: correlations, the noise ceiling, the released figures and ``bcnet bench stats``."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
import terminal
from bench_tables import RELEASED, committed_table, failure, needs_released, no_tables_of_this_machine  # noqa: F401
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from synthetic_table import FILE, SPACE

from bcnet.bench import ChannelBench, kendall, noise_ceiling, spearman
from bcnet.bench.correlation import correlations, reliability
from bcnet.bench.predictors import predicted

# Correlations ---------------------------------------------------------------------------------------------------

floats = st.lists(st.integers(-5, 5), min_size=2, max_size=30)


@given(floats, st.randoms(use_true_random=False))
def test_kendall_is_tau_b_by_its_definition(x: list[int], random: object) -> None:
    y = [random.randint(-5, 5) for _ in x]  # type: ignore[attr-defined]
    if len(set(x)) == 1 or len(set(y)) == 1:
        assert failure(kendall, x, y) == "a correlation needs numbers that differ, but one row is constant"
        return
    a, b = (np.sign(np.subtract.outer(v, v)) for v in (x, y))
    assert kendall(x, y) == pytest.approx((a * b).sum() / np.sqrt(np.square(a).sum() * np.square(b).sum()), abs=1e-12)


def test_correlations_of_known_rows() -> None:
    x = np.arange(10.0)
    assert correlations(x, -2 * x) == pytest.approx({"pearson": -1, "spearman": -1, "kendall": -1})
    assert spearman(x, np.exp(x)) == pytest.approx(1)
    assert correlations(x, np.exp(x))["pearson"] < 0.8


def test_wrong_rows_to_correlate(table: ChannelBench) -> None:
    assert failure(kendall, [1, 2], [1, 2, 3]) == (
        "a correlation needs two equally long rows of at least 2 numbers, got shapes (2,) and (3,)"
    )
    assert failure(kendall, [1, 2], [1, float("inf")]) == (
        "a correlation needs finite numbers, but some are NaN or infinite"
    )
    assert failure(table.correlate, [1, 2]) == "the table holds 64 widths, but 2 scores were given"


def simulated(spread: float, noise: float, seeds: int = 3) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    rng = np.random.default_rng(5)
    truth = 90 + spread * rng.normal(size=8000)
    return truth, truth[:, None] + noise * rng.normal(size=(8000, seeds))


@pytest.mark.parametrize("noise", [0.05, 0.2, 0.6])
def test_ceiling_is_what_the_known_truth_reaches(noise: float) -> None:
    truth, acc = simulated(0.4, noise)
    assert noise_ceiling(acc) == pytest.approx(correlations(truth, acc.mean(axis=1)), abs=0.012)
    assert reliability(acc) == pytest.approx(0.16 / (0.16 + noise**2 / 3), abs=0.015)


def test_ceiling_at_the_ends() -> None:
    _, pure_noise = simulated(0.0, 1.0)
    assert noise_ceiling(pure_noise)["pearson"] < 0.2
    _, no_noise = simulated(1.0, 0.0)
    assert noise_ceiling(no_noise)["kendall"] == pytest.approx(1)
    assert noise_ceiling([[1, 3], [3, 1.1]]) == {"pearson": 0.0, "spearman": 0.0, "kendall": 0.0}
    assert failure(noise_ceiling, np.ones((5, 2))) == (
        "all networks have the same mean accuracy, so there is nothing to rank"
    )
    assert failure(noise_ceiling, np.ones((5, 1))) == (
        "seed noise needs at least 2 networks of at least 2 seeds each, got accuracies of shape (5, 1)"
    )


# The released tables --------------------------------------------------------------------------------------------


@needs_released
@pytest.mark.parametrize(
    ("name", "flops", "params", "widths", "best", "ceiling"),
    [
        ("mobilenet", (74.0, 74.2, 54.6), (60.4, 60.3, 42.6), (85.2, 84.4, 65.2), (91.223, 91.713, 91.857), 0.83),
        ("resnet", (83.6, 85.7, 67.3), (66.9, 69.1, 50.9), (91.5, 91.1, 74.3), (93.257, 93.647, 93.830), 0.81),
    ],
)
def test_released_tables_give_the_recomputed_figures(
    name: str,
    flops: tuple[float, ...],
    params: tuple[float, ...],
    widths: tuple[float, ...],
    best: tuple[float, ...],
    ceiling: float,
) -> None:
    # Loading also proves the cost formulas: it compares them with all 16,384 entries.
    table = ChannelBench.load(name, RELEASED)
    assert table.released
    assert len(table) == 16_384
    assert table.acc.shape == (16_384, 3)
    for predictor, expected in (("flops", flops), ("params", params), ("widths", widths)):
        found = table.correlate(predicted(predictor, table))
        assert tuple(round(100 * value, 1) for value in found.values()) == expected
    full = table.query(table.space.max).flops
    assert tuple(round(float(table.best({"flops": f * full}).mean), 3) for f in (0.25, 0.5, 0.75)) == best
    assert table.ceiling()["kendall"] == pytest.approx(ceiling, abs=0.01)


@needs_released
def test_released_means_and_deviations_are_recomputed_exactly() -> None:
    raw = json.loads((RELEASED / "Results_ResNet.json").read_text())
    table = ChannelBench.load("resnet", RELEASED / "Results_ResNet.json")
    index = table.space.parse(list(raw))
    assert table.mean[index].tolist() == [entry["mean"] for entry in raw.values()]
    assert table.std[index].tolist() == [entry["std"] for entry in raw.values()]


@needs_released
def test_a_table_of_the_other_space_is_refused() -> None:
    file = RELEASED / "Results_ResNet.json"
    assert failure(ChannelBench.load, "mobilenet", file, verify=False) == (
        f"the table {file} is no table of space 'mobilenet': "
        "key '1111111' has flops 90,096,896, but its widths cost 14,285,312"
    )


# The command line -----------------------------------------------------------------------------------------------


def bench(*args: object) -> tuple[int, str, str]:
    result = terminal.run("bench", *map(str, args))
    return result.exit_code, result.stdout, result.stderr


def test_stats_command(tmp_path: Path, table: ChannelBench) -> None:
    space = tmp_path / "small.json"
    space.write_text(SPACE.to_json())
    code, out, _ = bench("stats", space, "--table", FILE, "--json")
    figures = json.loads(out)
    assert code == 0
    assert figures["flops"] == table.correlate(table.costs["flops"])
    assert figures["params"] == table.correlate(table.costs["params"])
    worth = np.log2(table.widths) @ [len(v.layers) or 1 for v in SPACE.variables]
    assert figures["widths"] == pytest.approx(table.correlate(worth))
    assert figures["ceiling"] == figures["ceilings"]["kendall"] == table.ceiling()["kendall"]
    assert sum(figures["histograms"]["accuracy"]["counts"]) == 64

    code, out, _ = bench("stats", space, "--table", FILE, "--out", tmp_path / "report")
    assert code == 0
    assert "Space small: 64 networks, correlation with mean accuracy" in out
    assert f"{table.ceiling()['kendall']:.3f}" in out
    assert json.loads((tmp_path / "report" / "stats.json").read_text()) == figures
    image = ElementTree.parse(tmp_path / "report" / "histograms.svg").getroot()
    assert sum(" to " in (title.text or "") for title in image.iter("{http://www.w3.org/2000/svg}title")) == 3 * 40
    page = (tmp_path / "report" / "stats.html").read_text()
    assert "<svg" in page
    assert f"<td>{figures['params']['kendall']:.3f}</td>" in page
    assert f"<td>{figures['widths']['kendall']:.3f}</td>" in page


def test_stats_of_one_seed_have_no_ceiling(tmp_path: Path, table: ChannelBench) -> None:
    single = ChannelBench(SPACE, table.acc[:, :1]).save(tmp_path / "single.json")
    space = tmp_path / "small.json"
    space.write_text(SPACE.to_json())
    code, out, _ = bench("stats", space, "--table", single, "--json")
    assert code == 0
    assert json.loads(out)["ceiling"] is None
    assert bench("stats", space, "--table", single, "--out", tmp_path)[0] == 0


def test_mistakes_are_one_line_and_code_2(tmp_path: Path) -> None:
    assert bench("stats", "mobilenet", "--table", tmp_path) == (
        2,
        "",
        f"error: there is no Results_MobileNet.json in {tmp_path}\n",
    )
    code, out, err = bench("fetch", "resnt")
    assert (code, out) == (2, "")
    assert err.startswith("error: there is no space 'resnt': did you mean 'resnet'?")


@needs_released
def test_stats_of_an_edited_released_table(tmp_path: Path) -> None:
    edited = ChannelBench.load("mobilenet", RELEASED).save(tmp_path / "mine.json")
    code, _, err = bench("stats", "mobilenet", "--table", edited)
    assert code == 2
    assert err.startswith(f"error: the table {edited} is not the released one of space 'mobilenet' (SHA-256 ")
    code, out, _ = bench("stats", "mobilenet", "--table", edited, "--no-verify", "--json")
    assert code == 0
    assert not json.loads(out)["released"]


def test_bench_imports_without_the_command_line_packages() -> None:
    code = (
        "import sys; import bcnet.bench, bcnet.bench.stats; "
        "print([m for m in ('typer', 'rich', 'pymoo', 'plotly', 'matplotlib') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
