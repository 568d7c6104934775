"""Channel-Bench-Macro: tables, queries, budgets, simulated search and fetching."""

from __future__ import annotations

import hashlib
import json
import os
import time
import urllib.error
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from bench_tables import committed_table, failure, no_tables_of_this_machine  # noqa: F401
from synthetic_table import FILE, SPACE, make

from bcnet.bench import ChannelBench
from bcnet.bench.files import cache_folder, fetch
from bcnet.bench.spaces import get_space
from bcnet.space.widths import WidthSpace, WidthVariable

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
        "cost 'energy' needs 64 finite numbers, one for every configuration of the table"
    )
    assert failure(table.best, {"latency": 3}) == "the table has no cost 'latency': it has flops, params"


def test_bad_budgets(table: ChannelBench) -> None:
    assert failure(table.best, {"flop": 1}) == ("the table has no cost 'flop': did you mean 'flops'?")
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


@pytest.mark.parametrize("put", [os.mkfifo, lambda path: path.symlink_to("/dev/zero")])
def test_only_regular_files_are_read(put: Callable[[Path], object], tmp_path: Path) -> None:
    """A pipe would wait for ever, and a device would fill the memory."""
    put(tmp_path / "odd.json")
    assert failure(ChannelBench.load, SPACE, tmp_path / "odd.json").endswith("odd.json: Not a regular file")
    assert failure(get_space, str(tmp_path / "odd.json")).endswith("odd.json: Not a regular file")


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


def test_many_keys_take_no_longer_than_they_must(tmp_path: Path) -> None:
    """A quadratic look for keys that stand twice would take minutes."""
    file, start = tmp_path / "many.json", time.monotonic()
    file.write_text(json.dumps(dict.fromkeys(map(str, range(10**6, 10**6 + 95_000)))))
    assert "is no key of space" in failure(ChannelBench.load, SPACE, file)
    assert time.monotonic() - start < 10


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
    got = fetch(SPACE, url=source.as_uri())
    assert got == cache_folder() / FILE.name
    assert ChannelBench.load(SPACE).released
    (source / FILE.name).unlink()
    assert fetch(SPACE, url=source.as_uri()) == got
    assert [file.name for file in got.parent.iterdir()] == [FILE.name]


def test_fetch_refuses_what_is_not_the_released_table(tmp_path: Path) -> None:
    (tmp_path / FILE.name).write_bytes(b"{}")
    url = tmp_path.as_uri()
    assert failure(fetch, SPACE, tmp_path / "to", url=url) == (
        f"{url}/synthetic_table.json is not the released table (SHA-256 44136fa355b3, expected 57469f7c825d), "
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
    assert failure(fetch, SPACE, tmp_path / "file", url=FILE.parent.as_uri()) == (
        f"cannot write {target}: a file is where a folder should be, so move it away or choose another folder"
    )


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


def test_wrong_shapes_to_score(table: ChannelBench) -> None:
    message = "call the scorer with one configuration (L,), and score_many with rows of them (n, L)"
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
