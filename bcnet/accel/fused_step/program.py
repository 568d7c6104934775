"""The captured graph as a short list of layers that the fused engine knows how to run backwards.

Batch norm takes the addition and the activation that follow it along, so a residual block is convolutions
and norms only. Whatever else a graph holds runs as it is, under autograd (:class:`Eager`). Only where the network has
several inputs or outputs is there no program: :class:`Unsupported` says why, and the plain engine runs it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import fx

from bcnet.accel.kernels.values import NARROW
from bcnet.space.axis import Axis
from bcnet.space.coupling import bind
from bcnet.space.network import NetworkSpace
from bcnet.space.operators.table import find

ACTIVATIONS = {"relu": 1, "relu6": 2, "hardswish": 3, "silu": 4}
"""The number by which kernels know an activation; 0 is none."""


class Unsupported(Exception):
    """Why a network cannot run on the fused engine, in half a sentence."""


@dataclass(frozen=True)
class Conv:
    """A convolution without bias: dense (``pointwise`` where it is a matrix product) or depthwise."""

    x: int
    out: int
    weight: str
    kernel: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int]
    dilation: tuple[int, int]
    depthwise: bool
    outputs: int

    @cached_property
    def pointwise(self) -> bool:
        plain = self.kernel == self.stride == self.dilation == (1, 1) and self.padding == (0, 0)
        return plain and not self.depthwise

    @property
    def normalises(self) -> bool:
        """Whether its kernel can take the norm before it along."""
        return self.depthwise or (self.pointwise and self.outputs <= NARROW)


@dataclass(frozen=True)
class Norm:
    """Batch norm, then ``+ residual``, then ``act``; ``running`` names its mean and variance where it keeps any."""

    x: int
    out: int
    weight: str
    bias: str
    eps: float
    momentum: float
    running: tuple[str, str] | None
    act: int = 0
    residual: int | None = None


@dataclass(frozen=True)
class Pool:
    """Global average pooling, (n, c, h, w) to (n, c)."""

    x: int
    out: int


@dataclass(frozen=True)
class Linear:
    x: int
    out: int
    weight: str
    bias: str | None


@dataclass(frozen=True)
class Eager:
    """One operator of the graph as it is, with the values it takes by their nodes; ``why`` it has no kernel."""

    inputs: tuple[tuple[fx.Node, int], ...]
    out: int
    node: fx.Node
    why: str


Layer = Conv | Norm | Pool | Linear | Eager


def reads(layer: Layer) -> tuple[int, ...]:
    """The values that a layer takes."""
    if isinstance(layer, Eager):
        return tuple(number for _, number in layer.inputs)
    residual = layer.residual if isinstance(layer, Norm) else None
    return (layer.x,) if residual is None else (layer.x, residual)


@dataclass(frozen=True)
class Program:
    """``layers`` in order; values are numbers, ``source`` is the network's input and ``result`` its output.

    ``weights`` and ``affines`` name the parameters in the order of their use.
    """

    layers: tuple[Layer, ...]
    source: int
    result: int

    @cached_property
    def eager(self) -> tuple[Eager, ...]:
        """What runs under autograd."""
        return tuple(layer for layer in self.layers if isinstance(layer, Eager))

    @cached_property
    def weights(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(w.weight for w in self.layers if isinstance(w, (Conv, Linear))))

    @cached_property
    def depthwise(self) -> dict[str, Conv]:
        """Depthwise convolutions by their weights."""
        return {c.weight: c for c in self.layers if isinstance(c, Conv) and c.depthwise}

    @cached_property
    def folded(self) -> dict[int, Norm]:
        """Norms that only one convolution needs, by their values, which applies them as it reads."""
        readers: dict[int, list[Layer]] = {}
        for layer in self.layers:
            for value in reads(layer):
                readers.setdefault(value, []).append(layer)
        return {
            norm.out: norm
            for norm in self.layers
            if isinstance(norm, Norm) and norm.residual is None
            if len(found := readers.get(norm.out, [])) == 1 and isinstance(found[0], Conv) and found[0].normalises
        }

    @cached_property
    def ends(self) -> tuple[tuple[int, ...], ...]:
        """For each layer, the values that no later one needs."""
        last = {value: i for i, layer in enumerate(self.layers) for value in (*reads(layer), layer.out)}
        last.pop(self.result)
        return tuple(tuple(v for v, end in last.items() if end == i) for i in range(len(self.layers)))

    @cached_property
    def counted(self) -> frozenset[int]:
        """Values whose statistics the convolution that makes them takes along."""
        convolutions = [c for c in self.layers if isinstance(c, Conv) and c.x != self.source]
        return frozenset(c.out for c in convolutions if c.depthwise or c.pointwise)

    @cached_property
    def summed(self) -> frozenset[str]:
        """Weights whose gradients are added up by many programs, in float32."""
        convolutions = [c for c in self.layers if isinstance(c, Conv)]
        return frozenset(c.weight for c in convolutions if c.depthwise or c.x in self.folded)

    @cached_property
    def affines(self) -> tuple[str, ...]:
        norms = [name for n in self.layers if isinstance(n, Norm) for name in (n.weight, n.bias)]
        biases = [n.bias for n in self.layers if isinstance(n, Linear) and n.bias is not None]
        return tuple(dict.fromkeys(norms + biases))


def compile_program(space: NetworkSpace) -> Program:
    """The program of a network, or :class:`Unsupported`."""
    return _Compiler(space).compile()


class _Compiler:
    def __init__(self, space: NetworkSpace):
        self.space = space
        self.graph = space.graph
        self.numbers: dict[fx.Node, int] = {}
        self.folded: dict[fx.Node, Norm] = {}
        self.layers: list[Layer] = []

    def compile(self) -> Program:
        if len(self.graph.inputs) != 1:
            raise Unsupported(f"it takes {len(self.graph.inputs)} inputs")
        if self.graph.functions or self.graph.lost:
            raise Unsupported("it has gradients of its own")
        outputs: Any = ()
        for node in self.graph.graph.nodes:
            if node.op == "placeholder":
                if node.name in self.graph.inputs:
                    self.number(node)
            elif node.op == "output":
                outputs = node.args[0]
            else:
                try:
                    self.visit(node)
                except Unsupported as reason:
                    self.eager(node, str(reason))
        if len(outputs) != 1 or outputs[0] not in self.numbers or len(outputs[0].meta["val"].shape) != 2:
            raise Unsupported("its only output must be logits")
        return Program(tuple(self.layers), 0, self.numbers[outputs[0]])

    @property
    def last(self) -> Layer | None:
        return self.layers[-1] if self.layers else None

    def number(self, node: fx.Node) -> int:
        return self.numbers.setdefault(node, len(self.numbers))

    def eager(self, node: fx.Node, why: str) -> None:
        """The node as it is."""
        if isinstance(node.meta.get("val"), (list, tuple)):
            raise Unsupported(f"{node.name} gives several results")
        inputs = tuple((n, self.numbers[n]) for n in node.all_input_nodes if n in self.numbers)
        self.layers.append(Eager(inputs, self.number(node), node, why))

    def visit(self, node: fx.Node) -> None:
        target: Any = node.target
        if not isinstance(target, torch._ops.OpOverload):
            raise Unsupported(f"it calls {target}")
        entry = find(target)
        kind = entry.fuses if entry is not None else None
        args = bind(target, node.args, node.kwargs)
        if kind in ACTIVATIONS:
            self.activation(node, args["self"], ACTIVATIONS[kind])
        elif kind == "hardtanh":
            if (args["min_val"], args["max_val"]) != (0, 6):
                raise Unsupported("it has a hardtanh other than ReLU6")
            self.activation(node, args["self"], ACTIVATIONS["relu6"])
        elif kind in _VISITORS:
            _VISITORS[kind](self, node, args)
        elif kind == "dropout" and args["p"] == 0.0 and len(args["input"].users) == 1:
            self.numbers[node] = self.value(args["input"])
        else:
            raise Unsupported(f"it has a layer {target._schema.name.removeprefix('aten::')!r}")

    def value(self, node: Any) -> int:
        if node not in self.numbers:
            raise Unsupported(f"it uses {node} in a way that only batch norm's output could be used")
        return self.numbers[node]

    def parameter(self, node: Any) -> str:
        if not isinstance(node, fx.Node) or node.name not in self.graph.state_of:
            raise Unsupported("a layer's weight is computed, not a parameter")
        if len(node.users) > 1:
            raise Unsupported("a parameter is used more than once")
        self.check_axes(self.graph.state_of[node.name])
        return self.graph.state_of[node.name]

    def check_axes(self, name: str) -> None:
        axes: tuple[Axis, ...] = self.space.coupling.axes.get(name, ())
        if any(len(axis.segments) > 1 for axis in axes):
            raise Unsupported(f"the channels of {name} do not lie in one piece (a concatenation)")
        if any(axis.variables for axis in axes[2:]):
            raise Unsupported(f"a kernel size of {name} varies")

    def activation(self, node: fx.Node, x: fx.Node, act: int) -> None:
        """An activation belongs to the norm before it, where nobody else needs that norm's output."""
        norm = self.layers[-1] if self.layers else None
        if not isinstance(norm, Norm) or self.numbers.get(x) != norm.out or norm.act or len(x.users) > 1:
            raise Unsupported("it has an activation that does not follow a batch norm")
        self.numbers[node] = norm.out
        self.layers[-1] = replace(norm, act=act)

    def add(self, node: fx.Node, args: dict[str, Any]) -> None:
        """An addition belongs to the last norm, if one of its sides is that norm's output."""
        a, b = args["self"], args["other"]
        norm = self.layers[-1] if self.layers else None
        if args["alpha"] != 1 or not isinstance(norm, Norm) or norm.act or norm.residual is not None:
            raise Unsupported("it has an addition that does not follow a batch norm")
        main = a if self.numbers.get(a) == norm.out else b
        other = b if main is a else a
        if self.numbers.get(main) != norm.out or len(main.users) > 1 or main is other:
            raise Unsupported("it has an addition that does not follow a batch norm")
        residual = self.value(other)
        if residual == 0:
            raise Unsupported("it adds the input itself")
        self.numbers[node] = norm.out
        self.layers[-1] = replace(norm, residual=residual)

    def conv(self, node: fx.Node, args: dict[str, Any]) -> None:
        if args["bias"] is not None:
            raise Unsupported("it has a convolution with a bias")
        if isinstance(args["padding"], str):
            raise Unsupported("it has a convolution whose padding is a word")
        weight = self.parameter(args["weight"])
        outputs, per_group, *kernel = args["weight"].meta["val"].shape
        groups = args["groups"]
        if groups != 1 and not (per_group == 1 and groups == outputs):
            raise Unsupported("it has a grouped convolution")
        stride, padding, dilation = ((a * 2)[:2] if len(a) == 1 else a for a in _lists(args))
        if groups != 1 and (tuple(dilation) != (1, 1) or len({*kernel, *()}) != 1 or stride[0] != stride[1]):
            raise Unsupported("it has a depthwise convolution that is dilated or not square")
        x = self.value(args["input"])
        if x == 0 and groups != 1:
            raise Unsupported("its first layer is depthwise")
        self.layers.append(
            Conv(
                x,
                self.number(node),
                weight,
                (kernel[0], kernel[1]),
                (stride[0], stride[1]),
                (padding[0], padding[1]),
                (dilation[0], dilation[1]),
                groups != 1,
                outputs,
            )
        )

    def norm(self, node: fx.Node, args: dict[str, Any]) -> None:
        if args["weight"] is None or args["bias"] is None:
            raise Unsupported("it has a batch norm without weight and bias")
        before = self.layers[-1] if self.layers else None
        x = self.value(args["input"])
        rank = len(args["input"].meta["val"].shape)
        if not isinstance(before, (Conv, Eager)) or before.out != x or len(args["input"].users) > 1 or rank != 4:
            raise Unsupported("it has a batch norm that does not follow a convolution")
        weight, bias = self.parameter(args["weight"]), self.parameter(args["bias"])
        nodes = args["running_mean"], args["running_var"]
        mean, variance = (None if n is None else self.graph.state_of[n.name] for n in nodes)
        running = None if mean is None or variance is None else (mean, variance)
        self.layers.append(
            Norm(x, self.number(node), weight, bias, float(args["eps"]), float(args["momentum"]), running)
        )

    def pool(self, node: fx.Node, args: dict[str, Any]) -> None:
        size = args.get("output_size", [1, 1])
        dims = {d % 4 for d in args.get("dim", [2, 3])}
        if list(size) not in ([1, 1], [1]) or dims != {2, 3}:
            raise Unsupported("it has a pooling that is not global")
        before = args["input" if "input" in args else "self"]
        if self.value(before) == 0 or len(before.meta["val"].shape) != 4:
            raise Unsupported("it pools the input itself")
        self.layers.append(Pool(self.value(before), self.number(node)))

    def flat(self, node: fx.Node, args: dict[str, Any]) -> None:
        """Reshaping is nothing once a value is (n, c)."""
        number = self.value(args["self"])
        if not isinstance(self.last, Pool) or self.last.out != number or len(node.meta["val"].shape) != 2:
            raise Unsupported("it reshapes before global pooling")
        self.numbers[node] = number

    def linear(self, node: fx.Node, args: dict[str, Any]) -> None:
        x = self.value(args["input"])
        if not isinstance(self.last, Pool) or self.last.out != x:
            raise Unsupported("it has a linear layer that does not follow global pooling")
        if any(user.op != "output" for user in node.users):
            raise Unsupported("it has a linear layer that is not the last")
        bias = None if args["bias"] is None else self.parameter(args["bias"])
        self.layers.append(Linear(x, self.number(node), self.parameter(args["weight"]), bias))


def _lists(args: dict[str, Any]) -> list[list[int]]:
    return [list(args[name]) for name in ("stride", "padding", "dilation")]


_VISITORS: dict[str | None, Any] = {
    "conv": _Compiler.conv,
    "norm": _Compiler.norm,
    "add": _Compiler.add,
    "pool": _Compiler.pool,
    "flat": _Compiler.flat,
    "linear": _Compiler.linear,
}
"""By the column ``fuses`` of the table of operators."""
