"""The whole of bcnet in one call, for a network and loaders of your own: :func:`slim`."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from functools import cached_property
from html import escape
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bcnet.data.source import from_loaders
from bcnet.errors import BcnetError, first_line
from bcnet.models.load import LoadedModel
from bcnet.report import ReportData, words
from bcnet.run.fingerprint import WORDS, changed
from bcnet.run.pipeline import forget, pick, run_stages
from bcnet.run.plan import tell_plan
from bcnet.run.recipe import PYTHON, Recipe
from bcnet.run.report import report_data, write_report, write_tradeoff
from bcnet.run.session import Run, facts
from bcnet.run.stages.common import CHECKPOINTS
from bcnet.run.targets import open_target
from bcnet.space.capture import check_network
from bcnet.space.state import duplicate, unwrapped
from bcnet.space.torch_export import tensors_in
from bcnet.training.retraining import learnt
from bcnet.training.task import Task
from bcnet.utils.modes import training_possible
from bcnet.utils.progress import Listener, terminal_listener
from bcnet.utils.random_state import kept_random_state

Given = Recipe | Mapping[str, Any] | str | Path | None


@kept_random_state()
@training_possible()
def slim(
    model: nn.Module,
    example: Tensor,
    train: Iterable[Any],
    val: Iterable[Any],
    *,
    budget: str | Sequence[str] | None = None,
    targets: Sequence[str] | None = None,
    test: Iterable[Any] | None = None,
    task: Task | None = None,
    recipe: Given = None,
    seed: int | None = None,
    out: str | Path | None = None,
    device: str | None = None,
    progress: bool = True,
) -> Result:
    """Slim ``model`` within ``budget`` (half of its FLOPs where left out), keeping what it has learnt.

    ``example`` is one input batch; ``train``, ``val`` and ``test`` are loaders of ``(x, y)``. The default task is
    classification; give a :class:`bcnet.Task` for any other loss and score. The weights of ``model`` are where slim
    networks begin, and ``model`` is their teacher; one that knows nothing yet is trained first. ``targets`` are several
    budgets, with a slim network for each in :attr:`Result.targets`. ``recipe`` is a recipe, its name or file, or just
    the keys to change, such as ``{"retrain": {"epochs": 10}}``. With ``out`` the run folder is kept there, and the
    same call goes on with a run that was stopped. ``model`` itself is not changed.
    """
    chosen = _recipe(recipe, budget, targets, seed)
    model = _network(model)
    with ExitStack() as stack:
        folder = Path(out) if out is not None else None
        kept = None if folder is not None else tempfile.TemporaryDirectory(prefix="bcnet-")
        run = Run(folder or kept.name, device)  # type: ignore[union-attr]
        stack.enter_context(run.lock())
        if progress:
            run.listener = stack.enter_context(terminal_listener())
        original = _original(model, example, run.device, task)
        data = from_loaders(train, val, test, classes=original.classes, seed=chosen.seed, shard=run.place.shard)
        if run.done("run"):
            _check_same(run, chosen)
        else:
            Run.create(run.folder, chosen, facts(["bcnet.slim"], chosen, str(run.device)))
        run.give(original, data, task)
        _check_given(run)
        # A folder that is kept also has the network, for ``bcnet export``, which cannot make it without its code.
        last = "targets" if chosen.targets else "compare" if folder is None else "export"
        if progress:
            tell_plan(run, last)
        run_stages(run, last)
    return Result(run, kept)


@dataclass(repr=False)
class Result:
    """What :func:`slim` found; ``run`` has everything, see :class:`bcnet.run.session.Run`."""

    run: Run
    _temporary: tempfile.TemporaryDirectory[str] | None = None

    def __repr__(self) -> str:
        if self.targets:
            return "\n".join(f"{budget}: {result!r}" for budget, result in self.targets.items())
        data = report_data(self.run)
        table = ("  ".join(cells).rstrip() for cells in self._table(data))
        return "\n".join([words.headline(data), *table, *words.closing(data)])

    def _repr_html_(self) -> str:
        if self.targets:
            parts = (f"<h4>{escape(budget)}</h4>{result._repr_html_()}" for budget, result in self.targets.items())
            return "".join(parts)
        data = report_data(self.run)
        rows = "".join(
            "<tr>" + "".join(f"<td>{escape(cell.strip())}</td>" for cell in row) + "</tr>" for row in self._table(data)
        )
        closing = "".join(f"<p>{escape(line)}</p>" for line in words.closing(data))
        return f"<p>{escape(words.headline(data))}</p><table>{rows}</table>{closing}"

    def _table(self, data: ReportData) -> list[tuple[str, ...]]:
        """The networks, the one that ships marked: name, score, and what they cost."""
        rows = []
        for name, row in self.networks.items():
            costs = row["costs"]
            figures = (
                f"{words.cost('flops', costs['flops'])} FLOPs",
                f"{words.cost('params', costs['params'])} parameters",
            )
            ships = "ships" if name == self.run.chosen else ""
            rows.append((name, f"{words.score(data, row['score'])} {data.metric}", *figures, ships))
        wide = [max(len(row[i]) for row in rows) for i in range(4)]
        return [(*(cell.ljust(n) for cell, n in zip(row, wide, strict=False)), row[4]) for row in rows]

    @cached_property
    def targets(self) -> dict[str, Result]:
        """A result for each of the targets, by its budget; none where there was one budget."""
        return {budget: Result(open_target(self.run, budget, ["bcnet.slim"])) for budget in self.run.recipe.targets}

    @cached_property
    def widths(self) -> dict[str, int]:
        """The width of every variable, by the name of its first layer."""
        self._one_network()
        widths = self.run.read(f"retrain/{self.run.chosen}")["widths"]
        return dict(zip(self.run.space.names, widths, strict=True))

    @cached_property
    def model(self) -> nn.Module:
        """The slim network, trained, in evaluation mode."""
        self._one_network()
        return self.run.network()

    @cached_property
    def front(self) -> list[dict[str, Any]]:
        """The Pareto front of the search, cheapest first: widths, costs, and the score or negated loss they were
        ranked by."""
        self._one_network()
        trials: list[dict[str, Any]] = self.run.read("search")["front"]
        return trials

    @cached_property
    def networks(self) -> dict[str, dict[str, Any]]:
        """What was found (``found``) beside ``full`` and ``uniform``: score, loss, costs and ``latency_ms``; a score of
        which lower is better is negated."""
        self._one_network()
        return {row["name"]: row for row in self.run.read("compare")["networks"]}

    @kept_random_state()
    @training_possible()
    def pick(self, budget: str, widths: Sequence[int] | None = None, *, progress: bool = True) -> Result:
        """A slim network for one more budget, fine-tuned as the others: at ``widths``, such as those of a point of
        :attr:`front`, or else chosen from the scores that are there."""
        if not isinstance(budget, str):
            raise BcnetError(f'budget is {budget!r:.40}, but it must be a text such as "flops=40%"')
        with terminal_listener() if progress else nullcontext(Listener()) as self.run.listener, self.run.lock():
            return Result(pick(self.run, budget, widths), self._temporary)

    def report(self, path: str | Path | None = None) -> Path:
        """Write the report: to ``path``, or else into the run folder given as ``out``, or else here."""
        if path is None and self._temporary is not None:
            path = "report.html"
        if self.targets:
            for result in self.targets.values():
                write_report(result.run)
            return write_tradeoff(self.run, path)
        return write_report(self.run, path)

    def export(self, out: str | Path, to: str = "torch") -> dict[str, Any]:
        """Write the slim network to the folder ``out``, as ``torch``, ``onnx`` or ``pt2``."""
        from bcnet.run.export import export_run

        self._one_network()
        return export_run(self.run, to, out)

    def _one_network(self) -> None:
        if self.targets:
            raise BcnetError(f"there is a slim network for every target: take targets[{self.run.recipe.targets[0]!r}]")


def _recipe(
    given: Given, budget: str | Sequence[str] | None, targets: Sequence[str] | None, seed: int | None
) -> Recipe:
    if not isinstance(given, (Recipe, Mapping, str, os.PathLike, type(None))):
        raise BcnetError(f"recipe is {given!r:.40}, but it must be a recipe, its name or file, or the keys to change")
    here: dict[str, Any] = {"model": PYTHON, "data": PYTHON}
    if budget is not None:
        here["budgets"] = _budgets("budget", budget)
    if targets is not None:
        here["targets"] = _budgets("targets", targets)
    if seed is not None:
        here["seed"] = seed
    if isinstance(given, (str, os.PathLike)):
        given = Recipe.read(given)
    content = given.to_dict() if isinstance(given, Recipe) else dict(given or {})
    if targets is not None and budget is None:
        content.pop("budgets", None)
    return Recipe.parse({**content, **here})


def _budgets(name: str, given: object) -> list[str]:
    texts = [given] if isinstance(given, str) else given
    if not isinstance(texts, Sequence) or not texts or not all(isinstance(text, str) for text in texts):
        raise BcnetError(f'{name} is {given!r:.40}, but it must be a text such as "flops=50%", or a list of them')
    return list(texts)


def _network(model: object) -> nn.Module:
    """The network to slim; a :class:`BcnetError` says what was given instead."""
    if isinstance(model, type) and issubclass(model, nn.Module):
        raise BcnetError(f"model is the class {model.__name__}, not a network: make one, {model.__name__}(...)")
    if isinstance(model, Mapping):
        raise BcnetError("model is a state_dict: load it into your network, and give that")
    if not isinstance(model, nn.Module):
        raise BcnetError(f"model is a {type(model).__name__}, but it must be a network, an nn.Module")
    model = unwrapped(model)
    check_network(model)
    if not any(True for _ in model.parameters()):
        raise BcnetError("model has no parameters, so there is nothing to slim: give a network with convolutions")
    if not any(p.requires_grad for p in model.parameters()):
        raise BcnetError("all parameters of model are frozen, so nothing can be trained: model.requires_grad_(True)")
    return model


def _original(model: nn.Module, example: object, device: torch.device, task: Task | None) -> LoadedModel:
    if not isinstance(task, (Task, type(None))):
        raise BcnetError(f"task must be a bcnet.Task, not {type(task).__name__}")
    given = tensors_in(example)
    if len(given) > 1:
        raise BcnetError(
            f"example holds {len(given)} inputs, but slim takes networks of one: give a module that takes one "
            "tensor, splits it, and calls yours"
        )
    if not isinstance(example, Tensor) or example.ndim < 2:
        raise BcnetError("example must be one batch of inputs, such as torch.randn(1, 3, 32, 32)")
    own = duplicate(model).to(device)
    inputs = example.to(device)
    with torch.no_grad():
        try:
            output = own.eval()(inputs)
        except Exception as error:
            reason = first_line(error)
            raise BcnetError(f"the model does not run on the example: {reason}") from error
    logits = isinstance(output, Tensor) and output.ndim == 2 and output.shape[1] > 1
    shape: Any = tuple(inputs.shape[1:])
    return LoadedModel(PYTHON, own, inputs, shape, output.shape[1] if task is None and logits else None)


def _check_same(run: Run, chosen: Recipe) -> None:
    stored, wanted = run.recipe.to_dict(), chosen.on(run.device).to_dict()
    different = next((key for key in wanted if stored.get(key) != wanted[key]), None)
    if different is not None:
        raise BcnetError(f"{run.folder} holds a run with another {different}: use the same recipe, or another folder")


def _check_given(run: Run) -> None:
    """A folder goes on with the network, the data and the task it was begun with."""
    traced = run.glance("trace")
    if traced is None:  # there is nothing yet, or it is done again
        return
    kept, found = traced["fingerprint"], run.fingerprint
    different = changed(kept, found)
    if different == WORDS["weights"] and changed({**kept, "weights": found["weights"]}, found) is None:
        if not run.done("given") and not run.path(CHECKPOINTS, "given").exists():
            forget(run, "trace")  # nothing has come of the weights yet
            return
        if _knew_nothing(run):
            return
    if different is not None:
        raise BcnetError(f"{run.folder} holds a run with {different}: choose another folder")


def _knew_nothing(run: Run) -> bool:
    """Whether the network that a run began with was untrained, and the one it is given now is, too: drawn anew, its
    weights differ, but the run goes on with what the first one has learnt since."""
    given = run.glance("given")
    begun = run.path(CHECKPOINTS, "given").exists() if given is None else not given["knew"]
    return begun and not learnt(run.original.model.eval(), run.data.val, run.task, bf16=run.recipe.given.bf16)
