"""What a report is made from: plain data, filled from the folder of a run or by hand."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bcnet.errors import BcnetError
from bcnet.search.budget import Budget
from bcnet.search.store import TrialStore
from bcnet.search.trial import Trial
from bcnet.space.widths import WidthVariable

if TYPE_CHECKING:
    from bcnet.runfolder import RunFolder

NAMES = ("full", "uniform", "balanced", "random", "found")


@dataclass(frozen=True)
class Figures:
    """One network: its widths (L,), its score after training from scratch, and what it costs.

    ``costs`` are computed, in their own units (memory in bytes, latency in nanoseconds); ``latency_ms`` is measured.
    """

    name: str
    widths: tuple[int, ...]
    score: float
    costs: Mapping[str, float]
    latency_ms: float | None = None


@dataclass(frozen=True)
class Curve:
    """The mean loss of every epoch of one training, (e,)."""

    name: str
    losses: tuple[float, ...]


@dataclass(frozen=True)
class ReportData:
    """Everything a report shows. ``networks`` are by name, of :data:`NAMES`; ``full`` and ``found`` must be there.

    ``full_widths`` (L,) are those of the original; ``supernet_scores`` what the supernet gave for ``full`` and
    ``uniform``; ``ranked_by`` says whether these and the trials' are scores or negated losses; ``gains`` (L,) are what
    the width law holds for doubling each width, where it chose; ``percent`` says that scores are shares, shown in
    percent; ``count`` is how many samples they are means of, where known; ``facts`` and ``notes`` are for people.
    """

    model: str
    data: str
    metric: str
    percent: bool
    scored_on: str
    budgets: tuple[Budget, ...]
    variables: tuple[WidthVariable, ...]
    full_widths: tuple[int, ...]
    principle: str
    networks: Mapping[str, Figures]
    trials: tuple[Trial, ...]
    chosen: Trial
    supernet_scores: Mapping[str, float]
    supernet_curve: Curve
    retrain_curves: tuple[Curve, ...]
    recipe: str
    command: str
    repeat: str
    facts: Mapping[str, str]
    ranked_by: str = "score"
    gains: tuple[float, ...] | None = None
    count: int | None = None
    notes: tuple[str, ...] = ()
    export: Mapping[str, Any] | None = field(default=None)

    @property
    def full(self) -> Figures:
        return self.networks["full"]

    @property
    def found(self) -> Figures:
        return self.networks["found"]

    @property
    def first_budget(self) -> Budget:
        """The budget that the Pareto front is drawn over."""
        return self.budgets[0]

    @classmethod
    def from_run(cls, run: RunFolder | str | Path) -> ReportData:
        """The data of a run whose networks were compared; the export is shown where there is one."""
        from bcnet.runfolder import RunFolder

        folder = run if isinstance(run, RunFolder) else RunFolder.open(run)
        parts = {name: folder.read(name) for name in ("run", "couple", "train", "search", "compare")}
        try:
            return _assembled(folder, **parts)
        except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
            raise BcnetError(f"a result in {folder.folder} is damaged or of another version: {error!r}") from error


def _assembled(
    folder: RunFolder,
    run: dict[str, Any],
    couple: dict[str, Any],
    train: dict[str, Any],
    search: dict[str, Any],
    compare: dict[str, Any],
) -> ReportData:
    rows = {row["name"]: row for row in compare["networks"]}
    accuracy = all("top5" in row for row in rows.values())
    with TrialStore(folder.path("trials.sqlite"), must_exist=True) as store:
        trials = store.trials()
    in_python = folder.recipe.model == PYTHON
    histories = {name: folder.read(f"retrain/{name}")["history"] for name in rows}
    return ReportData(
        model="your network" if in_python else couple["model"],
        data="your loaders" if in_python else folder.recipe.data,
        metric="accuracy" if accuracy else "score",
        percent=accuracy,
        scored_on=_SCORED_ON.get(compare["scored_on"], compare["scored_on"]),
        budgets=tuple(Budget(**budget) for budget in couple["budgets"]),
        variables=tuple(_variable(entry) for entry in couple["variables"]),
        full_widths=tuple(couple["widths"]["full"]),
        principle=train["principle"],
        networks={name: _figures(row) for name, row in _with_full(rows, couple).items()},
        trials=tuple(trials),
        chosen=Trial.from_dict(search["best"]),
        supernet_scores=search["supernet"],
        supernet_curve=_curve("supernet", train["history"]),
        retrain_curves=tuple(_curve(name, histories[name]) for name in NAMES if name in histories),
        recipe=folder.path("recipe.yaml").read_text("utf-8"),
        command=shlex.join(run["command"]),
        repeat=_IN_PYTHON if in_python else f"bcnet run --recipe {shlex.quote(str(folder.path('recipe.yaml')))}",
        facts=_facts(run, train, search),
        ranked_by=search["ranked_by"],
        gains=tuple(search["law"]["gains"]) if search.get("law") else None,
        count=rows["found"].get("count"),
        notes=tuple(search["notes"]),
        export=folder.read("export") if folder.done("export") else None,
    )


PYTHON = "python"
"""What stands for model and data in the recipe of a run that was given Python objects."""

_IN_PYTHON = "bcnet.slim(model, example, train, val, recipe='recipe.yaml')  # the recipe below, in a file"
_SCORED_ON = {"test": "test images", "val": "validation images"}


def _with_full(rows: dict[str, Any], couple: dict[str, Any]) -> dict[str, Any]:
    """The rows with one for the full network, whose costs are known also where it was not trained."""
    full = {"widths": couple["widths"]["full"], "score": float("nan"), "costs": couple["costs"]["full"]}
    return {"full": {"name": "full", **full}, **rows}


def _figures(row: dict[str, Any]) -> Figures:
    return Figures(row["name"], tuple(row["widths"]), row["score"], row["costs"], row.get("latency_ms"))


def _variable(entry: dict[str, Any]) -> WidthVariable:
    return WidthVariable(entry["name"], tuple(entry["candidates"]), tuple(entry["layers"]), entry["unit"])


def _curve(name: str, history: list[dict[str, float]]) -> Curve:
    return Curve(name, tuple(row["loss"] for row in history))


def _facts(run: dict[str, Any], train: dict[str, Any], search: dict[str, Any]) -> dict[str, str]:
    machine = run["machine"]
    versions = run["versions"]
    return {
        "date": run["date"],
        "seed": str(run["seed"]),
        "bcnet": run["bcnet"] + (f", commit {run['commit'][:12]}" if run["commit"] else ""),
        "device": machine["device"] if machine["device"] != "cpu" else f"CPU, threads: {machine['threads']}",
        "system": machine["system"],
        "versions": ", ".join(f"{name} {number}" for name, number in versions.items()),
        "supernet training": _duration(train["seconds"]) + f", {train['paths']:,} paths",
        "search": _duration(search["seconds"]) + f", {search['evaluations']:,} widths scored",
    }


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
