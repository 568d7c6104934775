"""``bcnet run``, and its stages alone: ``bcnet train``, ``search``, ``retrain``, ``export`` and ``report``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bcnet.cli.console import JSON_OPTION, console, fail, print_json, table
from bcnet.errors import BcnetError

if TYPE_CHECKING:
    from bcnet.run.recipe import Recipe
    from bcnet.run.session import Run

RUN_ARGUMENT = typer.Argument(metavar="RUN", help="The folder of a run.")
AGAIN_OPTION = typer.Option("--again", help="Do the stage again, and forget the stages after it.")
DEVICE_OPTION = typer.Option("--device", help="cpu, cuda, cuda:1, ...; else a GPU where there is one.")
DATA_FORMS = "digits, cifar10:FOLDER or imagefolder:FOLDER"


def run_all(
    model: Annotated[
        str | None, typer.Argument(metavar="MODEL", help="zoo:NAME, timm:NAME, torchvision:NAME or file.py:NAME.")
    ] = None,
    data: Annotated[str | None, typer.Option(help=f"{DATA_FORMS}.")] = None,
    budget: Annotated[
        list[str] | None, typer.Option(metavar="NAME=VALUE", help="flops=50%, params=3M, ...; may be repeated.")
    ] = None,
    recipe: Annotated[str | None, typer.Option(help="A recipe by name or file; see `bcnet recipe list`.")] = None,
    out: Annotated[Path | None, typer.Option(help="The run's folder; else a new one under runs/.")] = None,
    resume: Annotated[Path | None, typer.Option(help="Go on with the run in this folder.")] = None,
    seed: Annotated[int | None, typer.Option(help="The one seed of everything.")] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Change a key of the recipe; may be repeated."),
    ] = None,
    device: Annotated[str | None, DEVICE_OPTION] = None,
    until: Annotated[str, typer.Option(metavar="STAGE", help="Stop after this stage.")] = "report",
    as_json: Annotated[bool, JSON_OPTION] = False,
) -> None:
    """Find a slim network within a budget: trace, train, search, retrain, compare, export, report.

    With nothing said, a small network on the embedded digits is slimmed to half its FLOPs.
    """
    from bcnet.run.pipeline import check_stage
    from bcnet.run.session import Run, command_line, facts

    check_stage(until)
    if resume is not None:
        given = {"MODEL": model, "--data": data, "--budget": budget, "--recipe": recipe, "--out": out, "--seed": seed}
        _refuse({**given, "--set": settings})
        _work(Run(resume, device), until, as_json)
        return
    chosen = _changed(_base(model, data, recipe), model, data, budget, seed, settings or [])
    run = Run(out if out is not None else _new_folder(chosen), device)
    with run.lock():
        Run.create(run.folder, chosen, facts(command_line(), chosen, str(run.device)))
        try:
            _work(run, until, as_json)
        except BcnetError:
            if not run.done("trace"):
                run.abandon()
            raise


def _refuse(given: dict[str, Any]) -> None:
    for name, value in given.items():
        if value is not None:
            raise BcnetError(f"--resume goes on with the recipe in its folder: leave out {name}")


def _base(model: str | None, data: str | None, recipe: str | None) -> Recipe:
    """The recipe that the options change."""
    from bcnet.run.recipe import Recipe

    if recipe is not None:
        return Recipe.read(recipe)
    if model is None and data is None:
        return Recipe.read("digits")
    if data is None:
        raise BcnetError(f"the data is missing: add --data {DATA_FORMS}, or --recipe")
    if model is None:
        raise BcnetError("the model is missing: name one, such as zoo:mobilenetv2_cifar, or add --recipe")
    return Recipe(model=model, data=data)


def _changed(
    base: Recipe, model: str | None, data: str | None, budget: list[str] | None, seed: int | None, settings: list[str]
) -> Recipe:
    """``base`` with what the command line says; files and folders by their full path, so that it works anywhere."""
    content = base.to_dict()
    options = {"model": model, "data": data, "budgets": budget, "seed": seed}
    content |= {key: value for key, value in options.items() if value is not None}
    for setting in settings:
        _set(content, setting)
    content |= {"model": _absolute(str(content["model"])), "data": _absolute(str(content["data"]))}
    return type(base).parse(content)


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


def _work(run: Run, until: str, as_json: bool, again: bool = False) -> None:
    """Run the stages up to ``until`` and print what there is."""
    from bcnet.run.folder import RunFolder
    from bcnet.run.pipeline import run_stages
    from bcnet.utils.display import shown

    RunFolder.open(run.folder)
    try:
        with shown() as listener, run.lock():
            run.listener = listener
            run_stages(run, until, again)
    except KeyboardInterrupt:
        fail(f"stopped, nothing is lost: go on with `bcnet run --resume {run.folder}`", code=130)
    if as_json:
        print_json(_summary(run))
    else:
        _print_summary(run, until)


def _summary(run: Run) -> dict[str, Any]:
    from bcnet.run.pipeline import STAGES

    result: dict[str, Any] = {"run": str(run.folder), "done": [name for name in STAGES if run.done(name)]}
    if run.done("compare"):
        result |= {key: run.read("compare")[key] for key in ("scored_on", "networks")}
    if run.done("report"):
        result["report"] = _report_path(run)
    return result


def _report_path(run: Run) -> str | None:
    path = run.read("report")["path"]
    return None if path is None else str(run.folder / path)


def _print_summary(run: Run, until: str) -> None:
    from bcnet.report.words import comparison
    from bcnet.run.report import report_data

    out = console()
    if not run.done("compare"):
        out.print(f"{until} is done: {run.folder}", soft_wrap=True)
        return
    compared = run.read("compare")
    score = "accuracy" if "top5" in compared["networks"][0] else "score"
    predicted = all("predicted_ms" in row for row in compared["networks"])
    rows = [
        (
            row["name"],
            f"{row['score']:.2%}" if score == "accuracy" else f"{row['score']:.6g}",
            row["costs"]["flops"],
            row["costs"]["params"],
            *([f"{row['predicted_ms']:.3g} ms"] if predicted else []),
            f"{row['latency_ms']:.3g} ms",
        )
        for row in compared["networks"]
    ]
    budgets = ", ".join(run.recipe.budgets)
    images = "test" if compared["scored_on"] == "test" else "validation"
    table(
        f"{run.recipe.model} within {budgets}, trained from scratch; {score} on {images} images",
        [
            "network",
            score,
            "FLOPs",
            "parameters",
            *(["latency, predicted", "latency, measured"] if predicted else ["latency"]),
        ],
        rows,
    )
    for sentence in comparison(report_data(run)):
        out.print(" ".join(sentence.split()), soft_wrap=True, highlight=False)
    report = _report_path(run) if run.done("report") else None
    out.print(f"report: {report}" if report else f"run: {run.folder}", soft_wrap=True)


def _stage_command(name: str, about: str) -> Any:
    def command(
        run: Annotated[Path, RUN_ARGUMENT],
        again: Annotated[bool, AGAIN_OPTION] = False,
        device: Annotated[str | None, DEVICE_OPTION] = None,
        as_json: Annotated[bool, JSON_OPTION] = False,
    ) -> None:
        from bcnet.run.session import Run

        _work(Run(run, device), name, as_json, again)

    command.__doc__ = f"{about} Earlier stages that are not done yet are done first."
    return command


def add_run_commands(app: typer.Typer) -> None:
    """The commands of this module."""
    app.command("run")(run_all)
    app.command("train")(_stage_command("train", "Train the supernet of a run."))
    app.command("search")(_stage_command("search", "Search the widths of a run."))
    app.command("retrain")(_stage_command("retrain", "Train what a run found, and what it is compared with."))
    app.command("report")(_stage_command("report", "Write the report of a run."))
