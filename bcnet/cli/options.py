"""Arguments and options that several commands take: the same name means the same everywhere."""

from __future__ import annotations

from typing import Any

import typer


def flag(name: str, help: str, **more: Any) -> Any:
    """An option without a value."""
    return typer.Option(name, metavar="", help=help, **more)


JSON = flag("--json", "Print JSON for programs instead of a table.")
TRUST = flag("--trust", "Allow running the Python file that a recipe or a run names as its network.")
MODEL = typer.Argument(
    metavar="MODEL", help="The network: zoo:NAME (or NAME), timm:NAME, torchvision:NAME or path/to/file.py:NAME."
)
RECIPE = typer.Argument(metavar="RECIPE", help="A recipe's name or its file.")
SET = typer.Option("--set", metavar="KEY=VALUE", help="Change a key of the recipe; may be repeated.")
RUN = typer.Argument(metavar="RUN", help="The folder of a run.")
DATA = typer.Option("--data", help="The images: digits, cluttered_digits, cifar10:FOLDER or imagefolder:FOLDER.")
BUDGET = typer.Option(
    "--budget", metavar="NAME=VALUE", help="What the slim network may cost: flops=50%, params=3M, ...; may be repeated."
)
GROUPS = typer.Option("--groups", help="How many groups a layer's channels are divided into: its possible widths.")
BASE = typer.Option("--base", help="How many of these groups the narrowest width has.")
ROUND_TO = typer.Option("--round-to", help="Keep widths multiples of this number, in layers whose own width is one.")
INPUT = typer.Option("--input", metavar="C,H,W", help="The shape of one input; by default the network's own.")
IGNORE = typer.Option("--ignore", metavar="PATTERN", help="Layers that keep their width; may be repeated.")
SQUEEZE = flag("--squeeze", "Also vary squeeze widths, which zoo:efficientnet_b0_imagenet otherwise keeps.")
DEVICE = typer.Option("--device", help="Where to compute: cpu, cuda, cuda:1, ...; by default a GPU if there is one.")
AGAIN = flag("--again", "Repeat this stage, and forget the stages after it.")
LOG = typer.Option("--log", metavar="tensorboard", help="Also write every curve to RUN/tensorboard.")

SPACE = typer.Argument(metavar="SPACE", help="The benchmark's space: mobilenet or resnet.")
TABLE = typer.Option(
    "--table", help="The table's file, or the folder of released tables; else $CHANNEL_BENCH_DIR, then the cache."
)
