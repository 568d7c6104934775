"""``bcnet bench build``: a table of your own network."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, cast

import typer

from bcnet.cli import options
from bcnet.cli.console import interruptible, print_json


def build(
    model: Annotated[str, options.MODEL],
    data: Annotated[str, options.DATA],
    out: Annotated[Path, typer.Option(help="Folder for results.jsonl and table.json; a stopped build goes on there.")],
    groups: Annotated[int, options.GROUPS] = 4,
    base: Annotated[int, options.BASE] = 1,
    ignore: Annotated[list[str] | None, options.IGNORE] = None,
    runs: Annotated[int, typer.Option(min=1, help="Trainings of each network, by seeds 0, 1, ...")] = 3,
    epochs: Annotated[int, typer.Option(min=1, help="Epochs of each training.")] = 60,
    batch: Annotated[int, typer.Option(min=2, help="Images in a training step.")] = 256,
    workers: Annotated[int, typer.Option(min=1, help="Networks trained side by side.")] = 1,
    executor: Annotated[str, typer.Option(help="processes, or ray for several machines.")] = "processes",
    networks: Annotated[int, typer.Option(min=0, help="Train so many drawn at random, not all; needs --within.")] = 0,
    within: Annotated[str, typer.Option(help="The budget, as in flops=50%, of which drawn networks use 98%.")] = "",
    device: Annotated[str | None, options.DEVICE] = None,
    as_json: Annotated[bool, options.JSON] = False,
) -> None:
    """Train every network of a small space from scratch and write a table of the released schema."""
    from dataclasses import replace

    from bcnet.bench.build import TABLE_OPTIMISATION, BuildConfig, build_sample, build_table
    from bcnet.run.session import choose_device
    from bcnet.utils.progress import terminal_listener

    where = str(choose_device(device))
    training = replace(TABLE_OPTIMISATION, epochs=epochs, bf16=where.startswith("cuda"))
    names = tuple(ignore or ())
    config = BuildConfig(
        model, data, groups, base, names, runs, batch, training, workers, cast(Any, executor), where, networks, within
    )
    with interruptible("run the same command again"), terminal_listener() as listener:
        if networks:
            drawn, file = build_sample(config, out, listener), out / "networks.json"
            mean = sum(map(sum, drawn["last"])) / networks / runs
            facts: dict[str, Any] = {"networks": networks, "mean": mean, "sample": str(file)}
            said = f"mean accuracy {mean:.2f} %"
        else:
            built, file = build_table(config, out, listener), out / "table.json"
            best = built.best()
            facts = {"networks": len(built), "best": {"widths": best.widths, "mean": best.mean}, "table": str(file)}
            said = f"best mean accuracy {float(best.mean):.2f} %"
    if as_json:
        print_json(facts)
    else:
        typer.echo(f"{facts['networks']:,} networks, {said}: {file}")
