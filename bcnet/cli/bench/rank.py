"""``bcnet bench rank``: how well a supernet ranks the networks of a table."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, cast

import typer

from bcnet.cli import options
from bcnet.cli.console import interruptible, print_json, table
from bcnet.errors import BcnetError


def rank(
    space: Annotated[str, options.SPACE] = "mobilenet",
    model: Annotated[
        str, typer.Option(help="A network of your own, whose table `bcnet bench build` made; SPACE then names it.")
    ] = "",
    groups: Annotated[int, options.GROUPS] = 4,
    method: Annotated[
        str,
        typer.Option(help="bcv2, bcv2-alternate, bcv2-printed, bc, ua, autoslim, tas, meta, flops, params or widths."),
    ] = "bcv2",
    epochs: Annotated[int, typer.Option(min=1, help="Epochs the supernet is trained.")] = 26,
    seeds: Annotated[str, typer.Option(help="One seed or several, as in 0,1,2.")] = "0",
    data: Annotated[str, typer.Option(help="cifar10:FOLDER, or what your own table was built with.")] = "",
    path: Annotated[Path | None, options.TABLE] = None,
    out: Annotated[Path, typer.Option(help="Folder for checkpoints, rank.json and the scatter plot.")] = Path(
        "runs/rank"
    ),
    lr: Annotated[float, typer.Option(help="Learning rate at the start.")] = 0.1,
    warmup: Annotated[float, typer.Option(help="Epochs over which the learning rate rises.")] = 0.0,
    weight_decay: Annotated[float, typer.Option(help="Weight decay of the supernet.")] = 0.0,
    head: Annotated[
        float, typer.Option(help="Limit the last layer's learning rate to this / its inputs; 0: do not.")
    ] = 0.0,
    batch: Annotated[int, typer.Option(min=2, help="Images in a training step.")] = 256,
    complement: Annotated[bool | None, typer.Option(help="Ablation: train the complement too, or not.")] = None,
    sides: Annotated[
        str | None, typer.Option(help="Ablation, from which ends widths take channels: both, alternate or left.")
    ] = None,
    sandwich: Annotated[
        bool | None, typer.Option(help="Ablation: the widest network teaches the others, or not.")
    ] = None,
    extremes: Annotated[
        float | None, typer.Option(help="Share of the steps that train the widest network and the narrowest.")
    ] = None,
    base: Annotated[int, options.BASE] = 1,
    recalibrate: Annotated[
        int, typer.Option(min=0, help="Batch-norm statistics of so many training batches; 0: of the scored batch.")
    ] = 0,
    networks: Annotated[int, typer.Option(min=0, help="With --recalibrate, score so many at random; 0: all.")] = 0,
    images: Annotated[int, typer.Option(min=0, help="Images scored of the held-out and of the test part; 0: all.")] = 0,
    device: Annotated[str | None, options.DEVICE] = None,
    as_json: Annotated[bool, options.JSON] = False,
) -> None:
    """Train a supernet, score every network of the space with it, and correlate with the table.

    Scoring holds at most 4 GB on a CPU and 60 % of the free memory on a GPU.
    """
    from dataclasses import replace

    from bcnet.bench import rank as experiment
    from bcnet.bench.table import ChannelBench
    from bcnet.data import LoadOptions, load_data
    from bcnet.run.session import choose_device
    from bcnet.utils.progress import terminal_listener

    numbers = seed_numbers(seeds)
    where = str(choose_device(device))
    first = experiment.RankConfig(
        space, method, epochs, lr=lr, warmup=warmup, weight_decay=weight_decay, head=head, bf16=where != "cpu",
        complement=complement, sides=cast(Any, sides), sandwich=sandwich, extremes=extremes, base=base, images=images,
        recalibrate=recalibrate, networks=networks, model=model, groups=groups,
    )  # fmt: skip
    configs = [replace(first, seed=n) for n in numbers]
    loaded = ChannelBench.load(experiment.bench_space(first) if model else space, path)
    if not data:
        raise BcnetError("rank trains on CIFAR-10: say where it lies with --data cifar10:FOLDER")
    parts = load_data(data, device=where, options=LoadOptions(batch_size=batch, channels_last=True))
    with interruptible("run the same command again"), terminal_listener() as listener:
        reports = [experiment.rank(config, parts, loaded, where, out, listener) for config in configs]
    if as_json:
        print_json(reports if len(reports) > 1 else reports[0])
        return
    rows = [
        (r["method"], r["seed"], read, *(f"{figures[k]:.3f}" for k in ("pearson", "spearman", "kendall")))
        for r in reports
        for read, figures in (("score", r), ("log-width", r.get("held_out", {}).get("log_width")))
        if figures
    ]
    heads = ["method", "seed", "read by", "Pearson", "Spearman", "Kendall"]
    table(f"Space {space}, {epochs} epochs, by accuracy", heads, rows)
    typer.echo(f"details: {out}")


def seed_numbers(text: str) -> list[int]:
    """``0,1,2`` as numbers."""
    try:
        return [int(seed) for seed in text.split(",")]
    except ValueError:
        raise BcnetError(f"seeds must be whole numbers as in 0,1,2, got {text!r}") from None
