"""``bcnet export``: the network a run found, in a form to ship."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from bcnet.cli import options
from bcnet.cli.console import console, print_json
from bcnet.cli.stage import open_run
from bcnet.errors import BcnetError


def export(
    run: Annotated[Path, options.RUN],
    to: Annotated[str, typer.Option(help="The form: torch (weights and widths.json alone), onnx or pt2.")] = "torch",
    out: Annotated[Path | None, typer.Option(help="Folder to write to; by default RUN/export.")] = None,
    tolerance: Annotated[
        float, typer.Option(min=0, help="Largest difference from PyTorch, relative to outputs above 1.")
    ] = 1e-3,
    trust: Annotated[bool, options.TRUST] = False,
    as_json: Annotated[bool, options.JSON] = False,
) -> None:
    """Export the network that a run ships, check it on real inputs, and time it beside the original."""
    from bcnet.run.export import copy_export, export_run
    from bcnet.run.folder import RunFolder
    from bcnet.run.recipe import PYTHON

    folder = RunFolder.open(run)
    if folder.recipe.model == PYTHON and to in ("onnx", "pt2"):
        call = f"bcnet.slim(..., out={str(run)!r}).export(FOLDER, to={to!r})"
        raise BcnetError(f"{run} was made from Python, and {to} needs the network's own code: {call}")
    if folder.recipe.model == PYTHON and to == "torch" and folder.done("export"):
        result = copy_export(folder, folder.path("export") if out is None else out)
    else:
        result = export_run(open_run(run, "cpu", trust), to, out, tolerance)
    if as_json:
        print_json(result)
        return
    show = console()
    show.print(f"wrote {', '.join(result['files'])} to {result['path']}", soft_wrap=True)
    if result["difference"] is not None:
        batch = "batches of any size" if result["any_batch"] else "batches of the size it was exported with only"
        difference = f"largest difference from PyTorch on real inputs: {result['difference']:.2g}"
        show.print(f"{difference}; takes {batch}", soft_wrap=True)
    original, slim = result["latency_ms"]["original"], result["latency_ms"]["slim"]
    show.print(
        f"latency ({result['timed_by']}): original {original:.3g} ms, slim {slim:.3g} ms, "
        f"{original / slim:.2f} times as fast",
        soft_wrap=True,
    )
