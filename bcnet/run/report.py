"""The report of a run: its folder as plain data, and that as a page."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bcnet.errors import BcnetError
from bcnet.report import Curve, Figures, ReportData, render, words
from bcnet.report.several import render_several
from bcnet.report.tradeoff import Tradeoff, TradeoffPoint, render_tradeoff
from bcnet.run.folder import RunFolder
from bcnet.run.recipe import PYTHON
from bcnet.search.constraints import Budget
from bcnet.search.trial import Trial
from bcnet.space.widths import WidthVariable
from bcnet.utils.progress import duration


def write_report(run: RunFolder | str | Path, out: str | Path | None = None) -> Path:
    """Write the report of a run to ``out``, or to report.html in its folder."""
    opened = run if isinstance(run, RunFolder) else RunFolder.open(run)
    return _write_page(opened, _page(opened), out)


def write_tradeoff(run: RunFolder, out: str | Path | None = None) -> Path:
    """Write the page of a run with several targets: accuracy against cost, with links to the report of each."""
    with _of_one_run(run):
        page = render_tradeoff(_tradeoff(run))
    return _write_page(run, page, out)


def write_several(folders: Sequence[Path], out: Path) -> Path:
    """Write one page of several runs that were compared."""
    runs = [report_data(RunFolder.open(folder)) for folder in folders]
    if len({run.metric for run in runs}) > 1:
        raise BcnetError("these runs have different metrics, which do not compare: give runs of one task")
    return _write_page(RunFolder(folders[0]), render_several(runs), out)


def _tradeoff(run: RunFolder) -> Tradeoff:
    given = run.read("given") if run.done("given") else None
    traced = run.read("trace")
    rows = run.read("targets")["targets"]
    points = tuple(_point(row) for row in rows)
    return Tradeoff(
        **_named(run, traced),
        cost=points[0].cost,
        full_cost=traced["costs"]["full"][points[0].cost],
        full_score=None if given is None else given["score"],
        points=points,
        **words.described(rows[0]["metric"]),
    )


def _named(run: RunFolder, traced: dict[str, Any]) -> dict[str, Any]:
    """What a run calls its network and its data."""
    if run.recipe.model == PYTHON:
        return {"model": "your network", "data": "your loaders"}
    return {"model": traced["model"], "data": run.recipe.data}


def _point(row: dict[str, Any]) -> TradeoffPoint:
    networks, chosen = row["networks"], row["chosen"]
    cost = row["budget"].partition("=")[0].strip()
    uniform = networks.get("uniform")
    return TradeoffPoint(
        budget=row["budget"],
        folder=row["folder"],
        cost=cost if cost in networks[chosen]["costs"] else "flops",
        slim=(networks[chosen]["costs"].get(cost, 0), networks[chosen]["score"]),
        uniform=None if uniform is None else (uniform["costs"].get(cost, 0), uniform["score"]),
        chosen=chosen,
    )


def _write_page(run: RunFolder, page: str, out: str | Path | None) -> Path:
    if out is None:
        run.write_file("report.html", page.encode())
        return run.path("report.html")
    path = Path(out)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(page, "utf-8")
    except OSError as error:
        raise BcnetError(f"cannot write {path}: {error.strerror or error}") from None
    return path


def _page(run: RunFolder) -> str:
    data = report_data(run)
    with _of_one_run(run):
        return render(data)


def report_data(run: RunFolder | str | Path) -> ReportData:
    """The data of a run whose networks were compared; the export is shown where there is one."""
    folder = run if isinstance(run, RunFolder) else RunFolder.open(run)
    parts: dict[str, Any] = {name: folder.read(name) for name in ("run", "trace", "search", "compare")}
    parts["train"] = folder.read("train") if folder.done("train") else None
    with _of_one_run(folder):
        return _assembled(folder, **parts)


@contextmanager
def _of_one_run(folder: RunFolder) -> Iterator[None]:
    """Refuse results that are each intact and yet do not belong together."""
    try:
        yield
    except BcnetError:
        raise
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, StopIteration) as error:
        raise BcnetError(
            f"the results in {folder.folder} do not belong together ({type(error).__name__}: {error!s:.80}): "
            "repeat the run with its recipe.yaml in another folder"
        ) from error


def _assembled(
    folder: RunFolder,
    run: dict[str, Any],
    trace: dict[str, Any],
    train: dict[str, Any] | None,
    search: dict[str, Any],
    compare: dict[str, Any],
) -> ReportData:
    rows = {row["name"]: row for row in compare["networks"]}
    in_python = folder.recipe.model == PYTHON
    trained = {name: folder.read(f"retrain/{name}") for name in rows}
    return ReportData(
        **_named(folder, trace),
        **words.described(compare["metric"]),
        scored_on=words.images(compare["scored_on"]),
        budgets=tuple(Budget(**budget) for budget in trace["budgets"]),
        variables=tuple(_variable(entry) for entry in trace["variables"]),
        full_widths=tuple(trace["widths"]["full"]),
        principle=train["principle"] if train else None,
        networks={name: _figures(row) for name, row in _with_full(rows, trace).items()},
        trials=tuple(folder.trials()),
        chosen=Trial.from_dict(search["best"]),
        reference_scores=search["reference"],
        supernet_curve=_curve("supernet", train["history"]) if train else None,
        retrain_curves=tuple(_curve(name, trained[name]["history"]) for name in words.NAMES if name in rows),
        recipe=folder.recipe_text,
        command=shlex.join(run["command"]),
        repeat=_IN_PYTHON if in_python else _repeat(folder),
        facts={**_facts(run, train, search), **_rate(folder), **_times(folder), "threads": _threads(folder)},
        ranked_by=search["ranked_by"],
        gains=tuple(search["log_width"]["gains"]) if search.get("log_width") else None,
        inherited=folder.recipe.start == "trained",
        race=tuple(_raced(folder.read("race"))) if folder.done("race") else (),
        validated=tuple(_validated(name, trained[name]) for name in words.NAMES if "val" in trained.get(name, ())),
        slim=compare.get("chosen", "found"),
        learnt=rows[compare.get("chosen", "found")].get("learnt", True),
        count=rows["found"].get("count"),
        run=str(folder.folder),
        in_python=in_python,
        kept=tuple(compare.get("budgets", ())),
        timed_by=compare.get("timed_by", ""),
        repeats=rows["found"].get("trainings", 1),
        notes=tuple(search["notes"]),
        export=folder.read("export") if folder.done("export") else None,
    )


_IN_PYTHON = "bcnet.slim(model, example, train, val, recipe='recipe.yaml')  # the recipe below, in a file"


def _repeat(folder: RunFolder) -> str:
    trusting = ["--trust"] if folder.recipe.python_file else []
    return shlex.join(["bcnet", "run", "--recipe", str(folder.path("recipe.yaml")), *trusting])


def _with_full(rows: dict[str, Any], trace: dict[str, Any]) -> dict[str, Any]:
    """The rows with one for the full network, whose costs are known also where it was not trained."""
    full = {"widths": trace["widths"]["full"], "score": float("nan"), "costs": trace["costs"]["full"]}
    return {"full": {"name": "full", **full}, **rows}


def _figures(row: dict[str, Any]) -> Figures:
    lead = row.get("lead")
    ahead = None if lead is None else (lead["mean"], lead["error"])
    return Figures(row["name"], tuple(row["widths"]), row["score"], row["costs"], row.get("latency_ms"), ahead)


def _variable(entry: dict[str, Any]) -> WidthVariable:
    return WidthVariable(entry["name"], tuple(entry["candidates"]), tuple(entry["layers"]), entry["unit"])


def _curve(name: str, history: list[dict[str, float]]) -> Curve:
    return Curve(name, tuple(row["loss"] for row in history))


def _raced(race: dict[str, Any]) -> list[dict[str, Any]]:
    """What finalists had on validation images after every epoch; only after rounds in runs of earlier versions."""
    return [*race["rounds"], *race.get("curve", [])]


def _validated(name: str, trained: dict[str, Any]) -> dict[str, Any]:
    """What a network had on validation images after its last epoch; that of a race's winner goes on with its rounds."""
    measured = {key: trained["val"][key] for key in ("score", "loss")}
    return {"name": trained.get("finalist") or name, "shown": name, "epochs": len(trained["history"]), **measured}


