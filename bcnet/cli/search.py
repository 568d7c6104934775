"""``bcnet front``: what the search of a run found."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from bcnet.cli.console import JSON_OPTION, print_json, table

TRIALS = "trials.sqlite"


def show_front(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run, or a file of trials.")],
    export: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Also write every trial to this .csv or .parquet file.")
    ] = None,
    as_json: Annotated[bool, JSON_OPTION] = False,
) -> None:
    """Show the Pareto front of a search: the best score for every cost, also while it is running."""
    from bcnet.search import TrialStore, best_of, format_cost, front_of

    with TrialStore(run / TRIALS if run.is_dir() else run, must_exist=True) as store:
        trials, settings = store.trials(), store.settings()
        if export is not None:
            store.export(export)
    budgets = settings.get("budgets", {})
    first = next(iter(budgets), "flops")
    front, best = front_of(trials, first), best_of(trials, first)
    if as_json:
        counts = {"evaluations": len(trials), "failures": sum(t.score is None for t in trials)}
        shown = {"best": best.to_dict() if best else None, "front": [t.to_dict() for t in front]}
        print_json({"variables": settings.get("variables"), "budgets": budgets, **counts, **shown})
        return
    names = list(front[0].costs) if front else []
    rows = [
        (
            "best" if trial == best else "" if trial.feasible else "over budget",
            f"{trial.score:.6g}",
            *(format_cost(name, trial.costs[name]) for name in names),
            " ".join(map(str, trial.widths)),
        )
        for trial in front
    ]
    asked = ", ".join(f"{name} at most {format_cost(name, limit)}" for name, limit in budgets.items())
    table(f"{len(front)} on the front of {len(trials):,} trials; {asked}", ["", "score", *names, "widths"], rows)
