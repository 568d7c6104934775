"""A run: its recipe, its folder, and what they describe (network, width space, data), made on first use.

This is what the stages, the report and the export read::

    run = Run("runs/digits_cnn-1")
    run.space, run.data, run.read("search")["best"]["widths"], run.network("found")
"""

from __future__ import annotations

import json
import platform
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from bcnet import __version__
from bcnet.data.half import halves
from bcnet.data.load import load_data
from bcnet.data.source import Batch, Data, Source
from bcnet.errors import BcnetError
from bcnet.latency.compare import measure_side_by_side
from bcnet.latency.table import LatencyTable, measure_table
from bcnet.models.load import LoadedModel, load_model
from bcnet.models.weights import load_weights
from bcnet.run.fingerprint import fingerprint
from bcnet.run.folder import RunFolder
from bcnet.run.recipe import PYTHON, Recipe
from bcnet.run.weights import finite, load_into
from bcnet.search.constraints import Budget, Constraints, parse_budget
from bcnet.search.strategies.neighbours import near
from bcnet.space.cost import Cost
from bcnet.space.importance import UnitScores, importance, taylor
from bcnet.space.network import NetworkSpace, trace
from bcnet.space.state import duplicate
from bcnet.space.widths import Widths
from bcnet.supernet.supernet import Supernet
from bcnet.training import distributed
from bcnet.training.recalibration import recalibrate
from bcnet.training.reconstruction import inherited
from bcnet.training.task import Task
from bcnet.utils.progress import Listener
from bcnet.utils.provenance import commit, package_version
from bcnet.utils.random_state import kept_random_state

TAYLOR_BATCHES = 8
AROUND, UNSEEN = 6, 2
"""Networks near a budget of latency that are measured, beside uniform scaling, so that predictions are right there, and
how many of them only check this."""


