"""Channel-Bench-Macro: spaces, tables, simulated search, correlations, fetching and ``bcnet bench``."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import urllib.error
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from synthetic_table import FILE, SPACE, make
from typer.testing import CliRunner

from bcnet.bench import MOBILENET, RESNET, BenchSpace, ChannelBench, get_space, kendall, noise_ceiling, spearman
from bcnet.bench.correlation import correlations, reliability
from bcnet.bench.files import cache_folder, fetch
from bcnet.bench.spaces import quadratic
from bcnet.cli import app
from bcnet.errors import BcnetError
from bcnet.space.widths import WidthSpace, WidthVariable

RELEASED = Path(__file__).parents[2] / "shared" / "data" / "channel-bench-macro"
needs_released = pytest.mark.skipif(not RELEASED.is_dir(), reason=f"the released tables are not at {RELEASED}")


@pytest.fixture(autouse=True)
def _no_tables_of_this_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("CHANNEL_BENCH_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def table() -> ChannelBench:
    return ChannelBench.load(SPACE, FILE)


def failure(call: object, *args: object, **options: object) -> str:
    """The message of the BcnetError that the call must raise."""
    with pytest.raises(BcnetError) as caught:
        call(*args, **options)  # type: ignore[operator]
    return str(caught.value)


# Spaces ---------------------------------------------------------------------------------------------------------


@st.composite
def spaces(draw: st.DrawFn) -> BenchSpace:
    sets = draw(st.lists(st.sets(st.integers(1, 60), min_size=1, max_size=12), min_size=1, max_size=4))
    return BenchSpace("drawn", [WidthVariable(f"v{i}", tuple(sorted(s))) for i, s in enumerate(sets)])


@given(spaces(), st.integers(0, 2**31))
def test_widths_keys_and_indices_are_one_to_one(space: BenchSpace, seed: int) -> None:
    index = np.random.default_rng(seed).integers(0, space.size, size=20)
    keys = space.keys(index)
    assert (space.index(space.widths(index)) == index).all()
    assert (space.parse(keys) == index).all()
    assert (space.index(space.widths(index).astype(float)) == index).all()
    assert [space.keys(i) for i in index] == keys.tolist()
    assert (np.argsort(keys, kind="stable") == np.argsort(index, kind="stable")).all()


def test_index_keeps_the_shape_of_what_is_asked() -> None:
    widths = MOBILENET.all_widths()[:12].reshape(3, 4, 7)
    assert (MOBILENET.index(widths) == np.arange(12).reshape(3, 4)).all()
    assert MOBILENET.index(MOBILENET.max) == 4**7 - 1
    assert MOBILENET.parse("4444444") == 4**7 - 1
    assert MOBILENET.parse([]).shape == (0,)
    assert MOBILENET.widths(0).tolist() == [32, 192, 192, 192, 64, 384, 256]


@given(st.lists(st.integers(-50, 50), min_size=10, max_size=10), st.lists(st.integers(0, 90), min_size=3, max_size=3))
def test_quadratic_reads_a_polynomial_off_its_values(coefficients: list[int], point: list[int]) -> None:
    def polynomial(a: int, b: int, c: int) -> int:
        terms = (1, a, b, c, a * a, b * b, c * c, a * b, a * c, b * c)
        return sum(k * t for k, t in zip(coefficients, terms, strict=True))

    assert quadratic(polynomial, 3)([point]) == polynomial(*point)


def test_full_networks_cost_what_the_paper_says() -> None:
    assert MOBILENET.costs["flops"](MOBILENET.max) == 211_281_920
    assert RESNET.costs["flops"](RESNET.max) == 1_436_226_560


def test_wrong_widths_keys_and_indices_are_named() -> None:
    assert failure(MOBILENET.index, [[32, 192, 192, 192, 64, 384, 255]]) == (
        "width 255 is no candidate of variable 'c6': [256, 512, 768, 1024]"
    )
    assert failure(MOBILENET.index, np.array([-32, 192, 192, 192, 64, 384, 256])) == (
        "width -32 of variable 'c0' (number 1) must lie in 1..128"
    )
    assert failure(MOBILENET.index, [1, 2]) == "this space has 7 width variables, but 2 widths were given"
    assert failure(SPACE.parse, ["111", "115"]) == (
        "'115' is no key of space 'synthetic': a key is 3 digits, each at most the number of its variable's "
        "candidates, [4, 4, 4]"
    )
    for wrong in ("11", "1١1", "1A1", 111):
        assert failure(SPACE.parse, [wrong]).startswith(f"{wrong!r} is no key of space 'synthetic'")
    assert failure(SPACE.widths, [64]) == "an index of space 'synthetic' is a whole number in 0..63"
    assert failure(SPACE.keys, -1) == "an index of space 'synthetic' is a whole number in 0..63"


def test_a_space_must_be_small_enough() -> None:
    many = [WidthVariable(f"v{i}", tuple(range(1, 21))) for i in range(6)]
    assert failure(BenchSpace, "wide", many) == (
        "space 'wide' has 64,000,000 widths, but a table holds at most 16,777,216"
    )
    assert failure(BenchSpace, "long", [WidthVariable("v", tuple(range(1, 37)))]) == (
        "space 'long' has a variable of over 35 candidates, too many for a key"
    )


def test_a_wrong_space_name_gets_a_near_match() -> None:
    end = "name mobilenet, resnet or the .json file of a space"
    assert failure(ChannelBench.load, "mobilnet") == f"there is no space 'mobilnet' (did you mean 'mobilenet'?): {end}"
    assert failure(ChannelBench.load, "ResNet") == f"there is no space 'ResNet' (did you mean 'resnet'?): {end}"
    assert failure(ChannelBench.load, "vgg") == f"there is no space 'vgg': {end}"


def test_a_space_can_come_from_a_json_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.json"
    file.write_text(SPACE.to_json())
    assert get_space(str(file)) == SPACE
    assert get_space(str(file)).name == "mine"
    file.write_text("{")
    assert failure(get_space, str(file)) == f"{file} is no file of a space: this is no JSON text of a width space"
    file.write_bytes(b"\xff")
    assert failure(get_space, str(file)) == f"{file} is no file of a space: it is not text"
    file.unlink()
    assert failure(get_space, str(file)) == f"cannot read the space {file}: No such file or directory"


# Tables ---------------------------------------------------------------------------------------------------------


def test_the_committed_table_is_what_its_script_makes(tmp_path: Path) -> None:
    assert make().save(tmp_path / "made.json").read_bytes() == FILE.read_bytes()


def test_query_of_one_many_and_a_key(table: ChannelBench) -> None:
    raw = json.loads(FILE.read_text())
    widths = SPACE.all_widths()[::-1]
    entry = table.query(widths.reshape(4, 16, 3))
    assert entry.acc.shape == (4, 16, 3)
    keys = SPACE.keys(np.arange(64)[::-1])
    for field in ("acc", "mean", "std", "flops", "params"):
        assert getattr(entry, field).reshape(64, -1).tolist() == [np.atleast_1d(raw[k][field]).tolist() for k in keys]
    one = table.query([4, 12, 32])
    assert one.mean == raw["114"]["mean"] == table.query("114").mean
    assert one.widths.tolist() == [4, 12, 32]


def test_save_and_load_are_inverse_also_for_one_seed_and_a_plain_space(tmp_path: Path) -> None:
    plain = WidthSpace([WidthVariable("a", (1, 2)), WidthVariable("b", (3, 4, 7))])
    costs = {"flops": np.arange(6), "params": np.arange(6) * 3}
    made = ChannelBench(plain, np.linspace(10, 99.9, 6)[:, None], costs)
    read = ChannelBench.load(plain, made.save(tmp_path / "new" / "table.json"))
    assert (read.acc == made.acc).all()
    assert (read.std == 0).all()
    assert (read.costs["params"] == costs["params"]).all()
    assert not read.released
    assert list((tmp_path / "new").iterdir()) == [tmp_path / "new" / "table.json"]


def test_arrays_of_a_table_cannot_be_changed_by_mistake(table: ChannelBench) -> None:
    for array in (table.acc, table.mean, table.std, table.widths, table.costs["flops"]):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 0


def test_best_and_top_agree_with_a_plain_loop(table: ChannelBench) -> None:
    budgets = {"flops": 60_000, "params": 1_800}
    inside = [i for i in range(64) if all(table.costs[name][i] <= limit for name, limit in budgets.items())]
    ranked = sorted(inside, key=lambda i: (-table.mean[i], i))
    assert 0 < len(inside) < 64
    assert table.best(budgets).mean == table.mean[ranked[0]]
    assert SPACE.index(table.top(5, budgets).widths).tolist() == ranked[:5]
    assert SPACE.index(table.top(100, budgets).widths).tolist() == ranked
    assert table.best().mean == table.mean.max()


def test_budgets_on_a_cost_of_ones_own(table: ChannelBench) -> None:
    mine = make()
    mine.add_cost("latency", lambda widths: widths.sum(axis=1) / 10)
    assert mine.best({"latency": 3.3}).widths.sum() <= 33
    assert failure(mine.add_cost, "energy", [1.0, 2.0]) == (
        "cost 'energy' needs 64 finite numbers, one for every widths of the table"
    )
    assert failure(table.best, {"latency": 3}) == "the table has no cost 'latency': it has flops, params"


def test_bad_budgets(table: ChannelBench) -> None:
    assert failure(table.best, {"flop": 1}) == (
        "the table has no cost 'flop' (did you mean 'flops'?): it has flops, params"
    )
    assert failure(table.best, {"flops": float("nan")}) == "the budget of flops must be a number, got nan"
    assert failure(table.best, {"flops": "many"}) == "the budget of flops must be a number, got 'many'"
    assert failure(table.best, {"flops": 100_000, "params": 5}) == (
        "no widths of space 'synthetic' keep within flops <= 100,000, params <= 5; the least there is: "
        "flops 13,328, params 498"
    )
    assert failure(table.top, 0) == "n is 0, but it must be at least 1"


# Bad tables -----------------------------------------------------------------------------------------------------


def broken(tmp_path: Path, change: object, verify: bool = False) -> str:
    """The message for the synthetic table after ``change(entries)``, without the part that names the file."""
    entries = json.loads(FILE.read_text())
    changed = change(entries)  # type: ignore[operator]
    file = tmp_path / "broken.json"
    file.write_text(json.dumps(entries if changed is None else changed))
    message = failure(ChannelBench.load, SPACE, file, verify=verify)
    start = f"the table {file} is no table of space 'synthetic': "
    assert message.startswith(start)
    return message.removeprefix(start)


def test_a_table_cut_short(tmp_path: Path) -> None:
    file = tmp_path / "cut.json"
    file.write_bytes(FILE.read_bytes()[:5000])
    assert failure(ChannelBench.load, SPACE, file) == (
        f"the table {file} is no table of space 'synthetic': this is no whole JSON file (5,000 bytes); "
        "it may be cut short"
    )
    for content in (b"", b"\xff\xfe\x00", b"[" * 100_000, b'{"111": ' + b"9" * 5000 + b"}"):
        file.write_bytes(content)
        assert failure(ChannelBench.load, SPACE, file).endswith("it may be cut short")


def test_an_edited_table_is_refused_unless_it_is_admitted(tmp_path: Path) -> None:
    file = tmp_path / "edited.json"
    file.write_bytes(FILE.read_bytes().replace(b"89.66,", b"89.67,"))
    found = hashlib.sha256(file.read_bytes()).hexdigest()
    assert failure(ChannelBench.load, SPACE, file) == (
        f"the table {file} is not the released one of space 'synthetic' (SHA-256 {found[:12]}, expected 57469f7c825d): "
        "fetch that with 'bcnet bench fetch synthetic', or admit a table of your own with verify=False (--no-verify)"
    )
    edited = ChannelBench.load(SPACE, file, verify=False)
    assert edited.query("111").acc[0] == 89.67
    assert edited.sha256 == found
    assert not edited.released


def test_keys_missing_or_of_another_space(tmp_path: Path) -> None:
    def lose(entries: dict[str, object]) -> None:
        del entries["234"], entries["123"]

    assert broken(tmp_path, lose, verify=True) == "2 of the 64 keys of space 'synthetic' are missing, first '123'"
    assert broken(tmp_path, lambda entries: entries.update({"1111": {}})).startswith("'1111' is no key of space")
    file = tmp_path / "twice.json"
    file.write_bytes(FILE.read_bytes().replace(b'"112":', b'"111":'))
    assert failure(ChannelBench.load, SPACE, file).endswith(": '111' stands twice in one JSON object")


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("acc", [91, 92], "key '112' has 2 accuracies, but the first key has 3"),
        ("acc", [], "acc of key '112' must be a list of percentages in 0..100, got []"),
        ("acc", 91.5, "acc of key '112' must be a list of percentages in 0..100, got 91.5"),
        ("acc", [1, 2, 101], "acc of key '112' must be a list of percentages in 0..100, got [1, 2, 101]"),
        ("acc", [1, 2, "3"], "acc of key '112' must be a list of percentages in 0..100, got [1, 2, '3']"),
        ("acc", [1, 2, True], "acc of key '112' must be a list of percentages in 0..100, got [1, 2, True]"),
        ("acc", [1, 2, float("nan")], "acc of key '112' must be a list of percentages in 0..100, got [1, 2, nan]"),
        ("mean", 95.0, "key '112' has mean 95.000, but its accuracies average 89.713"),
        ("mean", None, "mean of key '112' must be a number, got None"),
        ("std", "0.1", "std of key '112' must be a number, got '0.1'"),
        ("flops", 14_945, "key '112' has flops 14,945, but its widths cost 14,944"),
        ("flops", 14944.0, "flops of key '112' must be a whole number, got 14944.0"),
        ("params", -1, "params of key '112' must be a whole number, got -1"),
        ("params", 2**63, f"params of key '112' must be a whole number, got {2**63}"),
    ],
)
def test_wrong_fields(tmp_path: Path, field: str, value: object, message: str) -> None:
    def change(entries: dict[str, dict[str, object]]) -> None:
        entries["112"][field] = value

    assert broken(tmp_path, change) == message


def test_wrong_schema(tmp_path: Path) -> None:
    none = "a table is a JSON object of keys and their entries, and this is none"
    assert broken(tmp_path, lambda entries: [entries]) == none
    assert broken(tmp_path, lambda entries: {}) == none
    missing = "the entry of key '111' must be an object with acc, std, flops, params, mean"
    assert broken(tmp_path, lambda entries: entries["111"].pop("std") and None) == missing
    assert broken(tmp_path, lambda entries: entries.update({"111": 91.0})) == missing


def test_a_table_made_of_wrong_arrays() -> None:
    assert failure(ChannelBench, SPACE, np.ones((3, 3))) == (
        "a table of space 'synthetic' needs accuracies of shape (64, seeds), got (3, 3)"
    )
    assert failure(ChannelBench, SPACE, np.full((64, 1), np.nan)) == "accuracies must be percentages in 0..100"
    plain = WidthSpace(SPACE.variables)
    assert failure(ChannelBench, plain, np.ones((64, 1)), {"flops": np.arange(64)}) == (
        "space 'custom' does not know its params: give the table whole numbers for it"
    )


# Finding and fetching -------------------------------------------------------------------------------------------


def test_where_a_table_is_looked_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert failure(ChannelBench.load, "mobilenet") == (
        "the table of space 'mobilenet' is not on this machine: fetch it with 'bcnet bench fetch mobilenet', "
        "name its file with --table, or set CHANNEL_BENCH_DIR to its folder"
    )
    assert ChannelBench.load(SPACE, FILE.parent).path == FILE
    cached = cache_folder() / FILE.name
    cached.parent.mkdir(parents=True)
    cached.write_bytes(FILE.read_bytes())
    assert ChannelBench.load(SPACE).path == cached
    monkeypatch.setenv("CHANNEL_BENCH_DIR", str(FILE.parent))
    assert ChannelBench.load(SPACE).path == FILE
    monkeypatch.setenv("CHANNEL_BENCH_DIR", str(tmp_path))
    assert failure(ChannelBench.load, SPACE) == (
        f"there is no synthetic_table.json in {tmp_path}, which CHANNEL_BENCH_DIR names"
    )
    assert failure(ChannelBench.load, SPACE, tmp_path) == f"there is no synthetic_table.json in {tmp_path}"
    assert failure(ChannelBench.load, SPACE, tmp_path / "no") == (
        f"there is no table at {tmp_path / 'no'}: name an existing file, or a folder of released tables"
    )
    plain = WidthSpace(SPACE.variables)
    assert failure(ChannelBench.load, plain, tmp_path) == (
        f"space 'custom' has no released table to look for in {tmp_path}: name the file itself"
    )
    monkeypatch.delenv("CHANNEL_BENCH_DIR")
    assert failure(ChannelBench.load, plain) == "space 'custom' has no released table: name the file of its table"


def test_fetch_writes_a_verified_table_and_keeps_it(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / FILE.name).write_bytes(FILE.read_bytes())
    got = fetch(SPACE, source=source.as_uri())
    assert got == cache_folder() / FILE.name
    assert ChannelBench.load(SPACE).released
    (source / FILE.name).unlink()
    assert fetch(SPACE, source=source.as_uri()) == got
    assert [file.name for file in got.parent.iterdir()] == [FILE.name]


def test_fetch_refuses_what_is_not_the_released_table(tmp_path: Path) -> None:
    (tmp_path / FILE.name).write_bytes(b"{}")
    source = tmp_path.as_uri()
    assert failure(fetch, SPACE, tmp_path / "to", source=source) == (
        f"{source}/synthetic_table.json is not the released table (SHA-256 44136fa355b3, expected 57469f7c825d), "
        "so nothing was written: get the file from https://github.com/xiusu/Channel-Bench-Macro "
        "and name it with --table"
    )
    assert not (tmp_path / "to").exists()
    assert failure(fetch, WidthSpace(SPACE.variables)) == (
        "space 'custom' has no released table to fetch: name the file of its table instead"
    )


def test_fetch_without_a_network_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(url: str, timeout: float) -> None:
        raise urllib.error.URLError("no route")

    monkeypatch.setattr("urllib.request.urlopen", unreachable)
    assert failure(fetch, "resnet") == (
        "cannot download https://raw.githubusercontent.com/xiusu/Channel-Bench-Macro/HEAD/Results_ResNet.json "
        "(no route): on a machine with a network get the file from https://github.com/xiusu/Channel-Bench-Macro, "
        "then name it with --table or set CHANNEL_BENCH_DIR to its folder"
    )
    assert not cache_folder().exists()


def test_fetch_into_a_place_that_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    target = tmp_path / "file" / FILE.name
    assert failure(fetch, SPACE, tmp_path / "file", source=FILE.parent.as_uri()).startswith(f"cannot write {target}: ")


# Simulated search -----------------------------------------------------------------------------------------------


def test_scorer_counts_queries_and_distinct_trainings(table: ChannelBench) -> None:
    scorer = table.scorer(seed=1)
    widths = SPACE.all_widths()
    assert scorer(widths[5], run=2) == table.acc[5, 2]
    assert (scorer.queries, scorer.evaluations) == (1, 1)
    assert scorer.score_many(widths[[5, 5, 6]], run=np.array([2, 0, 0])).tolist() == [
        table.acc[5, 2],
        table.acc[5, 0],
        table.acc[6, 0],
    ]
    assert (scorer.queries, scorer.evaluations) == (4, 3)
    assert scorer.score_many(widths[:2], run="mean").tolist() == table.mean[:2].tolist()
    assert (scorer.queries, scorer.evaluations) == (6, 9)


def test_scorer_draws_a_run_per_query_from_its_seed(table: ChannelBench) -> None:
    widths = np.repeat(SPACE.all_widths()[:1], 60, axis=0)
    drawn = table.scorer(seed=3).score_many(widths)
    one_by_one = table.scorer(seed=3)
    assert drawn.tolist() == [one_by_one(row) for row in widths]
    assert set(drawn) == set(table.acc[0])
    assert one_by_one.evaluations == 3
    assert drawn.tolist() != table.scorer(seed=4).score_many(widths).tolist()


def test_trajectory_follows_the_best_score(table: ChannelBench) -> None:
    scorer = table.scorer()
    assert scorer.trajectory().shape == (0,)
    scores = scorer.score_many(SPACE.all_widths()[:20]).tolist()
    leaders = [int(np.argmax(scores[: i + 1])) for i in range(20)]
    assert scorer.trajectory().tolist() == table.mean[leaders].tolist()


def test_wrong_shapes_to_score(table: ChannelBench) -> None:
    message = "call the scorer with one widths (L,), and score_many with rows of widths (n, L)"
    assert failure(table.scorer(), SPACE.all_widths()) == message
    assert failure(table.scorer().score_many, SPACE.max) == message
    assert failure(table.scorer(), [4, [12], 8]) == "widths must be rows of whole numbers of equal length"


@pytest.mark.parametrize("run", [3, -1, 0.5, np.array([0, 1]), True])
def test_wrong_runs(table: ChannelBench, run: object) -> None:
    scorer = table.scorer()
    message = "a run is a whole number in 0..2, one for all widths or one for each"
    assert failure(scorer, SPACE.max, run=run) == message
    assert failure(scorer, SPACE.max, run="best") == "run is 'best', but it must be a number, 'mean' or None"
    assert scorer.queries == 0


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
    ("name", "flops", "params", "best", "ceiling"),
    [
        ("mobilenet", (74.0, 74.2, 54.6), (60.4, 60.3, 42.6), (91.223, 91.713, 91.857), 0.83),
        ("resnet", (83.6, 85.7, 67.3), (66.9, 69.1, 50.9), (93.257, 93.647, 93.830), 0.81),
    ],
)
def test_released_tables_give_the_recomputed_figures(
    name: str, flops: tuple[float, ...], params: tuple[float, ...], best: tuple[float, ...], ceiling: float
) -> None:
    # Loading also proves the cost formulas: it compares them with all 16,384 entries.
    table = ChannelBench.load(name, RELEASED)
    assert table.released
    assert len(table) == 16_384
    assert table.acc.shape == (16_384, 3)
    for cost, expected in (("flops", flops), ("params", params)):
        found = table.correlate(table.costs[cost])
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
    result = CliRunner().invoke(app, ["bench", *map(str, args)])
    return result.exit_code, result.stdout, result.stderr


def test_stats_command(tmp_path: Path, table: ChannelBench) -> None:
    space = tmp_path / "small.json"
    space.write_text(SPACE.to_json())
    code, out, _ = bench("stats", space, "--table", FILE, "--json")
    figures = json.loads(out)
    assert code == 0
    assert figures["flops"] == table.correlate(table.costs["flops"])
    assert figures["params"] == table.correlate(table.costs["params"])
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
    assert err.startswith("error: there is no space 'resnt' (did you mean 'resnet'?): ")


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
        "print([m for m in ('typer', 'rich', 'pydantic', 'pymoo', 'plotly', 'matplotlib') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
