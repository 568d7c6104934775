"""Whether a graph learns as its network does: the gradients of both, held against each other."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.modules.batchnorm import _NormBase

from bcnet.space.capture import Capture, Example, used_in_training
from bcnet.space.rewrite import graph_network
from bcnet.space.state import duplicate, state_of
from bcnet.space.torch_export import tensors_in, without_autocast

Gradients = dict[str, Tensor]
Answer = tuple[list[Tensor], Gradients]
_NOTHING = torch.zeros(())
QUICK = 2e9
"""FLOPs of an image up to which gradients are compared without a reason to: about a second on one core."""


def learning(model: nn.Module, graph: Capture, output: Callable[[Any], Any]) -> Capture:
    """The graph that has the gradients of ``model`` in evaluation mode: of plain operators or, where that has not, with
    calls of the functions in which the network writes its gradients itself. ``lost`` names the parameters whose
    gradients neither has."""
    plain = graph.plain_operators
    try:
        own = _own(model, graph, output)
    except Exception:  # a forward may overwrite in evaluation what its gradients need, and not in training
        return graph
    found = _of_graph(model, plain)
    if not all(map(alike, found[0], own[0])):
        kind = type(model).__name__
        warnings.warn(
            f"{kind} answers otherwise than its graph on the same input: its forward must not draw random numbers "
            "outside torch, or keep what it computed in earlier calls",
            stacklevel=3,
        )
        return plain
    lost = _differing(own[1], found[1])
    if lost and graph.functions:
        left = _differing(own[1], _of_graph(model, graph)[1])
        if len(left) < len(lost):
            return replace(graph, lost=left)
    return replace(plain, lost=lost)


def _own(model: nn.Module, graph: Capture, output: Callable[[Any], Any]) -> Answer:
    args, kwargs = graph.given
    network = duplicate(model).eval()
    pick = output if graph.adapted else _whole
    with warnings.catch_warnings(), without_autocast():
        warnings.simplefilter("ignore")  # the network's own were given when it was captured
        return _answer(lambda: pick(network(*args, **kwargs)), dict(network.named_parameters()))


def _of_graph(model: nn.Module, graph: Capture) -> Answer:
    leaves = {id(p): p.detach().requires_grad_(p.requires_grad) for p in model.parameters()}
    state = {**graph.numbers, **state_of(model, graph.plain)}
    held = {name: leaves[id(t)] if id(t) in leaves else t.detach().clone() for name, t in state.items()}
    given = tensors_in(graph.given)
    if graph.functions:
        run = partial(graph_network(graph, (), (), held, frozen=True), *given)
    else:  # without a module, which takes longer to make than to run
        root = nn.Module()
        for name, part in graph.parts.items():
            root.add_module(name, part)
        known = dict(zip(graph.inputs, given, strict=True)) | graph.constants
        values = [
            known.get(n.name, held.get(graph.state_of.get(n.name, "")))
            for n in graph.graph.find_nodes(op="placeholder")
        ]
        run = partial(fx.Interpreter(root, graph=graph.graph).run, *values, enable_io_processing=False)
    try:
        return _answer(run, {name: leaves[id(p)] for name, p in model.named_parameters()})
    except Exception:  # then it has none
        return [], {}


def _whole(output: Any) -> Any:
    return output


def _answer(run: Callable[[], Any], parameters: Mapping[str, Tensor]) -> Answer:
    """The outputs of a network, and the gradient of a random sum of them for every parameter that has one."""
    learnt = {name: p for name, p in parameters.items() if p.requires_grad}
    with torch.enable_grad(), torch.random.fork_rng(devices={p.device for p in learnt.values() if p.is_cuda}):
        torch.manual_seed(0)
        found = tensors_in(run())
        torch.manual_seed(0)
        sums = [(t * torch.randn_like(t)).sum() for t in found if t.requires_grad and t.is_floating_point()]
        gradients = torch.autograd.grad(sums, list(learnt.values()), allow_unused=True) if sums and learnt else ()
    given = {name: g for name, g in zip(learnt, gradients, strict=False) if g is not None}
    return [t.detach() for t in found], given


def _differing(own: Gradients, other: Gradients) -> tuple[str, ...]:
    """Names of the parameters whose gradients differ by more than rounding does."""
    largest = {name: float(gradient.abs().max()) for name, gradient in own.items() if gradient.numel()}
    usual = median(largest.values()) if largest else 0.0
    found = []
    for name in dict.fromkeys([*own, *other]):
        gap = float((own.get(name, _NOTHING) - other.get(name, _NOTHING)).abs().max())
        if gap > 1e-2 * largest.get(name, 0.0) + 1e-4 * usual:
            found.append(name)
    return tuple(found)


def alike(a: Tensor, b: Tensor) -> bool:
    """Whether two outputs differ by no more than rounding; of integers only the shapes are compared."""
    if a.shape != b.shape or not a.is_floating_point():
        return a.shape == b.shape
    scale = float(b.nan_to_num(0.0, 0.0, 0.0).abs().max()) if b.numel() else 0.0
    return torch.allclose(a, b, rtol=1e-3, atol=1e-3 * scale, equal_nan=True)


def tell_lost(model: nn.Module, example: Example, graph: Capture) -> None:
    """A warning where the graph has not all gradients of the network."""
    learnt = {name: p for name, p in model.named_parameters() if p.requires_grad}
    lost = {*graph.lost, *(name for name, p in learnt.items() if p._backward_hooks)}
    unlearned = sorted(graph.unlearned & set(learnt))
    if unlearned and used_in_training(model, example, unlearned):
        lost |= set(unlearned)
    if lost:
        kind, first = type(model).__name__, next(name for name in learnt if name in lost)
        warnings.warn(
            f"{kind} has gradients of its own that its graph has not (a hook, a torch.autograd.Function that reads "
            f"weights past its arguments, or another forward in training): {first}, the first of {len(lost)} such "
            f"parameters of {len(learnt)}, learns otherwise in a supernet than in {kind} itself; write that part with "
            "plain operators, or slim the trained network without a supernet (start: trained, score: steps or cut)",
            stacklevel=3,
        )


@torch.no_grad()
def tell_resting(model: nn.Module, graph: Capture) -> None:
    """A warning where training changes what the graph reads, other than the statistics of torch's own norms."""
    norms = {id(b) for m in model.modules() if isinstance(m, _NormBase) for b in m.buffers(recurse=False)}
    read = {name: b for name, b in model.named_buffers() if name in graph.used and id(b) not in norms}
    before = {name: b for name, b in read.items() if b.is_floating_point()}
    if not before:
        return
    args, kwargs = graph.given
    network = duplicate(model).train()
    devices = {b.device for b in before.values() if b.is_cuda}
    with warnings.catch_warnings(), torch.random.fork_rng(devices=devices), contextlib.suppress(Exception):
        warnings.simplefilter("ignore")
        network(*args, **kwargs)
    after = dict(network.named_buffers())
    changed = [name for name, buffer in before.items() if name in after and not torch.equal(after[name], buffer)]
    if changed:
        kind = type(model).__name__
        warnings.warn(
            f"the training of {kind} changes {changed[0]}, the first of {len(changed)} such buffers, which rest in a "
            "supernet; slim the trained network without one (start: trained, score: steps or cut)",
            stacklevel=3,
        )
