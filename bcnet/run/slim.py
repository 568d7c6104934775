"""The whole of bcnet in one call, for a network and loaders of your own: :func:`slim`."""

from __future__ import annotations

import copy
import os
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bcnet.data.source import from_loaders
from bcnet.errors import BcnetError
from bcnet.models.load import LoadedModel
from bcnet.run.pipeline import run_stages
from bcnet.run.recipe import PYTHON, Recipe
from bcnet.run.session import Run, facts
from bcnet.training.task import Task
from bcnet.utils.random_state import kept_random_state

Given = Recipe | Mapping[str, Any] | str | Path | None


@kept_random_state()
def slim(
    model: nn.Module,
    example: Tensor,
    train: Iterable[Any],
    val: Iterable[Any],
    *,
    budget: str | Sequence[str] = "flops=50%",
    test: Iterable[Any] | None = None,
    task: Task | None = None,
    recipe: Given = None,
    out: str | Path | None = None,
    device: str | None = None,
    progress: bool = True,
) -> Result:
    """Find the best channel widths of ``model`` within ``budget``, and train the slim network from scratch.

    ``example`` is one input batch; ``train``, ``val`` and ``test`` are loaders of ``(x, y)``. The default task is
    classification; give a :class:`bcnet.Task` for any other loss and score. ``recipe`` is a recipe, its name or
    file, or just the keys to change, such as ``{"supernet": {"epochs": 10}, "seed": 1}``. With ``out`` the run folder
    is kept there, and the same call goes on with a run that was stopped. ``model`` itself is not changed.
    """
    chosen = _recipe(recipe, budget)
    with ExitStack() as stack:
        folder = Path(out) if out is not None else None
        kept = None if folder is not None else tempfile.TemporaryDirectory(prefix="bcnet-")
        run = Run(folder or kept.name, device)  # type: ignore[union-attr]
        stack.enter_context(run.lock())
        if progress:
            from bcnet.utils.display import shown

            run.listener = stack.enter_context(shown())
        source = _source(model, example, run.device, task)
        data = from_loaders(train, val, test, classes=source.classes, seed=chosen.seed)
        if run.done("run"):
            _check_same(run, chosen)
        else:
            Run.create(run.folder, chosen, facts(["bcnet.slim"], chosen, str(run.device)))
        run.give(source, data, task)
        _check_network(run)
        run_stages(run, until="compare")
    return Result(run, kept)


@dataclass
class Result:
    """What :func:`slim` found; ``run`` has everything, see :class:`bcnet.run.session.Run`."""

    run: Run
    _temporary: tempfile.TemporaryDirectory[str] | None = field(default=None, repr=False)

    @cached_property
    def widths(self) -> dict[str, int]:
        """The width of every variable, by the name of its first layer."""
        return dict(zip(self.run.space.names, self.run.read("search")["best"]["widths"], strict=True))

    @cached_property
    def model(self) -> nn.Module:
        """The slim network, trained, in evaluation mode."""
        return self.run.network("found")

    @cached_property
    def front(self) -> list[dict[str, Any]]:
        """The Pareto front of the search, cheapest first: widths, costs, and the supernet's score or negated loss."""
        trials: list[dict[str, Any]] = self.run.read("search")["front"]
        return trials

    @cached_property
    def networks(self) -> dict[str, dict[str, Any]]:
        """The slim network (``found``) beside ``full`` and ``uniform``: score, loss, costs and ``latency_ms``."""
        return {row["name"]: row for row in self.run.read("compare")["networks"]}

    def report(self, path: str | Path = "report.html") -> Path:
        """Write the page to look at."""
        from bcnet.run.report import write_report

        return write_report(self.run, path)

    def export(self, out: str | Path, to: str = "torch") -> dict[str, Any]:
        """Write the slim network to the folder ``out``, as ``torch``, ``onnx`` or ``pt2``."""
        from bcnet.run.export import export_run

        return export_run(self.run, to, out)


def _recipe(given: Given, budget: str | Sequence[str]) -> Recipe:
    if not isinstance(budget, (str, Sequence)):
        raise BcnetError(f"budget is {budget!r:.40}, but it must be a text such as 'flops=50%', or a list of such")
    if not isinstance(given, (Recipe, Mapping, str, os.PathLike, type(None))):
        raise BcnetError(f"recipe is {given!r:.40}, but it must be a recipe, its name or file, or the keys to change")
    here = {"model": PYTHON, "data": PYTHON, "budgets": [budget] if isinstance(budget, str) else list(budget)}
    if isinstance(given, (str, os.PathLike)):
        given = Recipe.read(given)
    if isinstance(given, Recipe):
        return given.changed(**here)
    return Recipe.parse({**(given or {}), **here})


def _source(model: nn.Module, example: Tensor, device: torch.device, task: Task | None) -> LoadedModel:
    if not isinstance(model, nn.Module):
        raise BcnetError(f"model must be a torch.nn.Module, not {type(model).__name__}")
    if not isinstance(task, (Task, type(None))):
        raise BcnetError(f"task must be a bcnet.Task, not {type(task).__name__}")
    if not isinstance(example, Tensor) or example.ndim < 2:
        raise BcnetError("example must be one batch of inputs, such as torch.randn(1, 3, 32, 32)")
    own = copy.deepcopy(model).to(device)
    inputs = example.to(device)
    with torch.no_grad():
        try:
            output = own.eval()(inputs)
        except Exception as error:
            reason = (str(error).splitlines() or [type(error).__name__])[0][:160]
            raise BcnetError(f"the model does not run on the example: {reason}") from error
    logits = isinstance(output, Tensor) and output.ndim == 2
    shape: Any = tuple(inputs.shape[1:])
    return LoadedModel(PYTHON, own, inputs, shape, output.shape[1] if task is None and logits else None)


def _check_same(run: Run, chosen: Recipe) -> None:
    stored, wanted = run.recipe.to_dict(), chosen.to_dict()
    different = next((key for key in wanted if stored.get(key) != wanted[key]), None)
    if different is not None:
        raise BcnetError(f"{run.folder} holds a run with another {different}: use the same recipe, or another folder")


def _check_network(run: Run) -> None:
    """A folder goes on with the network it was begun with."""
    if not run.done("trace"):
        return
    known = [(v["name"], list(v["candidates"])) for v in run.read("trace")["variables"]]
    if known != [(v.name, list(v.candidates)) for v in run.space.variables]:
        raise BcnetError(f"{run.folder} holds a run of another network: choose another folder")
