"""``bcnet models``, ``show``, ``cost`` and ``balance``: what can be said of a network without training it."""

from __future__ import annotations

import difflib
import json
import re
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bcnet.cli.console import JSON_OPTION, console, print_json, table
from bcnet.errors import BcnetError

if TYPE_CHECKING:
    from bcnet.models.load import LoadedModel
    from bcnet.space.network import NetworkSpace

MODEL_ARGUMENT = typer.Argument(
    metavar="MODEL", help="zoo:NAME (or NAME), timm:NAME, torchvision:NAME or path/to/file.py:NAME."
)
GROUPS_OPTION = typer.Option(help="Groups the channels of a variable are divided into, K.")
BASE_OPTION = typer.Option(help="Smallest width, in groups.")
ROUND_OPTION = typer.Option(help="Keep widths multiples of this where it divides the full one.")
INPUT_OPTION = typer.Option("--input", metavar="C,H,W", help="Shape of one input; else the model's own.")
IGNORE_OPTION = typer.Option("--ignore", metavar="PATTERN", help="Layers whose width must stay; may be repeated.")
SQUEEZE_OPTION = typer.Option("--se", help="Also search the squeeze widths that zoo:efficientnet_b0_imagenet keeps.")

LARGEST_FILE = 2**20  # bytes; far more than any list of widths needs


def list_models(as_json: Annotated[bool, JSON_OPTION] = False) -> None:
    """List the networks of the zoo."""
    from bcnet.models import MODELS

    if as_json:
        print_json(
            {
                "models": [
                    {
                        "name": m.name,
                        "input": m.input_shape,
                        "classes": m.classes,
                        "variables": len(m.widths),
                        "flops": m.flops,
                        "params": m.params,
                        "about": m.about,
                    }
                    for m in MODELS.values()
                ]
            }
        )
        return
    table(
        "Networks of the zoo at full widths",
        ["name", "input", "variables", "FLOPs", "parameters", "about"],
        [(m.name, _by(m.input_shape), len(m.widths), m.flops, m.params, m.about) for m in MODELS.values()],
    )
    console().print("Other networks: timm:NAME, torchvision:NAME or path/to/file.py:NAME", soft_wrap=True)


def show_model(
    model: Annotated[str, MODEL_ARGUMENT],
    groups: Annotated[int, GROUPS_OPTION] = 20,
    base: Annotated[int, BASE_OPTION] = 1,
    round_to: Annotated[int, ROUND_OPTION] = 1,
    input_shape: Annotated[str | None, INPUT_OPTION] = None,
    ignore: Annotated[list[str] | None, IGNORE_OPTION] = None,
    squeeze: Annotated[bool, SQUEEZE_OPTION] = False,
    as_json: Annotated[bool, JSON_OPTION] = False,
) -> None:
    """Show the width variables of a network, what they couple, and the range of its costs."""
    source = _load(model, input_shape)
    with _one_line_warnings():
        space = source.space(groups=groups, base=base, round_to=round_to, ignore=ignore or (), squeeze=squeeze)
        own_class = space.own_class
    if as_json:
        print_json(_report(source, space) | {"own_class": own_class})
    else:
        _print_space(source, space, own_class)


def show_cost(
    model: Annotated[str, MODEL_ARGUMENT],
    widths: Annotated[str, typer.Option(metavar="44,51,…", help="One width per variable, or @file.json.")],
    input_shape: Annotated[str | None, INPUT_OPTION] = None,
    ignore: Annotated[list[str] | None, IGNORE_OPTION] = None,
    squeeze: Annotated[bool, SQUEEZE_OPTION] = False,
    as_json: Annotated[bool, JSON_OPTION] = False,
) -> None:
    """Count the FLOPs, parameters and memory of a network at given widths."""
    given = _read_file(Path(widths[1:])) if widths.startswith("@") else _parse_widths(widths)
    source = _load(model, input_shape)
    with _one_line_warnings():
        space = source.space(ignore=ignore or (), squeeze=squeeze)
    chosen = space.check(_ordered(given, space.names) if isinstance(given, dict) else given)
    full = _costs(space, space.max)
    costs = _costs(space, chosen)
    ratio = {name: costs[name] / full[name] for name in costs}
    if as_json:
        print_json({"model": source.spec, "widths": chosen, **costs, "full": full, "ratio": ratio})
        return
    table(
        f"{source.spec} at {len(chosen)} given widths, for one input of {_by(source.input_shape)}",
        ["cost", "at these widths", "full network", "ratio"],
        [(_TITLES[name], costs[name], full[name], f"{ratio[name]:.4f}") for name in costs],
    )


