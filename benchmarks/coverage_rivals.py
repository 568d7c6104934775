"""Torch-Pruning and NVIDIA ModelOpt's FastNAS on one network, held to the checks of bcnet that they can be asked for.

Weights are doubles that carry their own index in bits that do not matter, so that the channels a tool has kept can be
read off its result. A network that does not run in double precision is measured in single, without that comparison.
"""

from __future__ import annotations

import copy
import time
from typing import Any

import torch
from coverage_bcnet import Check, Row
from coverage_checks import Inputs, Wrong, agree, check_training, counted, settle, state, tensors, zeroed
from torch import Tensor, nn

COARSE, FINE = 2.0**12, 2.0**40  # weights are multiples of 1/COARSE plus their index times 1/FINE


@torch.no_grad()
def number(model: nn.Module) -> nn.Module:
    """A copy in double precision whose weights carry their index."""
    model = copy.deepcopy(model).double()
    for tensor in state(model).values():
        if tensor.is_floating_point():
            index = torch.arange(tensor.numel(), dtype=torch.float64).view(tensor.shape)
            tensor.copy_((tensor.double() * COARSE).round() / COARSE + index / FINE)
    return model


def prepared(model: nn.Module, inputs: Inputs, row: Row) -> tuple[nn.Module, Inputs]:
    """The network that a tool is given, numbered if it runs in double precision, and its inputs."""
    settle(model, inputs)
    exact = tuple(t.double() if t.is_floating_point() else t for t in inputs)
    original = number(model)
    try:
        with torch.no_grad():
            original.eval()(*exact)
    except Exception:  # its forward makes tensors in single precision
        row["sliced"] = "not comparable: single precision"
        return copy.deepcopy(model), inputs
    return original, exact


def kept(model: nn.Module) -> dict[str, Tensor]:
    """The indices that the weights of a network cut from a numbered one carry."""
    found = {n: t.detach() for n, t in state(model).items() if t.is_floating_point()}
    return {n: ((t - (t * COARSE).round() / COARSE) * FINE).round().long() for n, t in found.items()}


def measure_torch_pruning(model: nn.Module, inputs: Inputs, row: Row, check: Check) -> None:
    """Halve ``model`` with Torch-Pruning's magnitude pruner, leaving the layers alone that give the output: those that
    do by autograd's graph or, if that fails, all with as many channels as an output."""
    original, exact = prepared(model, inputs, row)
    kept_alone = (last_layers, layers_as_wide_as_outputs)
    for attempt, alone in enumerate(kept_alone):
        final = attempt == len(kept_alone) - 1
        trial: Row = {k: v for k, v in row.items() if k == "sliced"}
        if _prune(copy.deepcopy(original), original, exact, trial, alone) or final:
            row.update({k: v for k, v in trial.items() if k != "checks"})
            for name, error in trial["checks"]:
                check(name, lambda e=error: _raise(e))
            return


def _raise(error: Exception | None) -> None:
    if error is not None:
        raise error


def _prune(network: nn.Module, original: nn.Module, inputs: Inputs, row: Row, alone: Any) -> bool:
    """Prune ``network`` and fill ``row``; whether all went well."""
    import torch_pruning

    def attempt(name: str, do: Any) -> bool:
        try:
            do()
        except Exception as error:
            row["checks"].append((name, error))
            return False
        row["checks"].append((name, None))
        return True

    row["checks"] = []
    made: dict[str, Any] = {}

    def build() -> None:
        start = time.process_time()
        importance = torch_pruning.importance.GroupMagnitudeImportance(p=2)
        given = inputs[0] if len(inputs) == 1 else inputs
        options = {"pruning_ratio": 0.5, "ignored_layers": alone(network.eval(), inputs)}
        made["pruner"] = torch_pruning.pruner.BasePruner(network, given, importance, **options)
        row["seconds"] = round(time.process_time() - start, 2)

    if not attempt("tracing", build) or not attempt("building", lambda: made["pruner"].step()):
        return False
    passed = [attempt(name, do) for name, do in _results(network, original, inputs, row)]  # all of them, not the first
    return all(passed)


def _results(network: nn.Module, original: nn.Module, inputs: Inputs, row: Row) -> list[tuple[str, Any]]:
    """The checks of a network that a tool has cut from ``original``."""
    checks = [
        ("running at reduced widths", lambda: check_training(copy.deepcopy(network), original, inputs)),
        ("same outputs", lambda: _same_outputs(network, original, inputs)),
        ("smaller", lambda: _smaller(network, original, inputs, row)),
    ]
    zeros = ("sliced is zeroed", lambda: row.update(sliced=_sliced(network, original, inputs)))
    return checks if "sliced" in row else [*checks, zeros]


