"""``bcnet run``, and its stages alone: ``bcnet train``, ``search``, ``retrain``, ``export`` and ``report``."""

from __future__ import annotations

from contextlib import closing
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
LOG_OPTION = typer.Option(metavar="tensorboard", help="Also write every curve to RUN/tensorboard.")
START_DEPENDENT = ("rank_by", "search", "retrain", "distillation", "race", "score", "least")
"""Keys whose defaults depend on where networks start."""
DATA_FORMS = "digits, cifar10:FOLDER or imagefolder:FOLDER"


def run_all(
    model: Annotated[
        str | None, typer.Argument(metavar="MODEL", help="zoo:NAME, timm:NAME, torchvision:NAME or file.py:NAME.")
    ] = None,
    data: Annotated[str | None, typer.Option(help=f"{DATA_FORMS}.")] = None,
    budget: Annotated[
        list[str] | None, typer.Option(metavar="NAME=VALUE", help="flops=50%, params=3M, ...; may be repeated.")
    ] = None,
    targets: Annotated[
        list[str] | None, typer.Option(metavar="NAME=VALUE", help="Several budgets, a slim network for each.")
    ] = None,
    weights: Annotated[Path | None, typer.Option(help="The trained weights: .safetensors, or .pt, .pth.")] = None,
    pretrained: Annotated[bool, typer.Option("--pretrained", help="The weights timm or torchvision publish.")] = False,
    start: Annotated[str | None, typer.Option(help="trained: keep what it has learnt; or scratch.")] = None,
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
    log: Annotated[str, LOG_OPTION] = "",
    as_json: Annotated[bool, JSON_OPTION] = False,
) -> None:
    """Slim a network within a budget: what it has learnt is kept, and the slim networks learn from it.

    With nothing said, a small network on the embedded digits is slimmed to half its FLOPs.
    """
    from bcnet.run.pipeline import check_stage
    from bcnet.run.session import Run, command_line, facts

    check_stage(until)
    if log not in ("", "tensorboard"):
        raise BcnetError(f"--log is {log!r:.40}, but it must be tensorboard")
    if resume is not None:
        given = {"MODEL": model, "--data": data, "--budget": budget, "--recipe": recipe, "--out": out, "--seed": seed}
        more = {"--targets": targets, "--weights": weights, "--pretrained": pretrained or None, "--start": start}
        _refuse({**given, **more, "--set": settings})
        _work(Run(resume, device), until, as_json, log=log)
        return
    options = {
        "model": model,
        "data": data,
        "budgets": budget,
        "targets": targets,
        "weights": None if weights is None else str(weights.expanduser().resolve()),
        "pretrained": pretrained or None,
        "start": start,
        "seed": seed,
    }
    chosen = _changed(_base(model, data, recipe), options, settings or [])
    run = Run(out if out is not None else _new_folder(chosen), device)
    with run.lock():
        Run.create(run.folder, chosen, facts(command_line(), chosen, str(run.device)))
    try:
        _work(run, until, as_json, log=log)
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


def _changed(base: Recipe, options: dict[str, Any], settings: list[str]) -> Recipe:
    """``base`` with what the command line says; files and folders by their full path, so that it works anywhere."""
    content = base.to_dict()
    given = {key: value for key, value in options.items() if value is not None}
    if "start" in given and given["start"] != content["start"]:
        content = {key: value for key, value in content.items() if key not in START_DEPENDENT}
    if "targets" in given and "budgets" not in given:
        content.pop("budgets")
    content |= given
    for setting in settings:
        _set(content, setting)
    content |= {"model": _absolute(str(content["model"])), "data": _absolute(str(content["data"]))}
    return type(base).parse(content)


def _set(content: dict[str, Any], setting: str) -> None:
    import yaml

    key, equals, text = setting.partition("=")
    if not equals:
        raise BcnetError(f"--set {setting!r:.60} must read key=value, such as supernet.epochs=30")
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        raise BcnetError(f"the value of --set {setting!r:.60} is no YAML") from None
    *groups, last = key.strip().split(".")
    for group in groups:
        if not isinstance(content.get(group), dict):
            content[group] = {}
        content = content[group]
    content[last] = value


def _absolute(spec: str) -> str:
    """``kind:folder`` and ``file.py:name`` with the full path."""
    kind, colon, rest = spec.partition(":")
    if colon and kind in ("cifar10", "imagefolder") and rest:
        return f"{kind}:{Path(rest).expanduser().resolve()}"
    path, colon, name = spec.rpartition(":")
    return f"{Path(path).resolve()}:{name}" if colon and path.endswith(".py") else spec


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


def _work(run: Run, until: str, as_json: bool, again: bool = False, log: str = "") -> None:
    """Run the stages up to ``until`` and print what there is."""
    from bcnet.run.folder import RunFolder
    from bcnet.run.pipeline import run_stages
    from bcnet.utils.progress import TensorBoard, shown

    RunFolder.open(run.folder)
    try:
        with shown() as screen, run.lock():
            run.listener = TensorBoard(screen, run.path(log)) if log else screen
            with closing(run.listener):
                run_stages(run, until, again)
    except KeyboardInterrupt:
        fail(f"stopped, nothing is lost: go on with `bcnet run --resume {run.folder}`", code=130)
    print_run(run, until, as_json)


def print_run(run: Run, until: str, as_json: bool) -> None:
    """What a run has come to, for people or as JSON."""
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
    from bcnet.report import words
    from bcnet.run.report import report_data

    out = console()
    if run.done("targets"):
        _print_targets(run)
        return
    if not run.done("compare"):
        out.print(f"{until} is done: {run.folder}", soft_wrap=True)
        return
    compared, data = run.read("compare"), report_data(run)
    predicted = all("predicted_ms" in row for row in compared["networks"])
    rows = [
        (
            row["name"],
            words.score(data, row["score"]),
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
        f"{run.recipe.model} within {budgets}, {_began(run)}; {data.metric} on {images} images",
        [
            "network",
            data.metric,
            "FLOPs",
            "parameters",
            *(["latency, predicted", "latency, measured"] if predicted else ["latency"]),
        ],
        rows,
    )
    for sentence in words.comparison(data):
        out.print(" ".join(sentence.split()), soft_wrap=True, highlight=False)
    report = _report_path(run) if run.done("report") else None
    out.print(f"report: {report}" if report else f"run: {run.folder}", soft_wrap=True)


def _began(run: Run) -> str:
    return "weights inherited" if run.recipe.start == "trained" else "trained from scratch"


def _print_targets(run: Run) -> None:
    """One line for every target: what ships, and uniform scaling beside it."""
    rows = []
    for target in run.read("targets")["targets"]:
        slim, uniform = target["networks"][target["chosen"]], target["networks"].get("uniform")
        figures = (f"{slim['score']:.4f}", f"{uniform['score']:.4f}" if uniform else "-")
        rows.append((target["budget"], target["chosen"], *figures, slim["costs"]["flops"], slim["costs"]["params"]))
    title = f"{run.recipe.model}, {_began(run)}: a slim network for every target"
    table(title, ["target", "ships", "score", "uniform", "FLOPs", "parameters"], rows)
    report = _report_path(run) if run.done("report") else None
    console().print(f"report: {report}" if report else f"run: {run.folder}", soft_wrap=True)


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
