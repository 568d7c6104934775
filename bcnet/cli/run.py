"""``bcnet run``: all stages from a network and a budget to a report."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

import typer

from bcnet.cli import options
from bcnet.cli.plan import print_plan
from bcnet.cli.stage import open_run, require_trust, work
from bcnet.errors import BcnetError

if TYPE_CHECKING:
    from bcnet.run.recipe import Recipe
    from bcnet.run.session import Run

START_DEPENDENT = ("rank_by", "search", "retrain", "distillation", "race", "score", "least")
"""Keys whose defaults depend on where networks start."""
EXAMPLE = "cluttered_digits"
"""The recipe of a run that is told nothing."""
ON_RESUME = ("resume", "device", "trust", "until", "log", "as_json")
"""The options that a resumed run takes."""
DATA_FORMS = "digits, cluttered_digits, cifar10:FOLDER or imagefolder:FOLDER"


def run(
    context: typer.Context,
    model: Annotated[str | None, options.MODEL] = None,
    data: Annotated[str | None, options.DATA] = None,
    budget: Annotated[list[str] | None, options.BUDGET] = None,
    targets: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=VALUE", help="Several budgets, a slim network for each; may be repeated."),
    ] = None,
    weights: Annotated[Path | None, typer.Option(help="The trained weights: a .safetensors, .pt or .pth file.")] = None,
    pretrained: Annotated[
        bool, options.flag("--pretrained", "Take the weights that timm or torchvision publish for this network.")
    ] = False,
    start: Annotated[
        str | None,
        typer.Option(
            metavar="trained|scratch",
            help="Keep what the network has learnt (trained), or train from scratch as in the paper.",
        ),
    ] = None,
    recipe: Annotated[str | None, typer.Option(help="A recipe by name or file; see `bcnet recipe list`.")] = None,
    method: Annotated[
        str | None,
        typer.Option(help="A rule instead of a search (l2-isomorphic, ...), or how a supernet is trained (bcv2, ...)."),
    ] = None,
    effort: Annotated[
        str,
        typer.Option(
            metavar="quick|normal|paper",
            help="How much to train and search: quick for a first look, paper for as long as the paper.",
        ),
    ] = "normal",
    compare: Annotated[
        str | None,
        typer.Option(
            metavar="NAMES|none", help="What else to train, only to compare with: full,uniform, ...; or none."
        ),
    ] = None,
    latency_backend: Annotated[
        str | None, typer.Option(metavar="torch|onnxruntime", help="What runs the networks when latency is measured.")
    ] = None,
    repeats: Annotated[
        int | None, typer.Option(help="How often to train every slim network; more than once gives intervals.")
    ] = None,
    plan: Annotated[
        bool, options.flag("--plan", "Print how long the run would take, its memory and disk, and stop there.")
    ] = False,
    out: Annotated[Path | None, typer.Option(help="Folder for the run; by default a new one under runs/.")] = None,
    resume: Annotated[Path | None, typer.Option(help="Continue the stopped run in this folder.")] = None,
    seed: Annotated[int | None, typer.Option(help="The seed of every random choice.")] = None,
    settings: Annotated[list[str] | None, options.SET] = None,
    device: Annotated[str | None, options.DEVICE] = None,
    trust: Annotated[bool, options.TRUST] = False,
    until: Annotated[
        str, typer.Option(metavar="STAGE", help="Stop after this stage: trace, given, search, ...")
    ] = "report",
    log: Annotated[str, options.LOG] = "",
    as_json: Annotated[bool, options.JSON] = False,
) -> None:
    """Slim a network to a budget, starting from what it has learnt and with it as the teacher.

    Without arguments it slims a small network for cluttered digits to 12% of its FLOPs, and downloads nothing.
    """
    from bcnet.run.effort import with_effort
    from bcnet.run.pipeline import check_stage
    from bcnet.run.session import Run
    from bcnet.training import distributed
    from bcnet.utils.files import full_path

    check_stage(until)
    if log not in ("", "tensorboard"):
        raise BcnetError(f"--log is {log!r:.40}, but it must be tensorboard")
    if resume is not None:
        _refuse_changes(context)
        work(open_run(resume, device, trust), until, as_json, log=log, planned=True)
        return
    changes = {
        "model": model,
        "data": data,
        "budgets": budget,
        "targets": targets,
        "weights": None if weights is None else str(full_path(str(weights))),
        "pretrained": pretrained or None,
        "start": start,
        "seed": seed,
        "compare": None if compare is None else [name.strip() for name in compare.split(",") if name != "none"],
        "repeats": repeats,
        **_method(method),
    }
    named = _named(model, data, recipe)
    if model is None:
        require_trust(named, trust)
    backend = [] if latency_backend is None else [f"latency.backend={latency_backend}"]
    chosen = with_options(with_effort(named, effort), changes, [*backend, *(settings or [])])
    if plan:
        print_plan(chosen, device, as_json)
        return
    distributed.start(cpu=device == "cpu")
    begun = Run(distributed.decide(lambda: out if out is not None else _new_folder(chosen)), device)
    with begun.lock():  # without a gap in which another process could take the folder
        distributed.decide(lambda: _create(begun, chosen))
        try:
            work(begun, until, as_json, log=log, planned=True)
        except BcnetError:
            if not begun.done("trace"):
                begun.abandon()
            raise


def _method(name: str | None) -> dict[str, Any]:
    """What ``--method`` changes: how a supernet is trained, or widths and channels by a criterion without a search."""
    from bcnet.run.recipe import Compared
    from bcnet.search.criteria import ALLOTMENTS
    from bcnet.supernet.paths import METHODS

    allotments = [known for known in get_args(Compared) if known != "full"]
    if name is None or name in METHODS:
        return {"method": name}
    if name not in allotments:
        raise BcnetError(f"unknown method {name!r:.40}: there are {', '.join([*METHODS, *allotments])}")
    return {"allot": name, "keep": ALLOTMENTS[name].criterion if name in ALLOTMENTS else None}


def _create(run: Run, recipe: Recipe) -> None:
    from bcnet.run.session import command_line, facts

    type(run).create(run.folder, recipe, facts(command_line(), recipe, str(run.device)))


def _refuse_changes(context: typer.Context) -> None:
    """Refuse options that would change what a run does: that is settled once it has begun."""
    for parameter in context.command.params:
        source = context.get_parameter_source(str(parameter.name))
        if source is not None and source.name == "COMMANDLINE" and parameter.name not in ON_RESUME:
            name = parameter.opts[0] if parameter.opts[0].startswith("-") else str(parameter.name).upper()
            raise BcnetError(f"--resume goes on with the recipe in its folder: leave out {name}")


def _named(model: str | None, data: str | None, recipe: str | None) -> Recipe:
    """The recipe that the options change."""
    from bcnet.run.recipe import Recipe

    if recipe is not None:
        return Recipe.read(recipe)
    if model is None and data is None:
        return Recipe.read(EXAMPLE)
    if data is None:
        raise BcnetError(f"the data is missing: add --data {DATA_FORMS}, or --recipe")
    if model is None:
        raise BcnetError("the model is missing: name one, such as zoo:mobilenetv2_cifar, or add --recipe")
    return Recipe(model=model, data=data)


def with_options(recipe: Recipe, options: dict[str, Any], settings: list[str]) -> Recipe:
    """``recipe`` with what the command line says; files and folders by their full path, so that it works anywhere."""
    content = recipe.to_dict()
    given = {key: value for key, value in options.items() if value is not None}
    if "start" in given and given["start"] != content["start"]:
        content = {key: value for key, value in content.items() if key not in START_DEPENDENT}
    if "targets" in given and "budgets" not in given:
        content.pop("budgets")
    content |= given
    for setting in settings:
        _set(content, setting)
    content |= {"model": _absolute(str(content["model"])), "data": _absolute(str(content["data"]))}
    return type(recipe).parse(content)


def _set(content: dict[str, Any], setting: str) -> None:
    from bcnet.utils.yaml_text import parse_yaml

    key, equals, text = setting.partition("=")
    if not equals:
        raise BcnetError(f"--set {setting!r:.60} must read key=value, such as supernet.epochs=30")
    try:
        value = parse_yaml(text)
    except BcnetError as error:
        raise BcnetError(f"--set {key:.40}: {error}") from None
    *groups, last = key.strip().split(".")
    for group in groups:
        if not isinstance(content.get(group), dict):
            content[group] = {}
        content = content[group]
    content[last] = value


def _absolute(spec: str) -> str:
    """``kind:folder`` and ``file.py:name`` with the full path."""
    from bcnet.utils.files import full_path

    kind, colon, rest = spec.partition(":")
    if colon and kind in ("cifar10", "imagefolder") and rest:
        return f"{kind}:{full_path(rest)}"
    path, colon, name = spec.rpartition(":")
    return f"{full_path(path)}:{name}" if colon and path.endswith(".py") else spec


def _new_folder(recipe: Recipe) -> Path:
    """runs/MODEL-1, or the next number that is free."""
    name = recipe.model.rpartition(":")[2] or "run"
    for number in range(1, 100_000):
        folder = Path("runs") / f"{name}-{number}"
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            continue
        except OSError as error:
            raise BcnetError(f"cannot make {folder} ({error.strerror}): name a folder with --out") from None
        return folder
    raise BcnetError("runs/ is full: name a folder with --out")
