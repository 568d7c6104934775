"""``bcnet pick``: one more slim network from the scores a run has already."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from bcnet.cli import options
from bcnet.cli.console import interruptible
from bcnet.cli.stage import open_run, print_run


def pick(
    run: Annotated[Path, options.RUN],
    budget: Annotated[str, typer.Option(metavar="NAME=VALUE", help="What it may cost: flops=40%, params=3M, ...")],
    device: Annotated[str | None, options.DEVICE] = None,
    trust: Annotated[bool, options.TRUST] = False,
    as_json: Annotated[bool, options.JSON] = False,
) -> None:
    """Fine-tune one more network for another budget, chosen from the scores a run already has."""
    from bcnet.run import pipeline
    from bcnet.utils.progress import shown

    parent = open_run(run, device, trust)
    with interruptible("go on with the same command"), shown() as screen, parent.lock():
        parent.listener = screen
        target = pipeline.pick(parent, budget)
    print_run(target, "report", as_json)
