"""A run so small that it takes a moment: a tiny network from a file, on digits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bcnet.run.pipeline import run_stages
from bcnet.run.recipe import Recipe
from bcnet.run.session import Listener, Run, facts

NETWORK = """
from torch import nn

def tiny():
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(),
        nn.Conv2d(8, 8, 3, stride=2, bias=False), nn.BatchNorm2d(8), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(1), nn.Linear(8, 10),
    )

tiny.input_shape = (1, 8, 8)
"""

SETTINGS: dict[str, Any] = {
    "start": "scratch",
    "fallback": False,
    "data": "digits",
    "val_fraction": 0.2,
    "loading": {"batch_size": 256},
    "groups": 8,
    "budgets": ["flops=50%"],
    "supernet": {"epochs": 2},
    "search": {"evaluations": 12, "population": 4, "choose": "log-width"},
    "compare": ["full", "uniform"],
    "retrain": {"epochs": 2},
    "checkpoint_minutes": 1e-9,
    "threads": 1,
}


def network_file(folder: Path) -> Path:
    path = folder / "tiny.py"
    path.write_text(NETWORK)
    return path


def recipe(folder: Path, **changes: Any) -> Recipe:
    return Recipe.parse({"model": f"{network_file(folder)}:tiny", **SETTINGS, **changes})


def create(folder: Path, **changes: Any) -> Run:
    """A run in folder/run that has not begun."""
    chosen = recipe(folder, **changes)
    return Run.create(folder / "run", chosen, facts(["test"], chosen, "cpu"))


class Stopped(Exception):
    pass


class StopAt(Listener):
    """Raises when it is told something for the n-th time."""

    def __init__(self, number: int):
        self.left = number

    def step(self, name: str, done: int, total: int, figures: dict[str, float]) -> None:
        self.left -= 1
        if self.left == 0:
            raise Stopped


class Notes(Listener):
    def __init__(self) -> None:
        self.stages: list[str] = []
        self.notes: list[str] = []
        self.steps = 0

    def stage(self, name: str, about: str) -> None:
        self.stages.append(name)

    def note(self, text: str) -> None:
        self.notes.append(text)

    def step(self, name: str, done: int, total: int, figures: dict[str, float]) -> None:
        self.steps += 1


def work(run: Run, until: str = "compare", listener: Listener | None = None, again: bool = False) -> Run:
    run.listener = listener or Listener()
    with run.lock():
        run_stages(run, until, again)
    return run


def outcome(folder: Path) -> dict[str, tuple[list[int], float, float]]:
    """What must not depend on how often a run was stopped: widths, score and loss by network."""
    run = Run.open(folder)
    results = {name: run.read(f"retrain/{name}") for name in run.read("retrain")["networks"]}
    return {name: (r["widths"], r["score"], r["loss"]) for name, r in results.items()}


TRAINED: dict[str, Any] = {
    **{key: value for key, value in SETTINGS.items() if key not in ("start", "supernet")},
    "least": 2,
    "given": {"epochs": 12, "warmup": 0},
    "healing": {"steps": 2, "calibration": 2},
    "search": {"evaluations": 10, "population": 6},
    "race": {"finalists": 3, "rounds": 2},
    "retrain": {"epochs": 4, "warmup": 0},
}
"""What a run from a trained network takes in place of :data:`SETTINGS`."""


def trained(folder: Path, weights: Path | None = None, **changes: Any) -> Run:
    """A run in folder/run that has not begun, of the tiny network with ``weights``, or with none."""
    given = {} if weights is None else {"weights": str(weights)}
    content = {"model": f"{network_file(folder)}:tiny", **TRAINED, **given, **changes}
    chosen = Recipe.parse(content)
    return Run.create(folder / "run", chosen, facts(["test"], chosen, "cpu"))