@torch.no_grad()
def _same_outputs(network: nn.Module, original: nn.Module, inputs: Inputs) -> None:
    def shapes(of: nn.Module) -> list[torch.Size]:
        return [t.shape for t in tensors(of.eval()(*inputs))]

    wanted = shapes(original)
    if shapes(network) != wanted and shapes(_other_weights(original)) == wanted:
        raise Wrong("the network has outputs of another shape")


def _other_weights(model: nn.Module) -> nn.Module:
    """A copy whose outputs have other shapes if these follow from values: as many points as it finds, for example."""
    other = copy.deepcopy(model)
    for parameter in other.parameters():
        parameter.copy_(parameter[torch.randperm(len(parameter))] if parameter.dim() else parameter)
    return other


def _smaller(network: nn.Module, original: nn.Module, inputs: Inputs, row: Row) -> None:
    after, before = counted(network, inputs), counted(original, inputs)
    row["flops_left"] = round(after["flops"] / max(1, before["flops"]), 4)
    row["params_left"] = round(after["params"] / before["params"], 4)
    if after["params"] >= before["params"]:
        raise ValueError("nothing was pruned")


def _sliced(network: nn.Module, original: nn.Module, inputs: Inputs) -> str:
    """Equal to the original with zeros, or not; only the report knows whether the network's channels are mixed."""
    try:
        agree(network, zeroed(original, kept(network)), inputs, "it differs from the original with zeros")
    except Wrong:
        return "differs"
    return "equal"


def last_layers(model: nn.Module, inputs: Inputs) -> list[nn.Module]:
    """Layers from which an output follows without another layer in between, by autograd's graph."""
    owner = {id(p): m for m in model.modules() for p in m.parameters(recurse=False)}
    todo = [t.grad_fn for t in tensors(model(*inputs)) if t.grad_fn is not None]
    seen, found = set(todo), []
    while todo:
        step = todo.pop()
        weights = _weights(step) if any(word in step.name() for word in ("Convolution", "mm", "Mm")) else []
        found += [owner[id(w)] for w in weights if id(w) in owner]
        if not weights:
            following = [f for f, _ in step.next_functions if f is not None and f not in seen]
            seen.update(following)
            todo += following
    return list(dict.fromkeys(found))


def _weights(step: Any) -> list[Tensor]:
    """Parameters that a step of autograd's graph takes directly or through views."""
    found = []
    for source, _ in step.next_functions:
        while source is not None and source.name() in ("TBackward0", "ViewBackward0", "UnsafeViewBackward0"):
            source = source.next_functions[0][0]
        if source is not None and hasattr(source, "variable"):
            found.append(source.variable)
    return found


def layers_as_wide_as_outputs(model: nn.Module, inputs: Inputs) -> list[nn.Module]:
    with torch.no_grad():
        widths = {t.shape[1] for t in tensors(model(*inputs)) if t.dim() > 1}
    layers = [m for m in model.modules() if isinstance(m, (nn.Linear, nn.modules.conv._ConvNd))]
    return [m for m in layers if (m.out_features if isinstance(m, nn.Linear) else m.out_channels) in widths]


def measure_fastnas(model: nn.Module, inputs: Inputs, row: Row, check: Check) -> None:
    """Convert ``model`` for ModelOpt's FastNAS, take its smallest network and export it; nothing is searched."""
    import modelopt.torch.nas as nas

    original, exact = prepared(model, inputs, row)
    made: dict[str, Any] = {"network": copy.deepcopy(original).eval()}

    def convert() -> None:
        start = time.process_time()
        made["network"] = nas.convert(made["network"], mode="fastnas")
        row["seconds"] = round(time.process_time() - start, 2)

    if not check("tracing", convert):
        return

    def export() -> None:
        nas.sample(made["network"], min)
        with torch.no_grad():
            made["path"] = tensors(made["network"].eval()(*exact))
        made["network"] = nas.export(made["network"])

    def same_path() -> None:
        with torch.no_grad():
            found = tensors(made["network"].eval()(*exact))
        if not all(torch.allclose(a, b) for a, b in zip(found, made["path"], strict=True)):
            raise Wrong("the exported network answers otherwise than the path it was")

    if check("building", export):
        check("supernet", same_path)
        for name, do in _results(made["network"], original, exact, row):
            check(name, do)
