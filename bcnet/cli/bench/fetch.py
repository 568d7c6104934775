"""``bcnet bench fetch``: the released tables."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from bcnet.cli import options
from bcnet.cli.console import print_json


def fetch(
    space: Annotated[str | None, typer.Argument(metavar="SPACE", help="mobilenet or resnet; else both.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder to download into; else the user cache.")] = None,
    as_json: Annotated[bool, options.JSON] = False,
) -> None:
    """Download the released tables and verify their checksums."""
    from bcnet.bench import files
    from bcnet.bench.spaces import RELEASED

    fetched = {name: str(files.fetch(name, out)) for name in ([space] if space else RELEASED)}
    if as_json:
        print_json(fetched)
    for name, path in fetched.items() if not as_json else ():
        typer.echo(f"{name}: {path}")