class Run(RunFolder):
    """A run folder with the objects its recipe names, or that a run from Python was given."""

    def __init__(self, folder: str | Path, device: str | None = None):
        super().__init__(folder)
        begun_on = (self.glance("run") or {}).get("device") if device is None else None
        self.place = distributed.start(cpu=(device or begun_on) == "cpu")
        self.device = self.place.device if self.place.world > 1 else choose_device(device or begun_on)
        self.listener = Listener()
        self.task_given: Task | None = None
        self._told: set[str] = set()

    def tell_once(self, text: str) -> None:
        """Make a note that several stages would make, but only once."""
        if text not in self._told:
            self._told.add(text)
            self.listener.note(text)

    def give(self, original: LoadedModel, data: Data, task: Task | None) -> None:
        """Use these objects instead of those that the recipe names."""
        self.original, self.data, self.task_given = original, data, task

    @cached_property
    def recipe(self) -> Recipe:
        """The recipe in the folder, as it runs on this device."""
        return super().recipe.on(self.device)

    @cached_property
    def original(self) -> LoadedModel:
        """The network as it was given, on the run's device."""
        recipe = self.recipe
        if PYTHON in (recipe.model, recipe.data):
            raise BcnetError(
                f"{self.folder} was made from Python: go on with bcnet.slim(..., out={str(self.folder)!r})"
            )
        torch.manual_seed(recipe.seed)
        shape = recipe.input or self.data.shape
        loaded = load_model(recipe.model, shape, self.data.classes, recipe.pretrained)
        if recipe.weights is not None:
            load_weights(loaded.model, recipe.weights)
        return replace(loaded, model=loaded.model.to(self.device), example=loaded.example.to(self.device))

    @cached_property
    def data(self) -> Data:
        r = self.recipe
        held: dict[str, Any] = {"val_fraction": r.val_fraction, "seed": r.seed, "options": r.loading}
        return load_data(r.data, device=self.device, shard=self.place.shard, **held)

    @cached_property
    def task(self) -> Task:
        """What networks are scored by; training adds its own label smoothing."""
        return self.task_given or Task.classification(classes=self.data.classes)

    @cached_property
    def space(self) -> NetworkSpace:
        return self._spaces[0]

    @cached_property
    def full(self) -> Widths:
        """The widths of the network as it was given, (L,)."""
        return self._spaces[1]

    @cached_property
    def _spaces(self) -> tuple[NetworkSpace, Widths]:
        return make_space(self.original, self.recipe)

    @cached_property
    def fingerprint(self) -> dict[str, str]:
        """What identifies the objects that a run from Python was given; empty where a recipe names them."""
        if self.recipe.model != PYTHON:
            return {}
        found = fingerprint(self.space, self.original.model, self.data, self.task_given)
        if self.recipe.start == "scratch":
            del found["weights"]  # which are not used
        return found

    @cached_property
    def costs(self) -> dict[str, Cost]:
        """What widths cost, including latency once a run with a latency budget has measured it."""
        if not self.done("latency"):
            return dict(self.space.costs)
        table = LatencyTable.from_json(json.dumps(self.read("latency")["table"]))
        return {**self.space.costs, "latency": table}

    @cached_property
    def constraints(self) -> Constraints:
        return self.within(self.recipe.budgets)

    @property
    def held(self) -> Constraints:
        """The budgets as measured: latency is predicted with the correction that the search found."""
        checked = (self.glance("search") or {}).get("latency") or {}
        factor, table = checked.get("correction", 1.0), self.costs.get("latency")
        if factor == 1.0 or not isinstance(table, LatencyTable):
            return self.constraints
        corrected = {**self.costs, "latency": table.corrected(factor)}
        return Constraints(self.space, corrected, self.constraints.budgets)

    def within(self, budgets: Iterable[str]) -> Constraints:
        """Any budgets of this run's space; percentages are of the network as it was given."""
        return make_constraints(self.space, self.full, self.costs, budgets)

    def cost_of(self, widths: Any) -> dict[str, int]:
        """Every cost of one network."""
        return {name: int(cost(np.asarray(widths))[0]) for name, cost in self.costs.items()}

    def fresh(self, widths: Any, seed: int | None = None) -> nn.Module:
        """A network at ``widths`` with weights drawn from this run's seed, or from another one."""
        return self._seeded(seed).build(np.asarray(widths)).to(self.device)

    @property
    def final_training(self) -> Source:
        """What the compared networks are trained on: all training images, unless validation images are held out."""
        return self.data.train if self.holds_out else self.data.whole or self.data.train

    @property
    def holds_out(self) -> bool:
        """Whether no network learns from the validation images, so that they can tell which is best."""
        return self.recipe.start == "trained" or self.data.whole is None

    @cached_property
    def searched(self) -> Source:
        """The validation images that a search scores on: half of them, where the others judge what it found."""
        return halves(self.data.val, self.recipe.seed)[0] if self.holds_out else self.data.val

    @cached_property
    def judged(self) -> Source:
        """The validation images that decide a race and what ships: the half that no search has seen, since images that
        found the best score flatter it."""
        return halves(self.data.val, self.recipe.seed)[1] if self.holds_out else self.data.val

    def given_network(self) -> nn.Module:
        """The given network, trained, in evaluation mode: what slim ones start from, and their teacher."""
        network = duplicate(self.original.model)
        load_into(network, self.tensors("given"), self.path("given.safetensors"))
        return network.eval()

    def teacher(self) -> nn.Module | None:
        """The given network, if slim ones learn from it."""
        if self.recipe.distillation is None or self.task.distil is None:
            return None
        return self.given_network()

    @cached_property
    def channel_scores(self) -> UnitScores:
        """How important every channel of the given network is, by the recipe's criterion."""
        return self.scores_by(self.recipe.keep)

    def scores_by(self, criterion: str) -> UnitScores:
        """How important every channel of the given network is by ``criterion``: an array for each variable."""
        if criterion != "taylor":
            return importance(self.space, self.given_network(), criterion, seed=self.recipe.seed)
        return taylor(self.space, self.given_network(), self.training_batches(TAYLOR_BATCHES), self.task.loss)

    @kept_random_state()
    def inherited(self, widths: Any) -> nn.Module:
        """A network at ``widths`` with the most important channels of the given one; if channels were cut, the others
        make up for them and batch norm is recalibrated."""
        space, given, r = self._seeded(), self.given_network(), self.recipe
        some = [] if np.array_equal(widths, self.full) else self.training_batches(r.healing.calibration)
        made_of = some if r.reconstruct else []
        network = inherited(space, given, widths, self.channel_scores, made_of).to(self.device)
        if some:
            recalibrate(network, some, bf16=r.retrain.bf16)
        return network

    def training_batches(self, count: int) -> list[Batch]:
        """The first ``count`` training batches, or all where there are fewer; the same whole ones in all processes."""
        batches = self.data.train.batches(0, 0, self.device)
        taken = [distributed.whole(next(batches)) for _ in range(min(count, len(self.data.train)))]
        if not all(finite(tensor) for batch in taken for tensor in batch):
            raise BcnetError("the training data holds values that are infinite or NaN: clean it")
        return taken

    @property
    def chosen(self) -> str:
        """The name of the network that ships: the best one trained within the budgets."""
        return str(self.read("retrain")["chosen"])

    @kept_random_state()
    def network(self, name: str | None = None) -> nn.Module:
        """A trained network by name (``found``, ``uniform``, ``full``, ...), by default the one that ships, in
        evaluation mode."""
        result = f"retrain/{name or self.chosen}"
        network = self.fresh(self.read(result)["widths"])
        load_into(network, self.tensors(result), self.path(f"{result}.safetensors"))
        if self.recipe.channels_last:
            network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        return network.eval()

    @kept_random_state()
    def supernet(self) -> Supernet:
        """The trained supernet, in evaluation mode."""
        net = self.fresh_supernet()
        state = {k.removeprefix("net."): t for k, t in self.tensors("train").items() if k.startswith("net.")}
        load_into(net, state, self.path("train.safetensors"))
        if self.recipe.channels_last:
            net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        return net.eval()

    def fresh_supernet(self) -> Supernet:
        return Supernet(self._seeded(), self.recipe.paths.principle).to(self.device)

    def _seeded(self, seed: int | None = None) -> NetworkSpace:
        """The space, after which torch is seeded: making the space may draw random numbers."""
        space = self.space
        _ = space.own_class
        torch.manual_seed(self.recipe.seed if seed is None else seed)
        return space


