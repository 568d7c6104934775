"""A slim network whose layers make up for dropped channels by least squares, without a step of training.

A layer of the given network reads channels ``x`` and computes ``W x``. In the slim one it sees only ``z``, the channels
that stay, and those are no longer what they were, since layers before it lost channels too. ``x`` is predicted from
``z``, ``x ~ M z + b``, and the layer goes on with ``W M``; ``W b`` goes into its bias, if it has one (otherwise the
norm that follows takes it up). Layers are adjusted in the order in which they run, each with those before it adjusted:
both networks are run side by side over some images, operator by operator, so that all this takes one pass. Batch norm
takes the statistics of these images on the way.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch
from numpy.typing import ArrayLike
from torch import Tensor, fx, nn

from bcnet.space.importance import Keep, Kept, kept_units
from bcnet.space.network import NetworkSpace
from bcnet.space.operators.table import bind, name_of

RIDGE = 1e-2
"""Of the mean variance of the channels that stay: draws ``M`` to the plain cut where they say the same."""
POSITIONS = 2**14
"""Of images and their pixels, from which a layer's ``M`` is taken, at most."""
ROOM = 2**30
"""Bytes of activations that the images may take, in each of the two networks."""
READERS = ("aten::conv1d", "aten::conv2d", "aten::conv3d", "aten::linear")


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
    chosen = space.check(widths)
    kept = kept_units(space, space.units(chosen), keep, network)
    slim = space.build(chosen, weights_of=network, keep=kept)
    images = _some(space, batches)
    if not images:
        return slim
    full, cut = space.from_graph(space.max, network), space.from_graph(chosen, network, kept)
    _SideBySide(space, full, cut, kept).run(images)
    with torch.no_grad():
        adjusted = {**dict(cut.named_parameters()), **dict(cut.named_buffers())}
        for name, tensor in [*slim.named_parameters(), *slim.named_buffers()]:
            if name in adjusted:
                tensor.copy_(adjusted[name])
    return slim


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
    """One batch on its way through a network, operator by operator; what is not needed any more is let go."""

    def __init__(self, network: fx.GraphModule, x: Tensor):
        super().__init__(network)
        self.env: dict[fx.Node, Any] = {}
        self.args_iter = iter((x,))

    def advance(self, node: fx.Node) -> None:
        self.env[node] = self.run_node(node)
        for done in self.user_to_last_uses.get(node, ()):
            del self.env[done]


class _SideBySide:
    """The given network and the slim one, which is adjusted on the way."""

    def __init__(self, space: NetworkSpace, full: fx.GraphModule, slim: fx.GraphModule, kept: Kept):
        self.space, self.full, self.slim, self.kept = space, full, slim, kept
        self.device = next(slim.parameters()).device
        self.total = [v.count for v in space.coupling.variables]
        self.uses = Counter(str(n.target) for n in slim.graph.nodes if n.op == "get_attr" for _ in n.users)

    @torch.no_grad()
    def run(self, images: list[Tensor]) -> None:
        given, cut = ([_Lane(network, x.to(self.device)) for x in images] for network in (self.full, self.slim))
        for node, same in zip(self.full.graph.nodes, self.slim.graph.nodes, strict=True):
            if same.op == "call_function":
                if name_of(same.target) in READERS:
                    self._adjust(node, same, given, cut)
                elif name_of(same.target) == "aten::batch_norm":
                    _take_statistics(same, cut)
            for lane, lane_of_slim in zip(given, cut, strict=True):
                lane.advance(node)
                lane_of_slim.advance(same)

    def _adjust(self, node: fx.Node, same: fx.Node, given: list[_Lane], cut: list[_Lane]) -> None:
        """Set the slim layer's weights so that it computes what the full one does, as far as its inputs tell."""
        args, own = bind(node.target, node.args, node.kwargs), bind(same.target, same.args, same.kwargs)
        name = str(own["weight"].target) if isinstance(own["weight"], fx.Node) else ""
        axes = self.space.coupling.axes.get(name)
        if axes is None or own["weight"].op != "get_attr" or own.get("groups", 1) != 1 or self.uses[name] > 1:
            return
        last = name_of(same.target) == "aten::linear"
        x, z = (_positions([lane.env[a["input"]] for lane in lanes], last) for a, lanes in ((args, given), (own, cut)))
        if x.shape == z.shape and torch.equal(x, z):
            return
        outputs = torch.from_numpy(axes[0].indices(self.kept, self.total)).to(self.device)
        stay = torch.from_numpy(axes[1].indices(self.kept, self.total)).to(self.device)
        m, b = _predict(x, z, stay)
        weight: Tensor = given[0].env[args["weight"]][outputs].double()
        cut[0].env[own["weight"]].copy_(torch.einsum("oc...,ck->ok...", weight, m))
        if isinstance(own["bias"], fx.Node) and self.uses[str(own["bias"].target)] == 1:
            # A convolution reads zeros beyond the border, where this is a little too much.
            constant = (weight.flatten(2).sum(2) if weight.dim() > 2 else weight) @ b
            cut[0].env[own["bias"]].copy_(given[0].env[args["bias"]][outputs] + constant)


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
    m = torch.linalg.solve(among, (across + ridge * plain).T).T
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
