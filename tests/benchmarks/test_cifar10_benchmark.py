"""The CIFAR-10 benchmark: what waits for what, and a page that says what the figures say."""

from __future__ import annotations

import importlib.util
import sys
from argparse import Namespace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from bcnet.run.recipe import Recipe


def script(name: str) -> ModuleType:
    folder = Path(__file__).parents[2] / "benchmarks"
    path = folder / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"benchmark_{name}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    sys.path.insert(0, str(folder))
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(folder))
    return module


def network(score: float, flops: float) -> dict[str, Any]:
    return {"score": score, "seconds": 30.0, "widths": [4, 8], "costs": {"flops": flops, "params": 1.2e6}}


def run(seed: int, scores: dict[str, float]) -> dict[str, Any]:
    return {
        "budget": "flops=44M",
        "seed": seed,
        "variables": [["stem.conv", 8], ["head.conv", 16]],
        "full": {"flops": 296e6, "params": 2.2e6},
        "supernet": {"seconds": 20.0},
        "search": {
            "best": {"score": 0.71},
            "supernet": {"uniform": 0.7, "full": 0.8},
            "evaluations": 10,
            "seconds": 5.0,
        },
        "networks": {name: network(score, 43.9e6) for name, score in scores.items()},
        "recipe": Recipe.read("mobilenetv2_cifar").changed(sampling={"extremes": 0.5}).to_dict(),
    }


def page(*scores: dict[str, float]) -> str:
    facts = {"date": "2026-11-15", "machine": "a GPU", "versions": {"torch": "2.11"}, "commit": "abc", "command": "x"}
    runs = [run(seed, given) for seed, given in enumerate(scores)]
    text: str = script("cifar10_report").page({**facts, "wall_seconds": 100.0, "runs": runs})
    return text


@pytest.mark.parametrize(
    ("scores", "sentence"),
    [
        (
            [{"found": 0.9, "uniform": 0.89, "random": 0.88}, {"found": 0.91, "uniform": 0.89, "random": 0.9}],
            "At 44M, the found network beats uniform scaling with every seed, by 1.50 points on average; "
            "the paper's gain is +1.5, and +1.50 points from `random`.",
        ),
        (
            [{"found": 0.9, "uniform": 0.89}, {"found": 0.886, "uniform": 0.89}],
            "At 44M, the found network is 0.30 points better than uniform scaling on average, but not with every seed; "
            "the paper's gain is +1.5.",
        ),
        (
            [{"found": 0.88, "uniform": 0.89}],
            "At 44M, no gain: the found network is 1.00 points worse than uniform scaling on average; "
            "the paper's gain is +1.5.",
        ),
        (
            [{"found": 0.9, "uniform": 0.89, "published": 0.905}],
            "At 44M, the found network beats uniform scaling with every seed, by 1.00 points on average; "
            "the paper's gain is +1.5. The widths that its authors published gain +1.50 points here.",
        ),
        ([{"uniform": 0.89}], "At 44M, the found network was not retrained, so there is no verdict."),
    ],
)
def test_the_verdict_follows_from_the_figures(scores: list[dict[str, float]], sentence: str) -> None:
    assert f"- {sentence}\n" in page(*scores)


def test_the_page_has_every_seed_and_every_width() -> None:
    text = page({"found": 0.9, "uniform": 0.89}, {"found": 0.91, "uniform": 0.89})
    assert "| `bcnet` | 90.50 % | 90.00, 91.00 | 43.9 | 1.20 | +1.50 (+1.00, +2.00) |" in text
    assert "| `head.conv` | 16 | 8 (50%) | 8 (50%) | 8 (50%) |" in text
    assert "| 44M | 1 | 71.00 % | 70.00 % | 80.00 % | 10 | 20 | 5 |" in text


def test_the_page_says_how_sure_a_mean_gain_is() -> None:
    # Gains of 1 and 2 points: their variance is 0.5, that of their mean 0.25.
    text = page({"found": 0.9, "uniform": 0.89}, {"found": 0.91, "uniform": 0.89})
    assert "a mean gain has a standard error of about 0.50 points." in text


def test_the_page_says_what_was_not_run() -> None:
    text = page({"found": 0.9, "uniform": 0.89, "random": 0.88}, {"found": 0.9, "uniform": 0.89})
    assert "Not run yet: `random` of seed 1.\n" in text


def test_the_page_keeps_what_was_measured_before_and_by_which_commands() -> None:
    facts = {"date": "2026-11-15", "machine": "a GPU", "versions": {"torch": "2.11"}, "commit": "abc"}
    now = {**facts, "command": "third", "before": ["first", "second"], "runs": [run(0, {"found": 0.9})]}
    earlier = {**facts, "command": "old", "runs": [run(0, {"found": 0.7, "uniform": 0.8})]}
    text = script("cifar10_report").page(now, earlier)
    assert "- `first`\n- `second`\n- `third`\n" in text
    section = text.partition("## By the best score")[2].partition("\n## ")[0]
    assert "| `bcnet` | 70.00 % | 70.00 | 43.9 | 1.20 | -10.00 (-10.00) |" in section
    assert "2026-11-15, a GPU, torch 2.11, commit abc: `old`" in section


