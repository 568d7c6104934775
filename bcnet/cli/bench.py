"""``bcnet bench``: the Channel-Bench-Macro tables."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, cast

import typer

from bcnet.cli.console import JSON_OPTION, print_json, table

bench_app = typer.Typer()

SPACE_ARGUMENT = typer.Argument(metavar="SPACE", help="mobilenet, resnet, or the .json file of a space.")
TABLE_OPTION = typer.Option(
    "--table", help="The table's file, or the folder of released tables; else $CHANNEL_BENCH_DIR, then the cache."
)
VERIFY_OPTION = typer.Option(help="Whether the table of a released space must be the released one.")


@bench_app.callback(invoke_without_command=True)
def _bench(context: typer.Context) -> None:
    """Channel-Bench-Macro: tables of networks trained at every widths of a small space."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


@bench_app.command("stats")
def show_stats(
    space: Annotated[str, SPACE_ARGUMENT],
    path: Annotated[Path | None, TABLE_OPTION] = None,
    verify: Annotated[bool, VERIFY_OPTION] = True,
    out: Annotated[Path | None, typer.Option(help="Folder for stats.json, stats.html and histograms.svg.")] = None,
    as_json: Annotated[bool, JSON_OPTION] = False,
) -> None:
    """Show how FLOPs, parameters and widths rank the networks of a table, and how well any score could."""
    from bcnet.bench.predictors import PREDICTORS
    from bcnet.bench.stats import statistics, write_statistics
    from bcnet.bench.table import ChannelBench

    loaded = ChannelBench.load(space, path, verify)
    figures = statistics(loaded)
    files = write_statistics(loaded, out) if out else []
    if as_json:
        print_json(figures)
        return
    ceilings = figures["ceilings"] or dict.fromkeys(figures["flops"], "-")
    rows = [*((label, figures[name]) for name, label in PREDICTORS.items()), ("perfect predictor", ceilings)]
    table(
        f"Space {figures['space']}: {figures['networks']:,} networks, correlation with mean accuracy",
        ["score", "Pearson", "Spearman", "Kendall"],
        [(name, *(v if v == "-" else f"{v:.3f}" for v in row.values())) for name, row in rows],
    )
    for file in files:
        typer.echo(f"wrote {file}")


@bench_app.command("rank")
def rank_space(
    space: Annotated[str, typer.Option("--space", help="mobilenet, resnet, or a name where --model is given.")] = (
        "mobilenet"
    ),
    model: Annotated[str, typer.Option(help="A network of your own, whose table `bcnet bench build` made.")] = "",
    groups: Annotated[int, typer.Option(min=1, help="Candidates of a width variable of your own network.")] = 4,
    method: Annotated[
        str, typer.Option(help="bcv2, bcv2-alternate, bcv2-printed, bc, ua, autoslim, tas, flops, params or widths.")
    ] = "bcv2",
    epochs: Annotated[int, typer.Option(min=1, help="Epochs the supernet is trained.")] = 26,
    seeds: Annotated[str, typer.Option(help="One seed or several, as in 0,1,2.")] = "0",
    data: Annotated[str, typer.Option(help="cifar10:FOLDER, or what your own table was built with.")] = "",
    path: Annotated[Path | None, TABLE_OPTION] = None,
    out: Annotated[Path, typer.Option(help="Folder for checkpoints, rank.json and the scatter plot.")] = Path(
        "runs/rank"
    ),
    lr: Annotated[float, typer.Option(help="Learning rate at the start.")] = 0.1,
    warmup: Annotated[float, typer.Option(help="Epochs over which the rate rises.")] = 0.0,
    weight_decay: Annotated[float, typer.Option(help="Weight decay of the supernet.")] = 0.0,
    head: Annotated[float, typer.Option(help="Keep the classifier's rate to this / its features; 0: do not.")] = 0.0,
    batch: Annotated[int, typer.Option(min=2, help="Images in a training step.")] = 256,
    complement: Annotated[bool | None, typer.Option(help="Ablation: train the complement too, or not.")] = None,
    sides: Annotated[str | None, typer.Option(help="Ablation: both, alternate or left.")] = None,
    sandwich: Annotated[
        bool | None, typer.Option(help="Ablation: the widest network teaches the others, or not.")
    ] = None,
    extremes: Annotated[
        float | None, typer.Option(help="Share of the steps that train the widest network and the narrowest.")
    ] = None,
    base: Annotated[int, typer.Option(min=1, help="Ablation: the base width in groups.")] = 1,
    images: Annotated[int, typer.Option(min=0, help="Images scored of the held-out and of the test part; 0: all.")] = 0,
    device: Annotated[str, typer.Option(help="cpu or cuda; else the GPU where there is one.")] = "",
    as_json: Annotated[bool, JSON_OPTION] = False,
) -> None:
    """Train a supernet, score every network of the space with it, and correlate with the table.

    Scoring holds at most 4 GB on a CPU and 60 % of the free memory on a GPU.
    """
    from dataclasses import replace

    import torch

    from bcnet.bench.rank import RankConfig, bench_space, rank
    from bcnet.bench.table import ChannelBench
    from bcnet.data import LoadOptions, load_data
    from bcnet.errors import BcnetError
    from bcnet.utils.progress import shown

    try:
        numbers = [int(seed) for seed in seeds.split(",")]
    except ValueError:
        raise BcnetError(f"seeds must be whole numbers as in 0,1,2, got {seeds!r}") from None
    where = device or ("cuda" if torch.cuda.is_available() else "cpu")
    first = RankConfig(
        space, method, epochs, lr=lr, warmup=warmup, weight_decay=weight_decay, head=head, bf16=where != "cpu",
        complement=complement, sides=cast(Any, sides), sandwich=sandwich, extremes=extremes, base=base, images=images,
        model=model, groups=groups,
    )  # fmt: skip
    configs = [replace(first, seed=n) for n in numbers]
    loaded = ChannelBench.load(bench_space(first) if model else space, path)
    if not data:
        raise BcnetError("rank trains on CIFAR-10: say where it lies with --data cifar10:FOLDER")
    parts = load_data(data, device=where, options=LoadOptions(batch_size=batch, channels_last=True))
    with shown() as listener:
        reports = [rank(config, parts, loaded, where, out, listener) for config in configs]
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


