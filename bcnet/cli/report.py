"""``bcnet report``: the page of a run, or one page of several."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bcnet.cli import options
from bcnet.cli.console import console, print_json
from bcnet.cli.stage import open_run, print_run, work

if TYPE_CHECKING:
    from bcnet.run.session import Run


def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN", help="The folder of a run, or of several.")],
    out: Annotated[Path, typer.Option(help="Where the page of several runs goes.")] = Path("runs.html"),
    again: Annotated[bool, options.AGAIN] = False,
    device: Annotated[str | None, options.DEVICE] = None,
    trust: Annotated[bool, options.TRUST] = False,
    as_json: Annotated[bool, options.JSON] = False,
) -> None:
    """Write the report of a run, or one page that shows several side by side.

    For a single run, earlier stages are done first where they are missing.
    """
    from bcnet.run.report import write_several

    if len(runs) == 1:
        drawn = None if trust else _drawn_alone(runs[0], device)
        if drawn is None:
            work(open_run(runs[0], device, trust), "report", as_json, again=again)
        else:
            print_run(drawn, "report", as_json)
        return
    page = write_several(runs, out)
    if as_json:
        print_json({"report": str(page)})
    else:
        console().print(f"report: {page}", soft_wrap=True)


def _drawn_alone(folder: Path, device: str | None) -> Run | None:
    """A run whose network is made by a Python file, or was given in Python, its page drawn from its results, for which
    that code is not needed; None where there is no such code, or where stages are missing."""
    from bcnet.run.folder import RunFolder
    from bcnet.run.pipeline import stages_of
    from bcnet.run.recipe import PYTHON
    from bcnet.run.session import Run
    from bcnet.run.stages.compare import report_run

    run = Run(RunFolder.open(folder).folder, device)
    needed = [name for name in stages_of(run.recipe) if name not in ("export", "report")]
    by_code = run.recipe.python_file is not None or run.recipe.model == PYTHON
    if not by_code or not all(run.done(name) for name in needed):
        return None
    with run.lock():
        report_run(run)
    return run