def balance(
    model: Annotated[str, MODEL_ARGUMENT],
    budget: Annotated[
        list[str], typer.Option(metavar="NAME=VALUE", help="flops=50%, params=3M, ...; may be repeated.")
    ],
    groups: Annotated[int, GROUPS_OPTION] = 20,
    base: Annotated[int, BASE_OPTION] = 1,
    round_to: Annotated[int, ROUND_OPTION] = 1,
    input_shape: Annotated[str | None, INPUT_OPTION] = None,
    ignore: Annotated[list[str] | None, IGNORE_OPTION] = None,
    squeeze: Annotated[bool, SQUEEZE_OPTION] = False,
    as_json: Annotated[bool, JSON_OPTION] = False,
) -> None:
    """Widths within a budget at once, without training: a width counts as much as it has layers."""
    from bcnet.search import Constraints, LogWidthModel

    source = _load(model, input_shape)
    with _one_line_warnings():
        space = source.space(groups=groups, base=base, round_to=round_to, ignore=ignore or (), squeeze=squeeze)
    constraints = Constraints(space, space.costs, budget)
    constraints.check()
    uniform, balanced = constraints.uniform(), LogWidthModel.balanced(space).best(constraints)
    costs = {"full": _costs(space, space.max), "uniform": _costs(space, uniform), "balanced": _costs(space, balanced)}
    if as_json:
        print_json({"model": source.spec, "widths": balanced, "uniform": uniform, "costs": costs})
        return
    budgets = ", ".join(b.text for b in constraints.budgets)
    table(
        f"{source.spec} within {budgets}, for one input of {_by(source.input_shape)}",
        ["", "variable", "layers", *costs],
        [
            (i, v.name, len(v.layers), v.max, int(u), int(b))
            for i, (v, u, b) in enumerate(zip(space.variables, uniform, balanced, strict=True), 1)
        ],
    )
    table(
        "What they cost",
        ["cost", *costs],
        [(_TITLES[name], *(costs[who][name] for who in costs)) for name in costs["full"]],
    )


_TITLES = {"flops": "FLOPs", "params": "parameters", "memory": "peak activations, bytes"}


def _load(model: str, input_shape: str | None) -> LoadedModel:
    from bcnet.models.load import load_model, parse_shape

    return load_model(model, None if input_shape is None else parse_shape(input_shape))