@bench_app.command("build")
def build(
    model: Annotated[str, typer.Argument(help="The network, as in `bcnet show`.")],
    data: Annotated[str, typer.Option(help="digits, cifar10:FOLDER or imagefolder:FOLDER.")],
    out: Annotated[Path, typer.Option(help="Folder for results.jsonl and table.json; a stopped build goes on there.")],
    groups: Annotated[int, typer.Option(min=1, help="Candidates of a width variable.")] = 4,
    base: Annotated[int, typer.Option(min=1, help="The base width in groups.")] = 1,
    ignore: Annotated[list[str] | None, typer.Option(help="Layers whose width stays; may be repeated.")] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Trainings of each network.")] = 3,
    epochs: Annotated[int, typer.Option(min=1, help="Epochs of each training.")] = 60,
    batch: Annotated[int, typer.Option(min=2, help="Images in a training step.")] = 256,
    workers: Annotated[int, typer.Option(min=1, help="Networks trained side by side.")] = 1,
    engine: Annotated[str, typer.Option(help="processes, or ray for several machines.")] = "processes",
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
) -> None:
    """Train every network of a small space from scratch and write a table of the released schema."""
    from dataclasses import replace

    from bcnet.bench.build import TABLE_RECIPE, BuildConfig, build_table
    from bcnet.utils.progress import shown

    recipe = replace(TABLE_RECIPE, epochs=epochs, bf16=device.startswith("cuda"))
    names = tuple(ignore or ())
    config = BuildConfig(model, data, groups, base, names, seeds, batch, recipe, workers, cast(Any, engine), device)
    with shown() as listener:
        built = build_table(config, out, listener)
    best = built.best()
    typer.echo(f"{len(built):,} networks, best mean accuracy {float(best.mean):.2f} %: {out / 'table.json'}")


@bench_app.command("fetch")
def fetch_tables(
    space: Annotated[str | None, typer.Argument(metavar="SPACE", help="mobilenet or resnet; else both.")] = None,
    to: Annotated[Path | None, typer.Option(help="Folder to download into; else the user cache.")] = None,
) -> None:
    """Download the released tables and verify their checksums."""
    from bcnet.bench.files import fetch
    from bcnet.bench.spaces import RELEASED

    for name in [space] if space else RELEASED:
        typer.echo(f"{name}: {fetch(name, to)}")
