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