def choose_device(name: str | None) -> torch.device:
    """The device called ``name``; without a name, a GPU if there is one."""
    try:
        device = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
    except RuntimeError:
        raise BcnetError(f"unknown device {name!r:.40}: say cpu, cuda or cuda:1") from None
    if device.type not in ("cpu", "cuda"):
        raise BcnetError(f"bcnet does not run on the device {name!r:.40}: say cpu, cuda or cuda:1")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise BcnetError(f"torch finds no device {name} on this machine: say cpu, or check its driver")
    return device


def make_space(original: LoadedModel, recipe: Recipe) -> tuple[NetworkSpace, Widths]:
    """The width space that a recipe searches, and the widths of the given network in it."""
    grid: dict[str, Any] = {name: getattr(recipe, name) for name in ("groups", "base", "least")}
    grid["round_to"] = rounding(recipe, original.model)
    space = original.space(ignore=recipe.ignore, squeeze=recipe.squeeze, **grid)
    if recipe.widen == 1:
        return space, space.max
    units = np.array([v.unit for v in space.variables])
    wide = space.build(np.floor(space.max * recipe.widen / units).astype(np.int64) * units, grow=True)
    kept = () if recipe.squeeze else original.kept
    return trace(wide, original.example, ignore=(*recipe.ignore, *kept), **grid), space.max


