"""The graph of any network: one call of ``torch.export``, with its failures put in plain words."""

from __future__ import annotations

import contextlib
import copy
import io
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from bcnet.errors import BcnetError


@dataclass(frozen=True)
class Capture:
    """A network as a graph of operators; parameters and buffers are placeholders.

    ``state_of`` maps a placeholder's name to the name of its parameter or buffer, ``inputs`` are the
    placeholders of the user's inputs, ``batch`` is the batch size the shapes were recorded with, and
    ``dynamic`` says whether the graph takes other batch sizes too.
    """

    graph: fx.Graph
    state_of: dict[str, str]
    constants: dict[str, Tensor]
    inputs: tuple[str, ...]
    batch: int
    dynamic: bool

    @property
    def used(self) -> set[str]:
        """Names of the parameters and buffers that the graph reads."""
        return {self.state_of[n.name] for n in self.graph.nodes if n.name in self.state_of and n.users}


def capture(model: nn.Module, example: Tensor | Sequence[Tensor], *, training: bool = False) -> Capture:
    """Export ``model``, in evaluation mode by default, on ``example`` (a batch, or a tuple of inputs)."""
    inputs = _check(model, example)
    batch = inputs[0].shape[0]
    shapes = tuple({0: torch.export.Dim.AUTO} if t.shape[:1] == (batch,) else None for t in inputs)
    network = copy.deepcopy(model).train(training)
    _run(network, inputs)
    try:
        program = _export(network, inputs, shapes)
        dynamic = True
    except Exception:  # any failure of the dynamic export is tried once more with fixed sizes, and that one is reported
        try:
            program = _export(network, inputs, None)
        except Exception as error:
            raise BcnetError(f"torch.export cannot capture {type(model).__name__}: {_cause(error)}") from error
        dynamic = False
    _spell_out_splits(program.graph)
    signature = program.graph_signature
    state_of = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
    lifted = signature.inputs_to_lifted_tensor_constants
    constants = {name: program.constants[target] for name, target in lifted.items()}
    dynamic = dynamic and any(
        isinstance(node.meta["val"].shape[0], torch.SymInt)
        for node in program.graph.nodes
        if node.op == "placeholder" and node.name in signature.user_inputs
    )
    names = tuple(str(name) for name in signature.user_inputs)
    return Capture(program.graph, state_of, constants, names, batch, dynamic)


def _spell_out_splits(graph: fx.Graph) -> None:
    """A cut into so many parts, or parts of so many channels, names all their sizes where the last one is smaller:
    at other widths the parts need not keep that pattern."""
    aten = torch.ops.aten
    for node in graph.nodes:
        if node.target in (aten.chunk.default, aten.split.Tensor, aten.tensor_split.sections):
            dim = node.args[2] if len(node.args) > 2 else node.kwargs.get("dim", 0)
            sizes = [part.shape[dim] for part in node.meta["val"]]
            if all(isinstance(size, int) for size in sizes) and len(set(sizes)) > 1:
                node.target, node.args, node.kwargs = aten.split_with_sizes.default, (node.args[0], sizes, dim), {}


def _export(network: nn.Module, inputs: tuple[Tensor, ...], shapes: Any) -> torch.export.ExportedProgram:
    """Export without the pages that torch prints when it fails: the error says what is needed."""
    noisy = [logging.getLogger(name) for name in ("torch.export", "torch.fx.experimental.symbolic_shapes")]
    levels = [noise.level for noise in noisy]
    for noise in noisy:
        noise.setLevel(logging.ERROR)
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            return torch.export.export(network, inputs, dynamic_shapes=shapes, strict=False)
    finally:
        for noise, level in zip(noisy, levels, strict=True):
            noise.setLevel(level)


def _check(model: nn.Module, example: Tensor | Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The inputs as a tuple, of batch size 2 or more: export would freeze a batch of 1."""
    inputs = (example,) if isinstance(example, Tensor) else tuple(example)
    if not isinstance(model, nn.Module):
        raise BcnetError(f"expected a torch.nn.Module, but got {type(model).__name__}")
    if not inputs or not all(isinstance(t, Tensor) and t.dim() for t in inputs):
        raise BcnetError("the example input must be a batch of inputs as a tensor, or a tuple of such tensors")
    odd = next((name for name in model.state_dict() if any(sign in name for sign in '"\\\n\r')), None)
    if odd is not None:
        raise BcnetError(f"{odd!r:.80} has a quote, backslash or line end in its name: rename that layer")
    devices = {str(p.device) for p in model.parameters()}
    here = {str(t.device) for t in inputs}
    if devices and len(devices | here) > 1:
        raise BcnetError(
            f"the model is on {', '.join(sorted(devices))} but the example input on {', '.join(sorted(here))}: "
            "move both to one device"
        )
    if inputs[0].shape[0] == 1:
        inputs = tuple(torch.cat([t, t]) if t.shape[0] == 1 else t for t in inputs)
    return inputs


@torch.no_grad()
def _run(network: nn.Module, inputs: tuple[Tensor, ...]) -> None:
    try:
        network(*inputs)
    except Exception as error:
        shapes = ", ".join(str(tuple(t.shape)) for t in inputs)
        raise BcnetError(
            f"{type(network).__name__} does not run on an example input of shape {shapes}: {_cause(error)}; "
            "give it an input that it takes"
        ) from error


def _cause(error: BaseException) -> str:
    """The part of an exporter's message that a person can use."""
    text = str(error)
    kind = type(error).__name__
    if "data-dependent" in text.lower() or kind in ("GuardOnDataDependentSymNode", "UserError"):
        return (
            "its forward branches on the values of tensors (data-dependent control flow), which has no fixed graph; "
            "rewrite that branch with torch.where or torch.cond"
        )
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return (lines[0] if lines else kind)[:200].rstrip(".")
