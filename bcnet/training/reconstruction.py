"""A slim network whose layers make up for dropped channels by least squares, without a step of training.

A layer of the given network reads channels ``x`` and computes ``W x``. In the slim one it sees only ``z``, the channels
that stay, and those are no longer what they were, since layers before it lost channels too. ``x`` is predicted from
``z``, ``x ~ M z + b``, and the layer goes on with ``W M``; ``W b`` goes into its bias, if it has one (otherwise the
norm that follows takes it up). Layers are adjusted in the order in which they run, each with those before it adjusted:
both networks are run over some images, operator by operator, so that all this takes one pass. Batch norm takes the
statistics of these images on the way.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from numpy.typing import ArrayLike
from torch import Tensor, fx, nn
from torch.nn import functional

from bcnet.space.importance import Keep, KeptUnits, kept_units
from bcnet.space.network import NetworkSpace
from bcnet.space.operators.table import bind, name_of

RIDGE = 1e-2
"""The ridge, as a share of the mean variance of the channels that stay: it draws ``M`` to the plain cut where these
channels say the same."""
POSITIONS = 2**14
"""The most positions, pixels of any image, that a layer's ``M`` is fitted to."""
ROOM = 2**30
"""Bytes that the activations of the images may take in each network, and what layers of the full one read."""
AT_FULL_SIZE = ("cuda",)
"""Devices on which convolutions of slim networks run among zeros, as large as in the full network: their libraries look
for a kernel whenever a shape is new, which takes far longer than the convolution."""
CONVOLUTIONS = ("aten::conv1d", "aten::conv2d", "aten::conv3d")
READERS = (*CONVOLUTIONS, "aten::linear")


def inherited(
    space: NetworkSpace,
    network: nn.Module,
    widths: ArrayLike,
    keep: Keep,
    batches: Iterable[tuple[Tensor, Any]] = (),
) -> nn.Module:
    """The network at ``widths`` (L,) with the channels of ``network`` that ``keep`` says; its layers make up for the
    others by what ``batches`` of ``(x, y)`` tell, where there are any.

    Convolutions without groups and linear layers are adjusted, where their weights are used once.
    """
    return Inheritance(space, network, batches)(widths, keep)


class Inheritance:
    """:func:`inherited` for many widths: ``network`` is run over ``batches`` once, where what its layers read fits into
    :data:`ROOM`."""

    def __init__(self, space: NetworkSpace, network: nn.Module, batches: Iterable[tuple[Tensor, Any]] = ()):
        self.space, self.network = space, network
        self._images = _some(space, batches)
        self._kept: list[_Reading] | None = None
        self._fits = True
        self._convolutions: dict[str, _Wide] | None = None

    @torch.no_grad()
    def __call__(self, widths: ArrayLike, keep: Keep) -> nn.Module:
        """The network at ``widths`` (L,), on the device where the space builds; both are run where the images are."""
        chosen = self.space.check(widths)
        kept = kept_units(self.space, self.space.units(chosen), keep, self.network)
        slim = self.space.build(chosen, weights_of=self.network, keep=kept)
        if not self._images:
            return slim
        cut = self.space.from_graph(chosen, self.network, kept).to(self._images[0].device)
        _Adjustment(self.space, cut, kept, self._wide()).run(self._images, self._readings())
        adjusted = {**dict(cut.named_parameters()), **dict(cut.named_buffers())}
        for name, tensor in [*slim.named_parameters(), *slim.named_buffers()]:
            if name in adjusted:
                tensor.copy_(adjusted[name])
        return slim

    def _wide(self) -> dict[str, _Wide]:
        """The convolutions that are to run at full size."""
        if self._convolutions is None:
            there = self._images[0].device.type in AT_FULL_SIZE
            self._convolutions = _convolutions(self.space.from_graph(self.space.max, self.network)) if there else {}
        return self._convolutions

    def _readings(self) -> Iterable[_Reading]:
        """What the layers of the given network read, in order."""
        if self._kept is None and self._fits:
            found, size = [], 0
            for reading in self._read():
                found.append(reading)
                size += reading.x.nbytes
                self._fits = size <= ROOM
                if not self._fits:
                    break
            self._kept = found if self._fits else None
        return self._read() if self._kept is None else self._kept

    def _read(self) -> Iterator[_Reading]:
        full = self.space.from_graph(self.space.max, self.network).to(self._images[0].device)
        lanes = [_Lane(full, x) for x in self._images]
        for number, node in enumerate(full.graph.nodes):
            last = _reads_last(node)
            args = {} if last is None else bind(node.target, node.args, node.kwargs)
            if last is not None and args.get("groups", 1) == 1:
                env = lanes[0].env
                x = _positions([lane.env[args["input"]] for lane in lanes], last)
                yield _Reading(number, x, env[args["weight"]], env.get(args["bias"]))
            for lane in lanes:
                lane.advance(node)