def needs_latency(recipe: Recipe) -> bool:
    """Whether a budget names latency."""
    return any(limits_latency(text) for text in (*recipe.budgets, *recipe.targets))


def limits_latency(text: str) -> bool:
    """Whether a budget limits latency, as ``latency=4ms`` does."""
    return text.partition("=")[0].strip() == "latency"


def rounding(recipe: Recipe, model: nn.Module) -> int:
    """What widths are multiples of. With a latency budget and nothing else said: the number of channels that a GPU's
    matrix units or a CPU's vectors process at once, since widths in between cost as much as the next multiple; at most
    a quarter of the median width, so that there is something left to choose."""
    if recipe.round_to is not None or not needs_latency(recipe):
        return recipe.round_to or 1
    on_cpu = next(model.parameters()).device.type == "cpu"
    liked = 16 if on_cpu and "AVX512" in torch.backends.cpu.get_cpu_capability() else 8
    widths = [
        module.out_channels for module in model.modules() if isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d)
    ]
    most = int(np.median(widths)) // 4 if widths else 1
    return next(number for number in (16, 8, 4, 2, 1) if number <= min(liked, max(1, most)))


def needed_latency(
    space: NetworkSpace, full: Widths, recipe: Recipe, listener: Listener | None = None
) -> LatencyTable | None:
    """The latency of one input, measured if a budget names it, and true near the budgets above all; ``listener`` is
    told how far it is."""
    if not needs_latency(recipe):
        return None
    heard = listener or Listener()
    table = measure_table(space, recipe.latency, lambda done, total: heard.step("latency", done, total, {}))
    costs = {**space.costs, "latency": table}
    rows: list[Widths] = [full]
    unseen: list[Widths] = []
    for budgets in [[target] for target in recipe.targets if limits_latency(target)] or [list(recipe.budgets)]:
        within, rng = make_constraints(space, full, costs, budgets), np.random.default_rng(0)
        if within.feasible(space.min[None])[0]:  # the others are refused in a moment
            uniform = space.decode(within.uniform_index())[None]
            around = near(within, uniform, AROUND, rng)
            rows, unseen = [*rows, *uniform, *around[UNSEEN:]], [*unseen, *around[:UNSEEN]]
    if not unseen:
        return table
    measured = measure_side_by_side(space, table, [*rows, *unseen], recipe.latency)
    return table.aimed(measured[: len(rows)], measured[len(rows) :])


def make_constraints(
    space: NetworkSpace, full: Widths, costs: Mapping[str, Cost], budgets: Iterable[str]
) -> Constraints:
    """The budgets of a recipe; percentages are of the network as it was given."""

    def budget(text: str) -> Budget:
        found = parse_budget(text, costs, space)
        if not text.rstrip().endswith("%"):
            return found
        cost = costs[found.name]
        return replace(found, limit=found.limit * int(cost(full)[0]) / int(cost(space.max)[0]))

    return Constraints(space, costs, [budget(text) for text in budgets])


def facts(command: list[str], recipe: Recipe, device: str) -> dict[str, Any]:
    """The contents of run.json: which program ran, how it was called, and where."""
    packages = ("torch", "numpy", "scipy", "pymoo", "pydantic", "safetensors", "scikit-learn", "timm", "torchvision")
    return {
        "bcnet": __version__,
        "command": command,
        "seed": recipe.seed,
        "commit": commit(),
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "versions": {"python": platform.python_version(), **{p: v for p in packages if (v := package_version(p))}},
        "machine": {
            "system": platform.platform(),
            "processor": platform.machine(),
            "threads": torch.get_num_threads(),
            "device": torch.cuda.get_device_name() if device.startswith("cuda") else "cpu",
        },
        "device": device,
    }


def command_line() -> list[str]:
    """The command as a person would repeat it; ``python -m bcnet`` is known to Python by its file."""
    name = Path(sys.argv[0]).name
    return ["bcnet" if name == "__main__.py" else name, *sys.argv[1:]]
