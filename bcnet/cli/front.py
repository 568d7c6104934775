"""``bcnet front``: what the search of a run found."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bcnet.cli import options
from bcnet.cli.console import print_json, table

if TYPE_CHECKING:
    from bcnet.search import Trial


def front(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run, or a file of trials.")],
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Also write every trial to this .csv or .parquet file.")
    ] = None,
    as_json: Annotated[bool, options.JSON] = False,
) -> None:
    """Show the Pareto front of a search: the best score for every cost, also while it is running.

    Once the search of a run has ended, the configuration it chose is shown too.
    """
    from bcnet.search import TrialStore, best_of, format_cost, front_of
    from bcnet.search.store import TRIALS

    with TrialStore(run / TRIALS if run.is_dir() else run, read_only=True) as store:
        trials, settings = store.trials(), store.settings()
        if out is not None:
            store.export(out)
    budgets = settings.get("budgets", {})
    first = next(iter(budgets), "flops")
    pareto, best, chosen = front_of(trials, first), best_of(trials, first), _chosen(run)
    if as_json:
        counts = {"evaluations": len(trials), "failures": sum(t.score is None for t in trials)}
        found = {
            "chosen": chosen.to_dict() if chosen else None,
            "best": best.to_dict() if best else None,
            "front": [t.to_dict() for t in pareto],
        }
        print_json({"variables": settings.get("variables"), "budgets": budgets, **counts, **found})
        return
    shown = (*((_kind(t, best), t) for t in pareto), *([("chosen", chosen)] if chosen else []))
    names, by_loss = list(shown[0][1].costs) if shown else [], _ranked_by(run) == "loss"
    rows = [
        (
            kind,
            "-" if trial.score is None else f"{-trial.score if by_loss else trial.score:.6g}",
            *(format_cost(name, trial.costs[name]) for name in names),
            " ".join(map(str, trial.widths)),
        )
        for kind, trial in shown
    ]
    asked = ", ".join(f"{name} at most {format_cost(name, limit)}" for name, limit in budgets.items())
    columns = ["", "loss" if by_loss else "score", *names, "widths"]
    table(f"{len(pareto)} on the front of {len(trials):,} trials; {asked}", columns, rows)


def _ranked_by(run: Path) -> str:
    """What the trials of a run are ranked by: a loss is kept negated. A file of trials does not know."""
    from bcnet.run.folder import RunFolder

    folder = RunFolder(run)
    return folder.ranked_by if folder.done("run") else "score"


def _kind(trial: Trial, best: Trial | None) -> str:
    return "best" if trial == best else "" if trial.feasible else "over budget"


def _chosen(run: Path) -> Trial | None:
    """What the search of a run took, None while it has not ended."""
    from bcnet.run.folder import RunFolder
    from bcnet.search import Trial

    folder = RunFolder(run)
    if not folder.done("search"):
        return None
    return Trial.from_dict(folder.read("search")["best"])
