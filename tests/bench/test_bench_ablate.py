"""``bcnet bench ablate`` on a tiny recipe: every variant is a recipe, supernets are shared, and work is resumed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import terminal
import tinyrun

from bcnet.bench.ablate import Ablation, chart, summary, variants
from bcnet.errors import BcnetError
from bcnet.run.recipe import Recipe

FAST = {
    "supernet": {"epochs": 1},
    "retrain": {"epochs": 1},
    "search": {"evaluations": 8, "population": 4},
    "checkpoint_minutes": 5,
}


@pytest.mark.parametrize("name", ["digits", "channel_bench_mobilenet", "mobilenetv2_imagenet"])
def test_every_variant_of_a_recipe_is_a_recipe(name: str, tmp_path: Path) -> None:
    recipe = Recipe.read(name)
    ablation = Ablation(recipe, tmp_path)
    changed = {(v.ablation, v.name): ablation._changed(v, seed=3) for v in variants(recipe)}
    assert len({a for a, _ in changed}) == 7
    assert {r.seed for r in changed.values()} == {3}
    assert {r.search.choose for r in changed.values()} == {"score"}
    assert changed["complement", "without"].paths.sampling.complement is False
    assert changed["sides", "alternating"].paths.sampling.sides == "alternate"
    assert changed["supernet and search", "ua, greedy"].search.strategy == "greedy"
    assert changed["prior", "prior only"].search.strategy == "prior"
    assert changed["prior", "none"].prior is None


def test_an_ablation_shares_supernets_and_goes_on(tmp_path: Path) -> None:
    recipe = tinyrun.recipe(tmp_path, **FAST)
    chosen = variants(recipe, ["prior", "sides"])
    rows = Ablation(recipe, tmp_path / "out").work(chosen, [0, 1])
    assert [(r["variant"], r["seed"]) for r in rows[:2]] == [("both in a step", 0), ("both in a step", 1)]
    assert len(list((tmp_path / "out" / "supernets").iterdir())) == 4  # two seeds, both sides or alternating
    lines = (tmp_path / "out" / "results.jsonl").read_text().splitlines()
    assert len(lines) == 2 * (len(chosen) - 1)  # both sides with the whole log is in two ablations
    (tmp_path / "out" / "results.jsonl").write_text("\n".join(lines[:-1]) + "\n" + lines[-1][:20])
    again = Ablation(recipe, tmp_path / "out").work(chosen, [0, 1])
    assert [r["accuracy"] for r in again] == [r["accuracy"] for r in rows]
    found = summary(rows)
    assert len(found) == len(chosen)
    assert all(row["half"] >= 0 and len(row["by_seed"]) == 2 for row in found)
    assert all(row["variant"] in chart(found) for row in found)


def test_from_the_command_line(tmp_path: Path) -> None:
    file = tmp_path / "tiny.yaml"
    file.write_text(tinyrun.recipe(tmp_path, **FAST).to_yaml())
    shown = terminal.run(
        "bench", "ablate", str(file), "--only", "complement", "--seeds", "0", "--out", str(tmp_path / "out"), "--json"
    )
    assert shown.exit_code == 0, shown.output
    found = json.loads(shown.stdout)
    assert [row["variant"] for row in found] == ["with", "without"]
    assert found == json.loads((tmp_path / "out" / "ablate.json").read_text())["summary"]
    assert (tmp_path / "out" / "ablate.svg").is_file()


def test_a_variant_that_cannot_hold_the_budget_has_a_row_and_the_others_go_on(tmp_path: Path) -> None:
    whole = tinyrun.recipe(tmp_path, **FAST)
    narrow = whole.changed(groups=8, base=1, budgets=["flops=15%"])
    chosen = [v for v in variants(narrow, ["base width"]) if v.name in ("1", "4")]
    rows = Ablation(narrow, tmp_path / "out").work([*reversed(chosen)], [0])
    wide, fits = rows
    assert wide["variant"] == "4"
    assert wide["failure"].startswith("budget flops=15% is impossible: the smallest network of this space costs")
    assert "accuracy" not in wide
    assert fits["accuracy"] > 0
    found = summary(rows)
    assert (found[0]["mean"], found[0]["by_seed"], found[0]["failed"]) == (None, [], 1)
    assert found[1]["mean"] == fits["accuracy"]
    assert "cannot hold the budget" in chart(found)
    again = Ablation(narrow, tmp_path / "out").work([*reversed(chosen)], [0])  # a failure is not tried again
    assert again == rows
    file = tmp_path / "narrow.yaml"
    file.write_text(narrow.to_yaml())
    shown = terminal.run(
        "bench", "ablate", str(file), "--only", "base width", "--seeds", "0", "--out", str(tmp_path / "out")
    )
    assert shown.exit_code == 0, shown.output
    assert "base width, 4: 1 of 1 seeds found nothing: budget flops=15% is impossible" in shown.stdout


def test_greedy_slimming_that_does_not_come_down_to_the_budget_is_a_row(tmp_path: Path) -> None:
    recipe = tinyrun.recipe(tmp_path, **{**FAST, "budgets": ["flops=20%"], "search": {"evaluations": 2}})
    greedy = next(v for v in variants(recipe) if v.name == "ua, greedy")
    (row,) = Ablation(recipe, tmp_path / "out").work([greedy], [0])
    assert row["failure"].startswith("nothing within flops=20% got a score in 2 evaluations")


def test_other_errors_end_an_ablation(tmp_path: Path) -> None:
    recipe = tinyrun.recipe(tmp_path, **FAST).changed(data=f"imagefolder:{tmp_path}/missing")
    with pytest.raises(BcnetError, match="missing"):
        Ablation(recipe, tmp_path / "out").work(variants(recipe, ["sides"])[:1], [0])


def test_mistakes(tmp_path: Path) -> None:
    with pytest.raises(BcnetError, match="there is no ablation 'depth': there are supernet and search, groups"):
        variants(Recipe.read("digits"), ["depth"])
    with pytest.raises(BcnetError, match="give a recipe with start: scratch"):
        Ablation(Recipe(model="zoo:digits_cnn", data="digits"), tmp_path)
