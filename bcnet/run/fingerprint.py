"""What a run from Python was given, as a few digests: the network, its weights, the data and the task.

A run folder keeps them, so that the same call with anything else is refused rather than mixed with what the folder
holds::

    given = fingerprint(run.space, model, data, task)
    changed(kept, given)  # "other weights", or None
"""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from functools import partial
from types import CodeType, FunctionType, MethodType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from bcnet.data.source import Data, Source
from bcnet.errors import BcnetError
from bcnet.space.network import NetworkSpace
from bcnet.training.task import Task

SAMPLED = 2
"""The number of batches of each part of the data that are looked at, from the first on."""

WORDS = {"graph": "another network", "weights": "other weights", "data": "other data", "task": "another task"}


def fingerprint(space: NetworkSpace, model: nn.Module, data: Data, task: Task | None) -> dict[str, str]:
    """The digests of what a run was given, by the keys of :data:`WORDS`."""
    return {
        "graph": _digest(_graph(space)),
        "weights": _digest(_weights(model)),
        "data": _digest(_sample(data)),
        "task": _digest(_described(task)),
    }


def changed(kept: Mapping[str, Any], given: Mapping[str, str]) -> str | None:
    """What has changed, in words such as ``other weights``; None if nothing has."""
    return next((words for key, words in WORDS.items() if key in given and kept.get(key) != given[key]), None)


def _graph(space: NetworkSpace) -> Iterator[object]:
    """Every operation with its arguments and the names of its inputs: another activation is another graph."""
    for node in space.graph.graph.nodes:
        yield node.op, str(node.target), _plain(node.args), _plain(node.kwargs)
    yield from ((v.name, v.candidates, v.layers, v.unit) for v in space.variables)


def _plain(value: object) -> object:
    """The arguments of an operation, without memory addresses."""
    if isinstance(value, torch.fx.Node):
        return f"%{value.name}"
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    return value if isinstance(value, (bool, int, float, str, type(None))) else str(type(value))


def _weights(model: nn.Module) -> Iterator[object]:
    for name, tensor in model.state_dict().items():
        yield name
        yield tensor


def _sample(data: Data) -> Iterator[object]:
    """The first batches of every part; only their shapes if a part gives different ones each time."""
    parts: dict[str, Source | None] = {"train": data.train, "val": data.val, "test": data.test}
    for name, source in parts.items():
        yield name, None if source is None else len(source)
        if source is None:
            continue
        first, second = (_batches(source) for _ in range(2))
        repeats = len(first) == len(second) and all(map(torch.equal, first, second))
        yield from first if repeats else [(str(t.dtype), list(t.shape[1:])) for t in first]


def _batches(source: Source) -> list[Tensor]:
    pairs = zip(range(SAMPLED), source.batches(0, 0, "cpu"), strict=False)
    return [tensor for _, pair in pairs for tensor in pair]


def _described(value: Any, depth: int = 0) -> Iterator[object]:
    """A task, down to the code of its functions and what they close over."""
    if depth > 8:
        return
    yield type(value).__qualname__
    if is_dataclass(value) and not isinstance(value, type):
        for entry in fields(value):
            yield entry.name
            yield from _described(getattr(value, entry.name), depth + 1)
    elif isinstance(value, partial):
        for item in (value.func, value.args, sorted(value.keywords.items())):
            yield from _described(item, depth + 1)
    elif isinstance(value, MethodType):
        yield from _described(value.__func__, depth + 1)
        yield from _described(value.__self__, depth + 1)
    elif isinstance(value, FunctionType):
        yield from _code(value.__code__)
        held = inspect.getclosurevars(value).nonlocals
        for item in (*(value.__defaults__ or ()), *(held[name] for name in sorted(held))):
            yield from _described(item, depth + 1)
    elif isinstance(value, nn.Module):
        yield repr(value)
        yield from _weights(value)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _described(item, depth + 1)
    elif isinstance(value, (bool, int, float, str, Tensor)):
        yield value
    else:
        yield getattr(value, "__module__", ""), getattr(value, "__qualname__", "")


def _code(code: CodeType) -> Iterator[object]:
    yield code.co_code.hex(), code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _code(constant)
        else:
            yield repr(sorted(map(repr, constant)) if isinstance(constant, frozenset) else constant)


def _digest(values: Iterable[object]) -> str:
    found = hashlib.sha256()
    for value in values:
        if isinstance(value, Tensor):
            found.update(f"{value.dtype} {tuple(value.shape)}".encode())
            found.update(_bytes(value))
        else:
            found.update(json.dumps(value, default=str).encode())
        found.update(b"\0")
    return found.hexdigest()


def _bytes(tensor: Tensor) -> bytes:
    whole = tensor.detach().cpu().contiguous().reshape(-1)
    try:
        return np.asarray(whole.view(torch.uint8)).tobytes()
    except RuntimeError as error:
        raise BcnetError(f"a tensor of {tensor.dtype} cannot be compared with that of another call") from error
