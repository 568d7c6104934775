"""The computations of a level, made from its works; batch norm takes the addition and the ReLU that follow it along."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import fx

from bcnet.accel.enumeration.level import Computation, Dense, GraphCall, Normalisation, Reader, Same, StateReader, Units
from bcnet.accel.enumeration.prefix_tree import Work
from bcnet.space.axis import Size

if TYPE_CHECKING:
    from bcnet.accel.enumeration.walker import Walker


def _other(addition: Work, node: fx.Node) -> Any:
    a, b = addition.args["self"], addition.args["other"]
    return b if a is node else a


class Maker:
    """Turns the works of a level into computations."""

    def __init__(self, walker: Walker, slots: dict[tuple[fx.Node, str, int | None], Size]):
        self.walker, self.slots = walker, slots

    def level(self, works: Sequence[Work]) -> list[Computation]:
        computations: list[Computation] = []
        taken: set[fx.Node] = set()
        for work in works:
            if work.node not in taken:
                chain = self._chain(work, works)
                taken.update(w.node for w in chain)
                computations.append(self._computation(chain))
        return computations

    def _chain(self, work: Work, works: Sequence[Work]) -> list[Work]:
        """The works that become one computation: batch norm with the addition and ReLU that alone use its result."""
        if work.kind != "aten::batch_norm":
            return [work]
        return [work, *self._after(work, work, {w.node: w for w in works})]

    def _after(self, norm: Work, first: Work, rows: dict[fx.Node, Work]) -> list[Work]:
        """The addition and ReLU that follow ``norm`` in a computation that begins with ``first``."""
        found: list[Work] = []
        for kind in ("aten::add", "aten::relu"):
            last = found[-1] if found else norm
            user = self._only_user(last, kind, rows)
            if user is not None and (kind == "aten::relu" or self._adds(user, last, first, rows)):
                found.append(user)
        return found

    def _only_user(self, work: Work, kind: str, rows: dict[fx.Node, Work]) -> Work | None:
        users = list(work.node.users)
        user = rows.get(users[0]) if len(users) == 1 else None
        return user if user is not None and user.kind == kind else None

    def _adds(self, user: Work, last: Work, first: Work, rows: dict[fx.Node, Work]) -> bool:
        """Whether an addition joins ``last`` with another tensor of its shape that is there before ``first``."""
        other = _other(user, last.node)
        if not isinstance(other, fx.Node) or other is last.node or user.args.get("alpha") != 1:
            return False
        nodes = list(rows)
        in_time = other not in rows or nodes.index(other) < nodes.index(first.node)
        return in_time and other.meta["val"].shape == last.node.meta["val"].shape

    def _computation(self, chain: list[Work]) -> Computation:
        work = chain[0]
        if work.contracts is not None:
            return Dense(self.walker, work, self._named(work))
        if work.kind == "aten::batch_norm":
            return Normalisation(self.walker, chain, self._named(work), *self._surroundings(chain))
        if work.kind in ("aten::dropout", "aten::feature_dropout"):
            return Same(self.walker, work, self._named(work)["input"])
        node = work.node
        if "args" in work.args:
            return GraphCall(self.walker, work, [self._resolve(a, work) for a in node.args], {})
        named = self._named(work)
        target: Any = node.target
        arguments = {a.name: a.kwarg_only for a in target._schema.arguments}
        kwargs = {k: a for k, a in named.items() if arguments[k]}
        return GraphCall(self.walker, work, [a for k, a in named.items() if not arguments[k]], kwargs)

    def _surroundings(self, chain: Sequence[Work]) -> tuple[Reader | None, bool]:
        """What a chain adds to the batch norm in it, and whether ReLU follows."""
        kinds = {w.kind: i for i, w in enumerate(chain)}
        relu, place = "aten::relu" in kinds, kinds.get("aten::add")
        if place is None:
            return None, relu
        return Reader(self.walker, _other(chain[place], chain[place - 1].node), chain[0].level), relu

    def _named(self, work: Work) -> dict[str, Any]:
        return {name: self._resolve(arg, work, name) for name, arg in work.args.items()}

    def _resolve(self, arg: Any, work: Work, name: str = "", item: int | None = None) -> Any:
        """An argument as something to read: values cut to their level's units, sizes filled in."""
        size = self.slots.get((work.node, name, item))
        if size is not None:
            return Units(self.walker, size)
        if isinstance(arg, (list, tuple)):
            return [self._resolve(a, work, name, i) for i, a in enumerate(arg)]
        if not isinstance(arg, fx.Node):
            return arg
        if arg in self.walker.state:
            convolves = work.contracts is not None or work.kind.startswith("aten::conv")
            rounded = convolves and work.node is not self.walker.tree.output
            return StateReader(self.walker, arg, self.walker.axes_of(arg), self.walker.dtype if rounded else None)
        return Reader(self.walker, arg, work.level)
