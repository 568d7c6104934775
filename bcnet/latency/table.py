"""Latency as a cost: measured layer by layer on the user's machine, interpolated for any widths.

Every convolution and linear layer is timed over a grid of input and output channels. What is between
them (norms, activations, additions) is taken to cost in proportion to the activations it writes. Whole
networks at some widths then say what a unit of both is worth, and what a pass costs besides; others,
which the fit has not seen, say how far predictions are off. Near a budget, where a search looks, a table can be
aimed better (:meth:`LatencyTable.aimed`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from math import prod
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from scipy.optimize import nnls
from torch import fx

from bcnet.errors import BcnetError
from bcnet.latency.timing import TURNS, Operation, Timer, TimingConfig, open_timer
from bcnet.space.axis import Size
from bcnet.space.counting import product
from bcnet.space.network import NetworkSpace
from bcnet.space.operators.table import bind
from bcnet.space.widths import Floats, Widths

FORMAT_VERSION = 1
GRID = 4
FITTED, CHECKED = 10, 4
STEEPEST, APART = 3.0, 1.25
"""The largest exponent that a table is aimed with, and how far apart, as a ratio, the predictions must be that tell."""


@dataclass(frozen=True)
class Measured:
    """A whole network, in nanoseconds as the table predicts and as a timer found; ``fitted`` ones taught the table."""

    widths: tuple[int, ...]
    predicted: float
    measured: float
    fitted: bool

    @property
    def error(self) -> float:
        """How far the prediction is off, relative to the measurement."""
        return abs(self.predicted - self.measured) / self.measured


@dataclass(frozen=True)
class LatencyTable:
    """Widths (n, L) to nanoseconds (n,): a :class:`bcnet.space.cost.Cost`.

    M layers have a table (M, G, G) over the channels in ``rows`` (M, G) and ``columns`` (M, G), which are
    linear forms (M, 1 + L) of the widths; ``traffic`` (1 + L,) counts the activations in between;
    ``weights`` (3,) price a pass, a nanosecond of layers, and an activation; the sum is raised to ``exponent``.
    """

    facts: dict[str, Any]
    layers: tuple[str, ...]
    row_forms: Floats
    column_forms: Floats
    rows: Floats
    columns: Floats
    table: Floats
    traffic: Floats
    weights: Floats
    networks: tuple[Measured, ...] = field(default=())
    exponent: float = 1.0

    def __call__(self, widths: ArrayLike) -> NDArray[np.int64]:
        parts = self.parts(np.atleast_2d(np.asarray(widths, dtype=np.float64)))
        return np.rint((parts @ self.weights) ** self.exponent).astype(np.int64)

    def parts(self, widths: Floats) -> Floats:
        """The three addends for widths (n, L): one, nanoseconds of layers, activations in between: (n, 3)."""
        ones = np.ones((len(widths), 1))
        given = np.hstack([ones, widths])
        layers = _bilinear(given @ self.row_forms.T, given @ self.column_forms.T, self.rows, self.columns, self.table)
        return np.column_stack([ones, layers.sum(axis=1), given @ self.traffic])

    def corrected(self, factor: float) -> LatencyTable:
        """The table with all its predictions times ``factor``."""
        return replace(self, weights=factor ** (1 / self.exponent) * self.weights)

    def aimed(self, taught: Sequence[Measured], unseen: Sequence[Measured]) -> LatencyTable:
        """The table bent so that it is right for ``taught`` networks, the full one and some near a budget.

        Layers that are fast alone may wait for each other or for memory in a network, so that half of the predicted
        latency may be two thirds of it when measured. ``measured = scale * predicted ** exponent`` holds between the
        full network and the budget; ``unseen`` ones say how far predictions are off there.
        """
        given = [m.widths for m in (*taught, *unseen)]
        x = np.log(self.parts(np.array(given, dtype=np.float64)) @ self.weights)  # before it was bent, if it was
        y = np.log([m.measured for m in taught])
        known = x[: len(taught)]
        bends = float(np.ptp(known)) > np.log(APART)
        slope = float(np.clip(np.polyfit(known, y, 1)[0], 1 / STEEPEST, STEEPEST)) if bends else 1.0
        scale = float(np.exp((y - slope * known).mean() / slope))
        bent = replace(self, weights=scale * self.weights, exponent=slope)
        told = zip((*taught, *unseen), bent(given).tolist(), strict=True)
        networks = [replace(m, predicted=float(ns), fitted=i < len(taught)) for i, (m, ns) in enumerate(told)]
        return replace(bent, networks=tuple(networks))

    @property
    def error(self) -> float:
        """The mean relative error on networks that the fit has not seen."""
        return float(np.mean([m.error for m in self.networks if not m.fitted]))

    def _fits_together(self) -> bool:
        """Whether every array is of its shape and finite, grids rise, and measurements are what a clock can show."""
        m, g, inputs = len(self.layers), self.rows.shape[-1:], self.traffic.shape
        shapes = {
            "row_forms": (m, *inputs),
            "column_forms": (m, *inputs),
            "rows": (m, *g),
            "columns": (m, *g),
            "table": (m, *g, *g),
            "traffic": inputs,
            "weights": (3,),
        }
        shaped = len(g) == len(inputs) == 1 and g[0] > 0 and inputs[0] > 1
        finite = all(getattr(self, n).shape == s and np.isfinite(getattr(self, n)).all() for n, s in shapes.items())
        measured = [value for n in self.networks for value in (n.predicted, n.measured)]
        return (
            shaped
            and finite
            and all((np.diff(grid, axis=1) >= 0).all() for grid in (self.rows, self.columns))
            and all((costs >= 0).all() for costs in (self.table, self.weights))
            and isinstance(self.facts, dict)
            and isinstance(self.exponent, float)
            and 1 / STEEPEST <= self.exponent <= STEEPEST
            and all(isinstance(layer, str) for layer in self.layers)
            and all(isinstance(n.fitted, bool) and len(n.widths) == inputs[0] - 1 for n in self.networks)
            and all(isinstance(value, (int, float)) and 0 < float(value) < np.inf for value in measured)
        )

    def to_json(self) -> str:
        data = asdict(self)
        plain = {k: v.tolist() if isinstance(v, np.ndarray) else v for k, v in data.items()}
        return json.dumps({"format": "bcnet.latency", "version": FORMAT_VERSION, **plain})

    @classmethod
    def from_json(cls, text: str) -> LatencyTable:
        """The inverse of :meth:`to_json`; a text of another format or version is an error."""
        try:
            data = json.loads(text)
            if data.pop("format") != "bcnet.latency" or data.pop("version") != FORMAT_VERSION:
                raise ValueError
            networks = tuple(Measured(**{**m, "widths": tuple(m["widths"])}) for m in data.pop("networks"))
            facts, layers, exponent = data.pop("facts"), tuple(data.pop("layers")), data.pop("exponent", 1.0)
            arrays = {name: np.array(values, dtype=np.float64) for name, values in data.items()}
            found = cls(facts, layers, networks=networks, exponent=exponent, **arrays)
            if not found._fits_together():
                raise ValueError
            return found
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
            raise BcnetError("this is no latency table of this version of bcnet: measure it again") from None


@dataclass(frozen=True)
class _Layer:
    """A layer of the graph; ``at(inputs, outputs)`` is its operation at these numbers of channels."""

    name: str
    inputs: Size
    outputs: Size
    at: Callable[[int, int], Operation]
    tied: bool


def measure_table(
    space: NetworkSpace, config: TimingConfig | None = None, told: Callable[[int, int], None] | None = None
) -> LatencyTable:
    """Measure the layers of a network, and whole networks, where its parameters are now.

    ``told(done, total)`` hears how far it is. The machine should do nothing else meanwhile.
    """
    config = config or TimingConfig()
    device = next(space.model.parameters()).device
    layers = _layers(space)
    with open_timer(config, device) as timer:
        grids = [(_grid(space, one.inputs), _grid(space, one.outputs)) for one in layers]
        total = TURNS * (len(layers) + FITTED + CHECKED)
        table = np.full((len(layers), GRID, GRID), np.inf)
        for turn in range(TURNS):
            known: dict[Operation, float] = {}
            for i, (layer, (rows, columns)) in enumerate(zip(layers, grids, strict=True)):
                table[i] = np.minimum(table[i], _measured(layer, rows, columns, timer, config.batch, known))
                _tell(told, turn * len(layers) + i + 1, total)
        empty = LatencyTable(
            facts=config.facts(device),
            layers=tuple(layer.name for layer in layers),
            row_forms=np.stack([_form(space, layer.inputs) for layer in layers]),
            column_forms=np.stack([_form(space, layer.outputs) for layer in layers]),
            rows=np.stack([rows for rows, _ in grids]),
            columns=np.stack([columns for _, columns in grids]),
            table=table,
            traffic=_traffic(space),
            weights=np.array([0.0, 1.0, 0.0]),
        )
        return _calibrated(empty, space, timer, config, lambda done: _tell(told, TURNS * len(layers) + done, total))


def _calibrated(
    table: LatencyTable, space: NetworkSpace, timer: Timer, config: TimingConfig, told: Callable[[int], None]
) -> LatencyTable:
    """The table with its weights fitted to whole networks: relative errors are squared, no weight is negative."""
    drawn = _spread(space, FITTED) + _spread(space, CHECKED + 2)[1:-1]
    times = _times(space, drawn, timer, config.batch, told)
    parts = table.parts(np.stack(drawn).astype(np.float64))
    weights = nnls(parts[:FITTED] / times[:FITTED, None], np.ones(FITTED))[0]
    networks = tuple(
        Measured(tuple(int(c) for c in widths), float(predicted), float(time), fitted=i < FITTED)
        for i, (widths, predicted, time) in enumerate(zip(drawn, parts @ weights, times, strict=True))
    )
    return replace(table, weights=weights, networks=networks)


def _spread(space: NetworkSpace, n: int) -> list[Widths]:
    """``n`` widths from the smallest to the largest network, at random around even steps between them."""
    rng = np.random.default_rng(n)
    top = np.array([len(v.candidates) - 1 for v in space.variables])
    steps = np.linspace(0, 1, n)[:, None]
    noise = rng.uniform(-0.3, 0.3, (n, len(top))) * (4 * steps * (1 - steps))
    return list(space.decode(np.clip((steps + noise) * top, 0, top).round().astype(np.int64)))


def _times(
    space: NetworkSpace, rows: Sequence[Widths], timer: Timer, batch: int, told: Callable[[int], None] = lambda _: None
) -> Floats:
    """The least time of each network in all turns, in nanoseconds (n,)."""
    inputs = tuple(x[:1].expand(batch, *x.shape[1:]).contiguous() for x in space.example)
    times = np.full(len(rows), np.inf)
    ready = [timer.network(space.build(row, weights_of=space.model), inputs) for row in rows]
    for done in range(TURNS * len(rows)):
        i = done % len(rows)
        times[i] = min(times[i], timer.time(ready[i]))
        told(done + 1)
    return times


def _layers(space: NetworkSpace) -> list[_Layer]:
    found = []
    for node in space.graph.graph.nodes:
        if node.op == "call_function" and isinstance(node.target, torch._ops.OpOverload):
            kind = node.target._schema.name
            if kind.startswith("aten::conv") or kind == "aten::linear":
                found.append(_layer(node, space))
    if not found:
        raise BcnetError("this network has no convolution and no linear layer, so there is nothing to measure")
    return found


def _layer(node: fx.Node, space: NetworkSpace) -> _Layer:
    target: Any = node.target
    args, sizes = bind(target, node.args, node.kwargs), space.coupling.sizes
    full = [v.count for v in space.coupling.variables]
    shape, weight = sizes[args["input"].name][0], sizes[args["weight"].name][0]
    name = space.graph.state_of.get(args["weight"].name, node.name).removesuffix(".weight")
    bias = args.get("bias") is not None
    if target._schema.name == "aten::linear":
        lead = tuple(s.at(full) for s in shape[1:-1])

        def linear(inputs: int, outputs: int) -> Operation:
            return Operation(inputs, outputs, 1, lead, (), (), (), (), False, bias)

        return _Layer(name, shape[-1], weight[0], linear, tied=False)
    kernel = tuple(s.at(full) for s in weight[2:])
    groups, transposed = int(args["groups"]), "transpose" in target._schema.name
    outputs_size = sizes[node.name][0][1]
    channels = shape[1].at(full) // groups

    def convolution(inputs: int, outputs: int) -> Operation:
        # Groups grow with the width where each keeps its channels (depthwise), and stay where those vary.
        now = groups if groups == 1 or weight[1].terms else max(inputs // channels, 1)
        inputs, outputs = max(inputs // now, 1) * now, max(round(outputs / now), 1) * now
        stride, padding, dilation = (_tuple(args[k], len(kernel)) for k in ("stride", "padding", "dilation"))
        lead = tuple(s.at(full) for s in shape[2:])
        return Operation(inputs, outputs, now, lead, kernel, stride, padding, dilation, transposed, bias)

    return _Layer(name, shape[1], outputs_size, convolution, tied=groups > 1)


def _tuple(value: Any, count: int) -> Any:
    if isinstance(value, str):
        return value
    given = tuple(int(v) for v in value) if isinstance(value, (list, tuple)) else (int(value),)
    return given * count if len(given) == 1 else given


def _measured(
    layer: _Layer, rows: Floats, columns: Floats, timer: Timer, batch: int, known: dict[Operation, float]
) -> Floats:
    """Nanoseconds over the grid, (G, G); operations met before are not timed again."""
    result = np.empty((GRID, GRID))
    for place in np.ndindex(GRID, GRID):
        inputs = float(rows[place[0]])
        outputs = inputs * float(columns[-1] / rows[-1]) if layer.tied else float(columns[place[1]])
        operation = layer.at(round(inputs), round(outputs))
        if operation not in known:
            known[operation] = max(timer.time(timer.layer(operation, batch)) - timer.overhead, 0.0)
        result[place] = known[operation]
    return result


def _grid(space: NetworkSpace, size: Size) -> Floats:
    """``GRID`` numbers of channels to measure at, ascending: candidates where one variable decides, else evenly
    spaced. Where there are fewer, the last is repeated."""
    low, high = (size.at(space.units(widths)) for widths in (space.min, space.max))
    if len(size.terms) == 1:
        ((variable, each),) = size.terms
        unit = space.variables[variable].unit
        values = np.array([size.constant + each * (c // unit) for c in space.variables[variable].candidates])
        chosen = values[np.linspace(0, len(values) - 1, min(GRID, len(values))).round().astype(int)]
    else:
        chosen = np.unique(np.linspace(low, high, GRID).round())
    return np.pad(chosen.astype(np.float64), (0, GRID - len(chosen)), mode="edge")


def _form(space: NetworkSpace, size: Size) -> Floats:
    """A size as a linear form of the widths, (1 + L,)."""
    form = np.zeros(1 + len(space))
    form[0] = size.constant
    for variable, each in size.terms:
        form[1 + variable] += each / space.variables[variable].unit
    return form


def _traffic(space: NetworkSpace) -> Floats:
    """Activations that operators between the layers write for one input, as a linear form of the widths (1 + L,).

    Where several variables span a tensor, all but the first are counted at full width.
    """
    full = [v.count for v in space.coupling.variables]
    form = np.zeros(1 + len(space))
    for node in space.graph.graph.nodes:
        if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
            continue
        schema = node.target._schema
        layer = schema.name.startswith("aten::conv") or schema.name == "aten::linear"
        view = any(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns)
        if layer or view or not space.coupling.sizes[node.name]:
            continue
        for key, k in product(space.coupling.sizes[node.name][0]).items():
            share = k / space.graph.batch * prod(full[v] for v in key[1:])
            form[1 + key[0] if key else 0] += share / (space.variables[key[0]].unit if key else 1)
    return form


def _bilinear(x: Floats, y: Floats, rows: Floats, columns: Floats, table: Floats) -> Floats:
    """The tables (M, G, G) over grids (M, G) at points x and y (n, M), held constant beyond their ends: (n, M)."""
    (i, u), (j, v) = _place(x, rows), _place(y, columns)
    m = np.arange(len(table))
    low = (1 - v) * table[m, i, j] + v * table[m, i, j + 1]
    high = (1 - v) * table[m, i + 1, j] + v * table[m, i + 1, j + 1]
    result: Floats = (1 - u) * low + u * high
    return result


def _place(x: Floats, grid: Floats) -> tuple[NDArray[np.int64], Floats]:
    """The cell of each point in its grid and the share of the way through it."""
    cell = (x[..., None] >= grid[:, 1:-1]).sum(axis=-1)
    m = np.arange(len(grid))
    start, end = grid[m, cell], grid[m, cell + 1]
    share = np.where(end > start, (x - start) / np.where(end > start, end - start, 1.0), 0.0)
    return cell, np.clip(share, 0.0, 1.0)


def _tell(told: Callable[[int, int], None] | None, done: int, total: int) -> None:
    if told is not None:
        told(done, total)