class _Reading(NamedTuple):
    """What the layer of a node reads at some positions, (n, C), and its weight and bias."""

    number: int
    x: Tensor
    weight: Tensor
    bias: Tensor | None


def _reads_last(node: fx.Node) -> bool | None:
    """Whether a layer reads its last dimension (linear) or its second; None where it is no such layer."""
    name = name_of(node.target) if node.op == "call_function" else ""
    return name == "aten::linear" if name in READERS else None


def _some(space: NetworkSpace, batches: Iterable[tuple[Tensor, Any]]) -> list[Tensor]:
    """As many images as there is room for, in batches that the graph takes."""
    left = max(16, int(ROOM // max(1, int(space.costs["memory"](space.max)[0]))))
    found: list[Tensor] = []
    for x, _ in batches:
        rows = x[:left]
        left -= len(rows)
        found += [rows] if space.graph.dynamic else list(rows.split(space.graph.batch))
        if left <= 0:
            break
    return [x for x in found if space.graph.dynamic or len(x) == space.graph.batch]


class _Lane(fx.Interpreter):
    """One batch on its way through a network, operator by operator; values are freed after their last use.

    Convolutions whose nodes ``wide`` names are computed at the size that it says."""

    def __init__(self, network: fx.GraphModule, x: Tensor, wide: Mapping[str, _Wide] | None = None):
        super().__init__(network)
        self.env: dict[fx.Node, Any] = {}
        self.args_iter = iter((x,))
        self.wide = wide or {}

    def advance(self, node: fx.Node) -> None:
        self.env[node] = self.run_node(node)
        for done in self.user_to_last_uses.get(node, ()):
            del self.env[done]

    def run_node(self, n: fx.Node) -> Any:
        if n.name not in self.wide:
            return super().run_node(n)
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        return _among_zeros(n.target, bind(n.target, args, kwargs), self.wide[n.name])


class _Wide(NamedTuple):
    """A convolution of the full network: the shape of its weight, and whether each channel is a group."""

    shape: torch.Size
    depthwise: bool


def _convolutions(full: fx.GraphModule) -> dict[str, _Wide]:
    """Those without groups, and those with a group for each channel, by their nodes."""
    state, found = dict(full.named_parameters()), {}
    for node in full.graph.nodes:
        if node.op == "call_function" and name_of(node.target) in CONVOLUTIONS:
            args = bind(node.target, node.args, node.kwargs)
            weight, groups = state.get(str(args["weight"].target)), args["groups"]
            if weight is not None and (groups == 1 or (groups == len(weight) and weight.shape[1] == 1)):
                found[node.name] = _Wide(weight.shape, groups > 1)
    return found


def _among_zeros(convolve: Any, args: dict[str, Any], wide: _Wide) -> Tensor:
    """A convolution as wide as the full network's: channels of zeros are added to its weight, bias and input."""
    x, weight, bias, out = args["input"], args["weight"], args["bias"], wide.shape[0]
    filled = weight.new_zeros(wide.shape)
    filled[: weight.shape[0], : weight.shape[1]] = weight
    inputs = out if wide.depthwise else wide.shape[1]
    more = {
        "input": functional.pad(x, (0, 0) * (x.dim() - 2) + (0, inputs - x.shape[1])),
        "weight": filled,
        "bias": None if bias is None else functional.pad(bias, (0, out - len(bias))),
        "groups": out if wide.depthwise else 1,
    }
    found: Tensor = convolve(**args | more)
    return found[:, : len(weight)]


class _Adjustment:
    """The slim network, adjusted layer by layer as it runs."""

    def __init__(self, space: NetworkSpace, slim: fx.GraphModule, kept: KeptUnits, wide: Mapping[str, _Wide]):
        self.space, self.slim, self.kept, self.wide = space, slim, kept, wide
        self.device = next(slim.parameters()).device
        self.total = [v.count for v in space.coupling.variables]
        self.uses = Counter(str(n.target) for n in slim.graph.nodes if n.op == "get_attr" for _ in n.users)

    def run(self, images: list[Tensor], readings: Iterable[_Reading]) -> None:
        lanes = [_Lane(self.slim, x, self.wide) for x in images]
        waiting = iter(readings)
        reading = next(waiting, None)
        for number, node in enumerate(self.slim.graph.nodes):
            if reading is not None and reading.number == number:
                self._adjust(node, reading, lanes)
                reading = next(waiting, None)
            elif node.op == "call_function" and name_of(node.target) == "aten::batch_norm":
                _take_statistics(node, lanes)
            for lane in lanes:
                lane.advance(node)

    def _adjust(self, node: fx.Node, reading: _Reading, lanes: list[_Lane]) -> None:
        """Set the slim layer's weights so that it computes what the full one does, as far as its inputs tell."""
        own, env = bind(node.target, node.args, node.kwargs), lanes[0].env
        name = str(own["weight"].target) if isinstance(own["weight"], fx.Node) else ""
        axes = self.space.coupling.axes.get(name)
        if axes is None or own["weight"].op != "get_attr" or self.uses[name] > 1:
            return
        x, z = reading.x, _positions([lane.env[own["input"]] for lane in lanes], bool(_reads_last(node)))
        if x.shape == z.shape and torch.equal(x, z):
            return
        outputs = torch.from_numpy(axes[0].indices(self.kept, self.total)).to(self.device)
        stay = torch.from_numpy(axes[1].indices(self.kept, self.total)).to(self.device)
        m, b = _predict(x, z, stay)
        weight: Tensor = reading.weight[outputs].double()
        env[own["weight"]].copy_(torch.einsum("oc...,ck->ok...", weight, m))
        if reading.bias is not None and self.uses[str(own["bias"].target)] == 1:
            # A convolution reads zeros beyond the border, where this is a little too much.
            constant = (weight.flatten(2).sum(2) if weight.dim() > 2 else weight) @ b
            env[own["bias"]].copy_(reading.bias[outputs] + constant)


def _positions(values: list[Tensor], last: bool) -> Tensor:
    """What a layer reads, a row for each position (n, C); the channels are the last dimension, or the second."""
    rows = [(x if last else x.movedim(1, -1)).reshape(-1, x.shape[-1 if last else 1]) for x in values]
    total = sum(map(len, rows))
    if total <= POSITIONS:
        return torch.cat(rows)
    # Drawn, as positions at equal distances may all lie in one column of the images.
    drawn = torch.randint(total, (POSITIONS,), generator=torch.Generator().manual_seed(0))
    return torch.cat(rows)[drawn.to(rows[0].device)]


def _predict(x: Tensor, z: Tensor, stay: Tensor) -> tuple[Tensor, Tensor]:
    """``M`` (C, K) and ``b`` (C,) of the least squares ``x ~ M z + b`` for positions (n, C) and (n, K); the channels
    ``stay`` (K,) of ``x`` are those of ``z`` by name."""
    mean_x, mean_z = x.mean(0, dtype=torch.float64), z.mean(0, dtype=torch.float64)
    away_x, away_z = x - mean_x.to(x.dtype), z - mean_z.to(z.dtype)
    among = (away_z.T @ away_z).double() / len(z)
    across = (away_x.T @ away_z).double() / len(z)
    ridge = RIDGE * among.diagonal().mean().clamp_min(torch.finfo(torch.float32).tiny)
    plain = torch.zeros_like(across)
    plain[stay, torch.arange(len(stay), device=x.device)] = 1
    among.diagonal().add_(ridge)
    m = torch.cholesky_solve((across + ridge * plain).T, torch.linalg.cholesky(among)).T
    return m, mean_x - m @ mean_z


def _take_statistics(node: fx.Node, lanes: list[_Lane]) -> None:
    """Batch norm's mean and variance over all lanes."""
    args, env = bind(node.target, node.args, node.kwargs), lanes[0].env
    if args["running_mean"] is None or args["running_var"] is None:
        return
    values = [lane.env[args["input"]] for lane in lanes]
    rows = torch.cat([x.movedim(1, -1).reshape(-1, x.shape[1]) for x in values])
    variance, mean = torch.var_mean(rows, 0)
    if bool(variance.isfinite().all()):
        env[args["running_mean"]].copy_(mean)
        env[args["running_var"]].copy_(variance)
