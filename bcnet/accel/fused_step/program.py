"""The captured graph as a short list of layers that the fused engine knows how to run backwards.

Batch norm includes the addition and the activation that follow it, so a residual block consists of convolutions and
norms only. All other operators run as they are, under autograd (:class:`Eager`). Only a network with several inputs or
outputs has no program: :class:`Unsupported` says why, and the plain engine runs it.
"""

from __future__ import annotations

from collections.abc import Callable
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
    """A convolution without bias: dense (``product`` where it is a matrix product, 1x1 without stride) or depthwise."""

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
    def product(self) -> bool:
        plain = self.kernel == self.stride == self.dilation == (1, 1) and self.padding == (0, 0)
        return plain and not self.depthwise

    @property
    def normalises(self) -> bool:
        """Whether its kernel can apply the norm before it."""
        return self.depthwise or (self.product and self.outputs <= NARROW)


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
    """One operator of the graph as it is, with the values it takes by their nodes."""

    inputs: tuple[tuple[fx.Node, int], ...]
    out: int
    node: fx.Node


Layer = Conv | Norm | Pool | Linear | Eager


def reads(layer: Layer) -> tuple[int, ...]:
    """The values that a layer takes."""
    if isinstance(layer, Eager):
        return tuple(number for _, number in layer.inputs)
    residual = layer.residual if isinstance(layer, Norm) else None
    return (layer.x,) if residual is None else (layer.x, residual)