def test_the_page_tells_how_well_the_law_foretold() -> None:
    one = run(0, {"found": 0.9, "uniform": 0.8, "balanced": 0.85})
    one["search"]["law"] = {"gains": [0.1, 0.2]}
    for name, widths in {"found": [8, 16], "uniform": [4, 8], "balanced": [2, 16]}.items():
        one["networks"][name]["widths"] = widths
    # The law holds them 0.3, 0 and 0.1 above uniform scaling; they are 10, 0 and 5 points above it.
    expected = np.corrcoef([0.3, 0.0, 0.1], [10, 0, 5])[0, 1]
    text = "\n".join(script("cifar10_report").foretold("flops=44M", [one]))
    assert "Over all 3 networks retrained at 44M, Pearson's correlation of the law\nof the scores" in text
    assert f"is {expected:.2f} (seed 0)." in text


def test_a_search_by_loss_shows_losses() -> None:
    ranked = run(0, {"found": 0.9, "uniform": 0.89})
    ranked["search"] |= {"ranked_by": "loss", "best": {"score": -1.21}, "supernet": {"uniform": -1.25, "full": -1.1}}
    text = "\n".join(script("cifar10_report").supernet_table([ranked]))
    assert text.startswith("Loss on the held-out training images, by which the search ranks.")
    assert "| 44M | 0 | 1.2100 | 1.2500 | 1.1000 |" in text
    assert "| 44M | 0 | 71.00 % | 70.00 % | 80.00 % |" in page({"found": 0.9, "uniform": 0.89})


def test_jobs_wait_for_their_search_and_come_in_the_order_of_the_plan(tmp_path: Path) -> None:
    module, file = script("cifar10"), tmp_path / "rows.jsonl"
    wanted = ["found", "uniform", "published"]
    names = [job.place["name"] for job in module.jobs(["44M"], [0, 1], wanted, 60, file)]
    assert names == ["uniform", "uniform", "published", "published"]
    module.add(file, {"searched": "44M", "seed": 1, "widths": [3] * 25, "law": [4] * 25})
    jobs = module.jobs(["44M"], [0, 1], [*wanted, "found by law"], 60, file)
    found = [(job.place["name"], job.seed, job.widths[0]) for job in jobs if job.place["name"].startswith("found")]
    assert found == [("found", 1, 3), ("found by law", 1, 4)]
    for job in jobs:
        assert module.within("44M").costs["flops"](np.array(job.widths))[0] <= module.CASES["44M"].flops
        assert job.recipe["epochs"] == 60


def long_row(name: str, seed: int, last: float) -> dict[str, Any]:
    facts = {"date": "2026-11-17", "machine": "a GPU", "versions": {"torch": "2.11"}, "commit": "abc", "command": "x"}
    place = {"case": "44M", "name": name, "seed": seed, "epochs": 60}
    return {**place, "last": last, "flops": 44e6, "params": 0.4e6, **facts}


def test_the_longer_page_pairs_by_seed_and_judges_the_goal() -> None:
    module = script("cifar10")
    rows = [long_row("uniform", seed, last) for seed, last in enumerate([90.0, 91.0, 92.0])]
    rows += [long_row("found", 0, 91.0), long_row("found", 1, 92.2), long_row("published", 0, 91.5)]
    text = module.page(rows)
    assert "| found | 91.60 ± 7.62 | 91.00, 92.20 | 44.00 | 0.40 | +1.10 ± 1.27 |\n" in text
    assert "| published | 91.50 | 91.50 | 44.00 | 0.40 | +1.50 |\n" in text
    assert "is missed: +1.10 and +1.50 points." in text
    assert "There is no verdict on the goal" in module.page(rows[:3])
    assert "It has not been run yet." in module.page([])


def test_a_small_case_is_searched_trained_and_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module, file = script("cifar10"), tmp_path / "rows.jsonl"
    monkeypatch.setitem(module.CASES, "digits", module.Case("digits", 500_000, (8, 16, 32, 16, 32)))
    monkeypatch.syspath_prepend(str(Path(module.__file__).parent))
    args = Namespace(data="digits", runs=tmp_path / "runs", out=file, device="cpu", cases=["digits"], seeds=[0])
    args.supernet_epochs, args.evaluations, args.seconds = 2, 4, 100.0
    module.search_all(args)
    module.search_all(args)  # which is done
    (row,) = module.known(file)
    assert (row["searched"], row["seed"], row["evaluations"]) == ("digits", 0, 4)
    chosen = ["found", "found by law", "published"]
    jobs = module.jobs(["digits"], [0], chosen, 2, file)
    assert {job.place["name"]: list(job.widths) for job in jobs} == {
        "found": row["widths"], "found by law": row["law"], "published": [8, 16, 32, 16, 32]
    }  # fmt: skip
    assert module.train_all(jobs, module.Setting("digits", file))
    text = module.page(module.known(file))
    for name in chosen:
        assert f"| {name} | " in text