def _times(folder: RunFolder) -> dict[str, str]:
    """How long each stage took, of those that say so."""
    found = {name: folder.read(name)["seconds"] for name in TIMED if folder.done(name)}
    trained = folder.read("retrain")["networks"] if folder.done("retrain") else []
    found["retrain"] = sum(folder.read(f"retrain/{name}").get("seconds", 0) for name in trained if name not in _ONCE)
    return {"time of stages": ", ".join(f"{name} {duration(seconds)}" for name, seconds in found.items())}


def _rate(folder: RunFolder) -> dict[str, str]:
    """The learning rate of fine-tuning, if the run chose it."""
    if not folder.done("rate"):
        return {}
    found = folder.read("rate")
    return {"learning rate": f"{found['lr']:g}, the best of {len(found['probes'])} probes of {found['steps']} steps"}


def _threads(folder: RunFolder) -> str:
    asked = folder.recipe.threads
    return "torch's own choice" if asked is None else str(asked)


TIMED = ("given", "train", "search", "rate", "race")
"""Stages that say how long they took."""
_ONCE = ("full", "found")
"""Networks whose seconds are those of the stages given and race, where there are these."""


def _facts(run: dict[str, Any], train: dict[str, Any] | None, search: dict[str, Any]) -> dict[str, str]:
    machine = run["machine"]
    versions = run["versions"]
    return {
        "date": run["date"],
        "seed": str(run["seed"]),
        "bcnet": run["bcnet"] + (f", commit {run['commit'][:12]}" if run["commit"] else ""),
        "device": machine["device"] if machine["device"] != "cpu" else "CPU",
        "system": machine["system"],
        "versions": ", ".join(f"{name} {number}" for name, number in versions.items()),
        **({"supernet training": f"{duration(train['seconds'])}, {train['paths']:,} paths"} if train else {}),
        "search": duration(search["seconds"]) + f", {search['evaluations']:,} configurations scored",
    }
