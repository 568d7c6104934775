"""``bcnet pick``: one more slim network from the scores a run has already."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from bcnet.cli.console import JSON_OPTION
from bcnet.cli.run import DEVICE_OPTION, RUN_ARGUMENT, print_run


def pick_network(
    run: Annotated[Path, RUN_ARGUMENT],
    budget: Annotated[str, typer.Option(metavar="NAME=VALUE", help="flops=40%, params=3M, latency=4ms, ...")],
    device: Annotated[str | None, DEVICE_OPTION] = None,
    as_json: Annotated[bool, JSON_OPTION] = False,
) -> None:
    """Fine-tune one more network for another budget, chosen from the scores that a run has; nothing is repeated."""
    from bcnet.run.folder import RunFolder
    from bcnet.run.pipeline import pick
    from bcnet.run.session import Run
    from bcnet.utils.progress import shown

    RunFolder.open(run)
    parent = Run(run, device)
    with shown() as screen, parent.lock():
        parent.listener = screen
        target = pick(parent, budget)
    print_run(target, "report", as_json)
