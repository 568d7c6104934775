"""``bcnet report``: the page of a run, or one page of several."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from bcnet.cli import options
from bcnet.cli.console import console, print_json
from bcnet.cli.stage import open_run, work


def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="The folder of a run, or of several.")],
    out: Annotated[Path, typer.Option(help="Where the page of several runs goes.")] = Path("runs.html"),
    again: Annotated[bool, options.AGAIN] = False,
    device: Annotated[str | None, options.DEVICE] = None,
    trust: Annotated[bool, options.TRUST] = False,
    as_json: Annotated[bool, options.JSON] = False,
) -> None:
    """Write the report of a run, or one page that shows several side by side.

    Earlier stages of a single run that are not done yet are done first.
    """
    from bcnet.run.report import write_several

    if len(runs) == 1:
        work(open_run(runs[0], device, trust), "report", as_json, again=again)
        return
    page = write_several(runs, out)
    if as_json:
        print_json({"report": str(page)})
    else:
        console().print(f"report: {page}", soft_wrap=True)
