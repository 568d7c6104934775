"""Gradients that a network writes by hand (``torch.autograd.Function``), which ``torch.export`` knows nothing of.

While a network is exported the forward of such a function is recorded as plain operators, between marks. A graph of
these operators learns as the network does where the function's gradient is the one that autograd gives them (it saves
memory); where it is another one (straight-through, reversed) the graph calls the function for its gradient.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, fx
from torch.autograd.function import _SingleLevelFunction
from torch.nn.modules._functions import BackwardHookFunction
from torch.overrides import TorchFunctionMode

from bcnet.space.operators.table import bind

_LIBRARY = torch.library.Library("bcnet", "FRAGMENT")
_LIBRARY.define("mark(Tensor(a) x, bool end, int call, int place) -> Tensor(a)")
_LIBRARY.impl("mark", lambda x, *_: x.view(x.shape), "CompositeExplicitAutograd")
_PLAIN = (int, float, bool, str, type(None), torch.dtype, torch.device)


@dataclass(frozen=True)
class Handwritten:
    """A call of ``function`` with ``args`` that gave ``results``, nodes of the graph or plain values; ``inside`` are
    the operators of its forward."""

    function: Any
    args: tuple[Any, ...]
    results: tuple[Any, ...]
    inside: tuple[fx.Node, ...] = ()


@contextlib.contextmanager
def marked() -> Iterator[list[Handwritten]]:
    """Mark the tensors of all functions in the graph that is made meanwhile; the calls have ``...`` in their place."""
    calls: list[Handwritten] = []

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        number = len(calls)
        calls.append(Handwritten(cls, (...,), ()))  # keeps its number: a forward may call other functions
        if cls is BackwardHookFunction:  # by which modules have hooks, and look at what it gives
            return super(_SingleLevelFunction, cls).apply(*args, **kwargs)
        with _PlainForward():
            made = super(_SingleLevelFunction, cls).apply(*_marked(args, number, end=False), **kwargs)
        several = isinstance(made, tuple)
        results = made if several else (made,)
        calls[number] = Handwritten(cls, _without_tensors(args), _without_tensors(results))
        shown = _marked(results, number, end=True)
        return shown if several else shown[0]

    with patch.object(_SingleLevelFunction, "apply", classmethod(apply), create=True):
        yield calls


def _marked(values: Sequence[Any], number: int, end: bool) -> tuple[Any, ...]:
    mark = torch.ops.bcnet.mark
    return tuple(mark(v, end, number, place) if isinstance(v, Tensor) else v for place, v in enumerate(values))


def _without_tensors(values: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(v if isinstance(v, _PLAIN) else ... for v in values)


class _PlainForward(TorchFunctionMode):
    """The forward of a function runs without gradients, so its own ``no_grad`` and ``detach`` say nothing: they are not
    recorded."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch._C._set_grad_enabled:
            with torch._C.DisableTorchFunction():
                return func(*args)
        if func in (Tensor.detach, torch.detach, Tensor.data.__get__):  # type: ignore[attr-defined]
            return args[0]
        return func(*args, **(kwargs or {}))


def unmark(graph: fx.Graph, calls: Sequence[Handwritten], constants: Collection[str]) -> tuple[Handwritten, ...]:
    """Take the marks out of a graph. What comes back are the ``calls`` that it can make itself: those that read nothing
    but the tensors and plain values that they are given, and write to nothing but tensors of their own."""
    places: list[tuple[dict[int, fx.Node], ...]] = [({}, {}) for _ in calls]
    inside: list[list[fx.Node]] = [[] for _ in calls]
    running: set[int] = set()
    for node in list(graph.nodes):
        if node.target is not torch.ops.bcnet.mark.default:
            for number in running:
                inside[number].append(node)
            continue
        source, end, number, place = node.args
        (running.discard if end else running.add)(number)
        if end and (source not in inside[number] or source in places[number][end].values()):
            # it gives back its input, or one result twice
            node.target, node.args, source = torch.ops.aten.alias.default, (source,), node
        else:
            node.replace_all_uses_with(source)
            graph.erase_node(node)
        places[number][end][place] = source
    found = []
    for call, (given, made), body in zip(calls, places, inside, strict=True):
        args = tuple(given.get(place, value) for place, value in enumerate(call.args))
        results = tuple(made.get(place, value) for place, value in enumerate(call.results))
        read = {source for node in body for source in node.all_input_nodes} - {*body, *given.values()}
        foreign = [n for n in read if isinstance(n.meta.get("val"), Tensor) and n.name not in constants]
        if ... not in (*args, *results) and made and not foreign and not _writes_outside(body):
            found.append(Handwritten(call.function, args, results, tuple(body)))
    return tuple(found)


def _writes_outside(body: Sequence[fx.Node]) -> bool:
    """Whether these operators write to a tensor that none of them has made."""
    own: set[fx.Node] = set()
    for node in body:
        shared = []
        if isinstance(node.target, torch._ops.OpOverload):
            named = bind(node.target, node.args, node.kwargs)
            for argument in node.target._schema.arguments:
                if argument.alias_info is not None and isinstance(named[argument.name], fx.Node):
                    shared.append(named[argument.name])
                    if argument.alias_info.is_write and named[argument.name] not in own:
                        return True
        else:
            shared = node.all_input_nodes
        if own.issuperset(shared):
            own.add(node)
    return False


def call_functions(graph: fx.Graph, calls: Sequence[Handwritten], new: Mapping[fx.Node, fx.Node]) -> None:
    """Give the results of ``calls`` in a graph, which has ``new`` nodes for theirs, the gradients of their functions.

    Values stay those of the captured operators: a function may compute others of the sizes that it meets.
    """
    shown: dict[fx.Node, fx.Node] = {}  # what others see of a result: the next function too
    for call in calls:
        ends = {place: new[end] for place, end in enumerate(call.results) if isinstance(end, fx.Node)}
        within = {new[node] for node in call.inside} | set(ends.values())
        args = fx.node.map_arg(call.args, lambda node: shown.get(new[node], new[node]))
        with graph.inserting_after(max(ends.values())):
            applied = graph.call_function(_outcomes(call.function), args)
        for place, end in ends.items():
            with graph.inserting_after(applied):
                result = graph.call_function(_with_gradient, (end, applied, place))
            within.add(result)
            end.replace_all_uses_with(result, partial(_is_outside, within))
            shown[end] = result


def _is_outside(within: set[fx.Node], user: fx.Node) -> bool:
    return user not in within


def _outcomes(function: Any) -> Callable[..., tuple[Any, ...]]:
    def outcomes(*args: Any) -> tuple[Any, ...]:
        made = function.apply(*args)
        return made if isinstance(made, tuple) else (made,)

    return outcomes


def _with_gradient(value: Tensor, outcomes: tuple[Any, ...], place: int) -> Tensor:
    """``value``, with the gradient of one outcome of a function."""
    value = value.detach()  # autograd would go back through what it may not: a function's forward may overwrite
    return _Valued.apply(value, outcomes[place]) if outcomes[place].requires_grad else value


class _Valued(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, source: Tensor) -> Tensor:
        return value.reshape(source.shape)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, Tensor]:
        return None, gradients[0]