@dataclass(frozen=True)
class Program:
    """``layers`` in order; values are numbers, ``input`` is the network's input and ``result`` its output.

    ``weights`` and ``affines`` name the parameters in the order of their use.
    """

    layers: tuple[Layer, ...]
    input: int
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
        """Norms that a single convolution reads and applies while reading, by their values."""
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
        """Values whose statistics the convolution that makes them computes as well."""
        convolutions = [c for c in self.layers if isinstance(c, Conv) and c.x != self.input]
        return frozenset(c.out for c in convolutions if c.depthwise or c.product)

    @cached_property
    def summed(self) -> frozenset[str]:
        """Weights whose gradients many programs of a kernel add up, in float32."""
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
    """Goes through the graph node by node. What has a kernel becomes a layer, or joins the norm before it; the methods
    named after layers say whether a node could. All others stay as they are."""

    def __init__(self, space: NetworkSpace):
        self.space = space
        self.graph = space.graph
        self.numbers: dict[fx.Node, int] = {}
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
            elif not self.fuses(node):
                self.eager(node)
        if len(outputs) != 1 or outputs[0] not in self.numbers or len(outputs[0].meta["val"].shape) != 2:
            raise Unsupported("its only output must be logits")
        return Program(tuple(self.layers), 0, self.numbers[outputs[0]])

    @property
    def last(self) -> Layer | None:
        return self.layers[-1] if self.layers else None

    def number(self, node: fx.Node) -> int:
        return self.numbers.setdefault(node, len(self.numbers))

    def eager(self, node: fx.Node) -> None:
        """The node as it is."""
        if isinstance(node.meta.get("val"), (list, tuple)):
            raise Unsupported(f"{node.name} gives several results")
        inputs = tuple((n, self.numbers[n]) for n in node.all_input_nodes if n in self.numbers)
        self.layers.append(Eager(inputs, self.number(node), node))

    def fuses(self, node: fx.Node) -> bool:
        """Whether the node became a layer, or part of one."""
        target: Any = node.target
        entry = find(target) if isinstance(target, torch._ops.OpOverload) else None
        if entry is None or entry.fuses is None:
            return False
        kind, args = entry.fuses, bind(target, node.args, node.kwargs)
        if kind == "hardtanh" and (args["min_val"], args["max_val"]) == (0, 6):
            kind = "relu6"
        if kind in ACTIVATIONS:
            return self.activation(node, args["self"], ACTIVATIONS[kind])
        return kind in _VISITORS and bool(_VISITORS[kind](self, node, args))

    def is_parameter(self, node: Any) -> bool:
        """Whether a kernel can read it: a parameter that is used once, whose channels lie in one piece (not those of a
        concatenation), and whose kernel size does not vary."""
        if not isinstance(node, fx.Node) or node.name not in self.graph.state_of or len(node.users) > 1:
            return False
        axes: tuple[Axis, ...] = self.space.coupling.axes.get(self.name(node), ())
        return all(len(axis.segments) == 1 for axis in axes) and not any(axis.variables for axis in axes[2:])

    def name(self, node: fx.Node) -> str:
        return self.graph.state_of[node.name]

    def ends_in_norm(self, node: Any) -> bool:
        """Whether a node is what the last layer, a norm, gives, and nobody else needs it."""
        norm = self.last
        is_last = isinstance(norm, Norm) and not norm.act and self.numbers.get(node) == norm.out
        return is_last and len(node.users) == 1

    def join(self, node: fx.Node, **change: int) -> bool:
        """Make a node part of the last norm."""
        norm = self.last
        assert isinstance(norm, Norm)
        self.numbers[node] = norm.out
        self.layers[-1] = replace(norm, **change)  # type: ignore[arg-type]
        return True

    def activation(self, node: fx.Node, x: fx.Node, act: int) -> bool:
        return self.ends_in_norm(x) and self.join(node, act=act)

    def add(self, node: fx.Node, args: dict[str, Any]) -> bool:
        """An addition belongs to the last norm, if one of its sides is that norm's output."""
        a, b = args["self"], args["other"]
        main, other = (a, b) if self.ends_in_norm(a) else (b, a)
        if args["alpha"] != 1 or main is other or not self.ends_in_norm(main):
            return False
        taken = isinstance(self.last, Norm) and self.last.residual is not None
        residual = self.numbers.get(other, 0)  # 0 is the network's input
        return residual != 0 and not taken and self.join(node, residual=residual)

    def conv(self, node: fx.Node, args: dict[str, Any]) -> bool:
        if args["bias"] is not None or isinstance(args["padding"], str) or not self.is_parameter(args["weight"]):
            return False
        outputs, per_group, *kernel = args["weight"].meta["val"].shape
        groups, x = args["groups"], self.numbers.get(args["input"])
        form = (tuple(args[name]) for name in ("stride", "padding", "dilation"))
        stride, padding, dilation = ((a * 2)[:2] if len(a) == 1 else a for a in form)
        square = len(set(kernel)) == 1 and stride[0] == stride[1] and dilation == (1, 1)
        depthwise = groups != 1 and per_group == 1 and groups == outputs and square and x != 0
        if x is None or (groups != 1 and not depthwise):
            return False
        weight, size = self.name(args["weight"]), (kernel[0], kernel[1])
        layer = Conv(x, self.number(node), weight, size, stride, padding, dilation, depthwise, outputs)
        self.layers.append(layer)
        return True

    def norm(self, node: fx.Node, args: dict[str, Any]) -> bool:
        """Batch norm of what a convolution, or an operator without kernel, has just made and nobody else needs."""
        source, weight, bias = args["input"], args["weight"], args["bias"]
        follows = isinstance(self.last, (Conv, Eager)) and self.numbers.get(source) == self.last.out
        if not follows or len(source.users) > 1 or len(source.meta["val"].shape) != 4:
            return False
        if not self.is_parameter(weight) or not self.is_parameter(bias):
            return False
        nodes = args["running_mean"], args["running_var"]
        running = None if None in nodes else (self.name(nodes[0]), self.name(nodes[1]))
        x, eps, momentum = self.numbers[source], float(args["eps"]), float(args["momentum"])
        self.layers.append(Norm(x, self.number(node), self.name(weight), self.name(bias), eps, momentum, running))
        return True

    def pool(self, node: fx.Node, args: dict[str, Any]) -> bool:
        size = args.get("output_size", [1, 1])
        dims = {d % 4 for d in args.get("dim", [2, 3])}
        before = args["input" if "input" in args else "self"]
        x = self.numbers.get(before, 0)
        if list(size) not in ([1, 1], [1]) or dims != {2, 3} or not x or len(before.meta["val"].shape) != 4:
            return False
        self.layers.append(Pool(x, self.number(node)))
        return True

    def flat(self, node: fx.Node, args: dict[str, Any]) -> bool:
        """Reshaping is nothing once a value is (n, c)."""
        x = self.numbers.get(args["self"])
        if not isinstance(self.last, Pool) or self.last.out != x or len(node.meta["val"].shape) != 2:
            return False
        self.numbers[node] = x
        return True

    def dropout(self, node: fx.Node, args: dict[str, Any]) -> bool:
        """Dropout of nothing is nothing."""
        x = args["input"]
        if args["p"] != 0.0 or len(x.users) > 1 or x not in self.numbers:
            return False
        self.numbers[node] = self.numbers[x]
        return True

    def linear(self, node: fx.Node, args: dict[str, Any]) -> bool:
        """The last layer, after global pooling."""
        weight, bias = args["weight"], args["bias"]
        follows = isinstance(self.last, Pool) and self.numbers.get(args["input"]) == self.last.out
        if not follows or any(user.op != "output" for user in node.users):
            return False
        if not self.is_parameter(weight) or not (bias is None or self.is_parameter(bias)):
            return False
        x, name = self.numbers[args["input"]], None if bias is None else self.name(bias)
        self.layers.append(Linear(x, self.number(node), self.name(weight), name))
        return True


_VISITORS: dict[str, Callable[[_Compiler, fx.Node, dict[str, Any]], bool]] = {
    "conv": _Compiler.conv,
    "norm": _Compiler.norm,
    "add": _Compiler.add,
    "pool": _Compiler.pool,
    "flat": _Compiler.flat,
    "dropout": _Compiler.dropout,
    "linear": _Compiler.linear,
}
"""By the column ``fuses`` of the table of operators."""
