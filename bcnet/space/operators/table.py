"""The table of operators: what bcnet knows about each, with a column for each question it asks.

``couple`` says how channels pass through an operator, ``sizes`` which of its constants are sizes that change
with the widths, ``macs`` its multiply-accumulates, ``shares`` how configurations share its work
(:mod:`bcnet.accel.enumeration.prefix_tree`), ``fuses`` which layer of the fused training step it is
(:mod:`bcnet.accel.fused_step.program`). A new operator is one entry.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import torch
from torch import fx

from bcnet.space.axis import Size
from bcnet.space.labels import Value
from bcnet.space.operators.base import Call

if TYPE_CHECKING:
    from bcnet.space.coupling import Coupling

CouplingRule = Callable[[Call], "Value | list[Value]"]
C = TypeVar("C", bound=CouplingRule)
Hole = tuple[str, int | None, int, Size]


@dataclass(frozen=True)
class Site:
    """One call of an operator with the sizes of its tensors, as the columns ``sizes`` and ``macs`` see it."""

    node: fx.Node
    coupling: Coupling

    @property
    def args(self) -> dict[str, Any]:
        """Arguments by the names of the schema; tensors are nodes of the graph."""
        return bind(self.node.target, self.node.args, self.node.kwargs)

    @property
    def outs(self) -> tuple[tuple[Size, ...], ...]:
        """The sizes of every output tensor."""
        return self.coupling.sizes[self.node.name]

    @property
    def out(self) -> tuple[Size, ...]:
        """The sizes of the (first) output tensor."""
        return self.outs[0]

    def of(self, what: str | fx.Node) -> tuple[Size, ...]:
        """The sizes of a tensor, given as an argument's name or as a node."""
        node = self.args[what] if isinstance(what, str) else what
        return self.coupling.sizes[node.name][0]

    def full(self, size: Size) -> int:
        """A size in the captured network."""
        return size.at(self.coupling.counts)

    def before(self, what: fx.Node, axis: int, position: int) -> Size:
        """How many channels of an axis lie before a position of the captured network."""
        prefix = self.coupling.prefixes.get(what.name)
        return Size(position) if prefix is None else prefix(axis, position)


SizeRule = Callable[[Site], Iterable[Hole]]
MacRule = Callable[[Site], Iterable[Iterable[Size]]]
Sharing = Literal["sums", "channels", "elements", "joins"]
Fuses = Literal[
    "conv", "linear", "norm", "pool", "flat", "add", "dropout", "relu", "relu6", "hardtanh", "hardswish", "silu"
]


@dataclass(frozen=True)
class Operator:
    """What bcnet knows about one operator; in a column that is None there is nothing to do. ``taught`` says that a user
    has added it."""

    couple: CouplingRule
    sizes: SizeRule | None = None
    macs: MacRule | None = None
    shares: Sharing | None = None
    fuses: Fuses | None = None
    taught: bool = True


OPERATORS: dict[str, Operator] = {}


def register(
    *names: str,
    couple: CouplingRule,
    sizes: SizeRule | None = None,
    macs: MacRule | None = None,
    shares: Sharing | None = None,
    fuses: Fuses | None = None,
) -> None:
    """Teach bcnet the operators called ``names``, as torch names them (``aten::conv2d``).

    ``couple(call)`` returns the output's :class:`Value` and links the channels that must agree. ``sizes(site)``
    yields ``(argument, item, constant, size)`` for every constant that changes with the widths. ``macs(site)``
    yields, for each product the operator accumulates, the sizes whose product is the number of multiplications.
    ``shares`` is ``sums`` if channels are summed over, ``channels`` if each channel (of dimension 1) is treated
    separately, ``elements`` if elements move or are reduced but stay in their channel, ``joins`` if tensors are
    concatenated; None if configurations cannot share its work, unless torch tags it as pointwise.
    """
    for name in names:
        OPERATORS[name] = Operator(couple, sizes, macs, shares, fuses)


def rule(*names: str, **columns: Any) -> Callable[[C], C]:
    """:func:`register` as a decorator of the function that couples."""

    def decorate(couple: C) -> C:
        register(*names, couple=couple, **columns)
        return couple

    return decorate


def find(target: Any) -> Operator | None:
    """The entry of an operator, or of its twin that does not write in place."""
    name = name_of(target)
    return OPERATORS.get(name) or OPERATORS.get(name.removesuffix("_"))


def name_of(target: Any) -> str:
    plain = getattr(target, "__name__", str(target))
    return str(target._schema.name) if isinstance(target, torch._ops.OpOverload) else plain


def bind(target: Any, args: Any, kwargs: Any) -> dict[str, Any]:
    """Arguments by the names of the operator's schema, defaults filled in."""
    named: dict[str, Any] = {}
    for i, argument in enumerate(target._schema.arguments):
        if i < len(args):
            named[argument.name] = args[i]
        elif argument.name in kwargs:
            named[argument.name] = kwargs[argument.name]
        else:
            named[argument.name] = argument.default_value if argument.has_default_value() else None
    return named
