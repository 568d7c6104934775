"""``bcnet bench ablate``: the paper's ablations on any recipe."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from bcnet.cli import options
from bcnet.cli.console import interruptible, print_json, table


def ablate(
    recipe: Annotated[str, options.RECIPE] = "digits",
    out: Annotated[Path, typer.Option(help="Folder for supernets, results and the chart.")] = Path("runs/ablate"),
    only: Annotated[
        list[str] | None, typer.Option(help="An ablation, such as prior; may be repeated; else all.")
    ] = None,
    seeds: Annotated[str, typer.Option(help="Seeds, as in 0,1,2; intervals need two.")] = "0,1,2",
    data: Annotated[str | None, options.DATA] = None,
    settings: Annotated[list[str] | None, options.SET] = None,
    path: Annotated[
        Path | None, typer.Option("--table", help="Look accuracies up in this table instead of training networks.")
    ] = None,
    device: Annotated[str | None, options.DEVICE] = None,
    as_json: Annotated[bool, options.JSON] = False,
) -> None:
    """Change one part of a recipe at a time and tell what the network found is worth: supernet and search, groups, base
    width, complement, sides, prior, evaluations.

    A stopped ablation goes on where it was. With a table, only settings whose candidates it has can be looked up.
    """
    import json

    from bcnet.bench.ablate import Ablation, chart, summary, variants
    from bcnet.bench.table import ChannelBench
    from bcnet.cli.bench.rank import seed_numbers
    from bcnet.cli.run import with_options
    from bcnet.models.load import load_model
    from bcnet.run.recipe import Recipe
    from bcnet.utils.files import clear_errors, write_file
    from bcnet.utils.progress import terminal_listener

    chosen = with_options(Recipe.read(recipe), {"data": data}, settings or [])
    numbers = seed_numbers(seeds)
    wanted = variants(chosen, only or [])
    space = None if path is None else load_model(chosen.model).space(groups=chosen.groups)
    known = None if space is None else ChannelBench.load(space, path)
    with interruptible("run the same command again"), terminal_listener() as listener:
        rows = Ablation(chosen, out, known, device, listener).work(wanted, numbers)
    found = summary(rows)
    with clear_errors(str(out)):
        write_file(out / "ablate.json", (json.dumps({"rows": rows, "summary": found}, indent=1) + "\n").encode())
        write_file(out / "ablate.svg", chart(found).encode())
    if as_json:
        print_json(found)
        return
    cells = [
        (
            r["ablation"],
            r["variant"],
            "-" if r["mean"] is None else f"{r['mean']:.2f}",
            "-" if r["half"] is None else f"± {r['half']:.2f}",
        )
        for r in found
    ]
    table(f"{chosen.model}, {', '.join(chosen.budgets)}", ["ablation", "variant", "accuracy %", "95 %"], cells)
    for r in (r for r in found if "failure" in r):
        typer.echo(
            f"{r['ablation']}, {r['variant']}: {r['failed']} of {len(numbers)} seeds found nothing: {r['failure']}"
        )
    typer.echo(f"details: {out}")