@contextmanager
def _one_line_warnings() -> Iterator[None]:
    """Warnings as ``note: ...`` on stderr."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("ignore")
        warnings.simplefilter("always", UserWarning)
        yield
    for message in dict.fromkeys(" ".join(str(w.message).split()) for w in caught):
        print(f"note: {message}", file=sys.stderr)


def _costs(space: NetworkSpace, widths: Any) -> dict[str, int]:
    return {name: int(cost(widths)[0]) for name, cost in space.costs.items()}


def _report(source: LoadedModel, space: NetworkSpace) -> dict[str, Any]:
    low, high = _costs(space, space.min), _costs(space, space.max)
    return {
        "model": source.spec,
        "input": source.input_shape,
        "variables": [
            {"name": v.name, "candidates": v.candidates, "layers": v.layers, "unit": v.unit} for v in space.variables
        ],
        "size": space.size,
        **{name: {"min": low[name], "max": high[name]} for name in low},
        "full": high,
        "reducible_flops": space.reducible_flops,
        "fixed": [{"layer": layer, "reason": reason} for layer, reason in space.fixed],
    }


def _print_space(source: LoadedModel, space: NetworkSpace, own_class: bool) -> None:
    out = console()
    low, high = _costs(space, space.min), _costs(space, space.max)
    table(
        f"{source.spec}: {len(space)} width variables, for one input of {_by(source.input_shape)}",
        ["", "variable", "candidates", "couples"],
        [(i, v.name, _candidates(v.candidates), _layers(v.layers[1:])) for i, v in enumerate(space.variables, 1)],
    )
    table(
        f"The space has {_count(space.size)} networks",
        ["cost", "narrowest", "full network", "ratio"],
        [(_TITLES[name], low[name], high[name], f"{low[name] / high[name]:.4f}") for name in low],
    )
    table("Layers that keep their width", ["layer", "because"], space.fixed)
    kind = type(source.model).__name__
    built = f"the class {kind} itself" if own_class else f"the exported graph of {kind}, without its Python code"
    out.print(f"Networks at other widths are built from {built}.", soft_wrap=True)
    out.print(f"{space.reducible_flops:.1%} of the FLOPs can be reduced.", soft_wrap=True)


def _count(number: int) -> str:
    return f"{number:,}" if number < 10**9 else f"about 10^{len(str(number)) - 1}"


def _by(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape))


def _candidates(widths: Sequence[int]) -> str:
    """Few enough to read, all of them counted."""
    texts = [f"{c}" for c in widths]
    shown = texts if len(texts) <= 6 else [*texts[:3], "...", *texts[-2:]]
    return f"{', '.join(shown)} ({len(texts)})"


def _layers(layers: Sequence[str]) -> str:
    if not layers:
        return "-"
    more = f" and {len(layers) - 3} more" if len(layers) > 3 else ""
    return ", ".join(layers[:3]) + more


def _parse_widths(text: str) -> list[int]:
    parts = [part.strip() for part in text.split(",")]
    for part in parts:
        if not re.fullmatch("[-+]?[0-9]{1,18}", part):
            raise BcnetError(
                f"widths must be whole numbers separated by commas, or @file.json, but {part!r:.40} is none"
            )
    return [int(part) for part in parts]


def _read_file(path: Path) -> list[int] | dict[str, int]:
    """Widths from JSON: a list, an object of names and widths, or an object whose ``widths`` is one of these."""
    if not path.is_file():
        raise BcnetError(f"there is no file {path}")
    if path.stat().st_size > LARGEST_FILE:
        raise BcnetError(f"{path} is over {LARGEST_FILE:,} bytes, too large for a list of widths")
    try:
        data: Any = json.loads(path.read_bytes())
    except OSError as error:
        raise BcnetError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise BcnetError(f"{path} is no JSON text: {str(error)[:80]}") from None
    if isinstance(data, dict) and isinstance(data.get("widths"), list | dict):
        data = data["widths"]
    match data:
        case list() if all(map(_is_width, data)):
            return data
        case dict() if all(map(_is_width, data.values())):
            return data
    raise BcnetError(f'{path} must hold a list of whole numbers or a map of variables to them, perhaps as "widths"')


def _is_width(value: object) -> bool:
    return type(value) is int and abs(value) < 10**18


def _ordered(given: dict[str, int], names: Sequence[str]) -> list[int]:
    """The widths of an object in the order of the variables' ``names``."""
    for name in given:
        if name not in names:
            near = difflib.get_close_matches(name[:80], names, n=1, cutoff=0.5)
            guess = f": did you mean {near[0]!r}?" if near else ""
            raise BcnetError(f"this space has no variable {name!r:.60}{guess}")
    missing = [name for name in names if name not in given]
    if missing:
        raise BcnetError(f"the width of variable {missing[0]!r} is missing ({len(missing)} of {len(names)} are)")
    return [given[name] for name in names]
