"""One call of ``torch.export``: quiet, without work whose results are not used here, its failures in plain words."""

from __future__ import annotations

import contextlib
import gc
import io
import logging
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, fx, nn
from torch._subclasses import fake_impls, fake_tensor
from torch.fx._lazy_graph_module import _use_lazy_graph_module
from torch.fx.experimental import proxy_tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from bcnet.errors import first_line
from bcnet.space.handwritten import marked
from bcnet.utils.modes import quiet

Arguments = tuple[tuple[Any, ...], dict[str, Any]]

_ACTIVATIONS = ["relu", "hardtanh", "hardswish", "hardsigmoid", "silu", "gelu", "elu", "leaky_relu", "mish", "neg"]
_FRACTIONS = ["sigmoid", "tanh", "exp", "log", "sqrt", "rsqrt"]  # of integers, too

_SHORTCUTS: list[tuple[Any, str, Any]] = [
    (fx.config, "do_not_emit_stack_traces", True),
    (proxy_tensor, "_extract_tensor_metadata", lambda _: None),
]
"""Private settings of torch, which some versions lack: 2.11 does not have the first."""


def exported(network: nn.Module, given: Arguments, dynamic: bool) -> torch.export.ExportedProgram:
    """The program of ``network`` on ``given``, for any batch size where that is ``dynamic``; in its module's ``meta``
    are the ``calls`` of functions with gradients of their own, and whether gradients are ``hooked``."""
    args, kwargs = given
    shapes: Any = None
    with _quietly(), _quickly():
        if dynamic:
            batch = tensors_in(given)[0].shape[0]
            collection = torch.export.ShapesCollection()
            for tensor in tensors_in(given):
                if tensor.shape[:1] == (batch,):
                    collection[tensor] = {0: torch.export.Dim.AUTO}
            shapes = collection.dynamic_shapes(network, args, kwargs)
        with _Graphable() as mode, marked() as calls:
            program = torch.export.export(network, args, kwargs, dynamic_shapes=shapes, strict=False)
    program.graph_module.meta |= {"calls": calls, "hooked": mode.hooked}
    return program


def tensors_in(tree: Any) -> list[Tensor]:
    """All tensors in nested lists, tuples and dictionaries."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


@contextlib.contextmanager
def without_autocast() -> Iterator[None]:
    """Blocks of ``autocast`` do nothing, as in a graph, which has none."""
    with (
        patch.object(torch.autocast, "__enter__", lambda block: block),
        patch.object(torch.autocast, "__exit__", lambda block, *_: None),
    ):
        yield


class _Graphable(TorchFunctionMode):
    """Handles what a forward does without the graph noticing: ``x.data`` is read as ``x.detach()``, ``x.data = y`` is
    refused where it happens, and hooks are noted."""

    hooked = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == Tensor.data.__get__:  # type: ignore[attr-defined]
            return args[0].detach()
        if func == Tensor.data.__set__:  # type: ignore[attr-defined]
            raise _ReplacedError
        self.hooked |= func is Tensor.register_hook
        return func(*args, **(kwargs or {}))


class _ReplacedError(RuntimeError):
    """A forward replaces the contents of a tensor."""


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """Suppress the pages that torch prints when it fails: the error says what is needed."""
    silent = io.StringIO()
    with (
        quiet(logging.ERROR, "torch.export", "torch.fx.experimental.symbolic_shapes"),
        contextlib.redirect_stdout(silent),
        contextlib.redirect_stderr(silent),
    ):
        yield


@contextlib.contextmanager
def _quickly() -> Iterator[None]:
    """Skip the stack trace of every operator, a second record of every shape, and code for every stage of the graph;
    give the shapes of activations and batch norms directly instead of decomposing them; collect no garbage meanwhile.
    Attention layers are decomposed instead of being one operator of torch's fast path."""
    fast, collects = torch.backends.mha.get_fastpath_enabled(), gc.isenabled()
    torch.backends.mha.set_fastpath_enabled(False)
    gc.disable()
    try:
        with contextlib.ExitStack() as shortcuts:
            for owner, name, value in _SHORTCUTS:
                if hasattr(owner, name):
                    shortcuts.enter_context(patch.object(owner, name, value))
            shortcuts.enter_context(patch.dict(fake_impls.get_fast_op_impls(), _SHAPES))
            shortcuts.enter_context(_use_lazy_graph_module(True))
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
        if collects:
            gc.enable()


def _alike(mode: Any, x: Tensor, *_: Any, **__: Any) -> Tensor:
    """A tensor without data, of the shape and kind of ``x``."""
    return _empty(mode, x, x.dtype)


def _fractions(mode: Any, x: Tensor, *_: Any) -> Tensor:
    """As ``x``, but never of integers."""
    return _empty(mode, x, x.dtype if x.is_floating_point() or x.is_complex() else torch.get_default_dtype())


def _empty(mode: Any, x: Tensor, dtype: torch.dtype) -> Tensor:
    with fake_tensor.in_kernel_invocation_manager(mode):
        empty = torch.empty_like(x, dtype=dtype, device="meta")
    return fake_tensor.FakeTensor(mode, empty, x.device)


def _itself(mode: Any, x: Tensor, *_: Any, **__: Any) -> Tensor:
    return x


def _normed(mode: Any, x: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    """What batch norm gives in evaluation mode: no statistics of the batch."""
    nothing = [fake_tensor.FakeTensor(mode, torch.empty(0, device="meta"), x.device) for _ in range(2)]
    return _alike(mode, x), nothing[0], nothing[1]


def _shapes() -> dict[Any, Callable[..., Any]]:
    aten = torch.ops.aten
    found: dict[Any, Callable[..., Any]] = {aten._native_batch_norm_legit_no_training.default: _normed}
    for names, shape in ((_ACTIVATIONS, _alike), (_FRACTIONS, _fractions)):
        for name in names:
            found |= {getattr(aten, name).default: shape, getattr(aten, f"{name}_").default: _itself}
    return found


_SHAPES = _shapes()

_WRAPPER = "trace a module that wraps the network and leaves that part out, or switch it off where there is an option"


def cause(error: BaseException) -> str:
    """What in the forward cannot be exported, where, and what to do."""
    text, kind = str(error).lower(), type(error).__name__
    where = _place(error)
    if "data-dependent" in text or kind in ("GuardOnDataDependentSymNode", "UserError"):
        return (
            f"its forward branches on the values of tensors{where}, which has no fixed graph; rewrite that branch with "
            f"torch.where or torch.cond, or {_WRAPPER}"
        )
    if "numpy" in text:
        return f"its forward leaves torch for numpy{where}; use torch's own functions there, or {_WRAPPER}"
    if isinstance(error, _ReplacedError):
        return (
            f"its forward gives a tensor other contents{where}, which has no graph; keep the result in a local "
            "variable instead, or, where it does so in evaluation only, trace a module that wraps the network and "
            "calls its train() first"
        )
    if "is not a known type" in text:
        kept = first_line(error).split()[2].strip("'>")
        return (
            f"its output holds {kept}, which is no tensor; pick tensors of it with trace(..., output=lambda y: ...), "
            f"or {_WRAPPER}"
        )
    return f"{first_line(error)}{where}; {_WRAPPER}"


def _place(error: BaseException) -> str:
    """The line of the network's own code that raised an error."""
    torch_itself = str(Path(torch.__file__).parent)
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith((torch_itself, "<"))]
    own = [f for f in frames if Path(f.filename).parent != Path(__file__).parent]
    if not own:
        return ""
    return f" ({Path(own[-1].filename).name}, line {own[-1].lineno}: {own[-1].line})"
