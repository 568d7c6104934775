"""``bcnet models``: the networks of the zoo."""

from __future__ import annotations

from typing import Annotated

from bcnet.cli import options
from bcnet.cli.console import console, print_json, table
from bcnet.cli.network import by


def models(as_json: Annotated[bool, options.JSON] = False) -> None:
    """List the networks of the zoo."""
    from bcnet.models import MODELS

    if as_json:
        print_json({"models": [m.to_dict() for m in MODELS.values()]})
        return
    table(
        "Networks of the zoo at full widths",
        ["name", "input", "variables", "FLOPs", "parameters", "about"],
        [(m.name, by(m.input_shape), len(m.widths), m.flops, m.params, m.about) for m in MODELS.values()],
    )
    console().print("Other networks: timm:NAME, torchvision:NAME or path/to/file.py:NAME", soft_wrap=True)
