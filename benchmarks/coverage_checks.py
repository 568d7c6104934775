"""What a network that was resized must fulfil, for bcnet and, as far as they can be asked, for other tools."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

Inputs = tuple[Tensor, ...]
Pick = Callable[[Any], Any]
LIMIT = 1e-5  # the largest difference of outputs that rounding explains, relative to the largest output


class Wrong(Exception):
    """A result that is wrong without a word: the network runs, but is not what it should be."""


def tensors(tree: object) -> list[Tensor]:
    """All floating-point tensors of an output."""
    leaves = torch.utils._pytree.tree_leaves(tree)
    return [t for t in leaves if isinstance(t, Tensor) and t.is_floating_point()]


def settle(model: nn.Module, inputs: Inputs) -> None:
    """Weights and statistics that hide nothing: parameters that are constant (ones, zeros, tiny layer scales) become
    random, and batch norm has the statistics of a batch."""
    randomise(model)
    norms = [m for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm) and m.track_running_stats]
    momenta = [norm.momentum for norm in norms]
    for norm in norms:
        norm.momentum = 1.0
    try:
        with torch.no_grad():
            model.train()(*batch(inputs, 2, noise=0.5))
    except Exception:  # a network that only answers keeps the statistics it has
        pass
    with torch.no_grad():
        for norm, momentum in zip(norms, momenta, strict=True):
            norm.momentum = momentum
            for statistic, default, low in ((norm.running_mean, 0.0, -10.0), (norm.running_var, 1.0, 0.1)):
                if statistic is not None:
                    statistic.nan_to_num_(default).clamp_(low, 10.0)
    model.eval()


@torch.no_grad()
def randomise(model: nn.Module) -> None:
    generator = torch.Generator().manual_seed(1)
    for p in model.parameters():
        if p.is_floating_point() and p.numel() and bool((p == p.flatten()[0]).all()):
            noise = torch.rand(p.shape, generator=generator, dtype=p.dtype)
            one = float(p.flatten()[0])
            p.copy_(one * (0.5 + noise) if abs(one) > 0.05 else 0.2 * (noise - 0.5))


def batch(inputs: Inputs, n: int, noise: float = 0.0) -> Inputs:
    """``inputs`` (of one image) repeated ``n`` times, each with noise of its own."""
    many = [torch.cat([t] * n) for t in inputs]
    return tuple(t + noise * torch.randn_like(t) if noise and t.is_floating_point() else t for t in many)


def check_training(network: nn.Module, original: nn.Module, inputs: Inputs) -> None:
    """``network`` trains, or at least answers where ``original``, as its author wrote it, does not train either."""
    try:
        train_once(network, inputs)
    except Exception:
        try:
            train_once(copy.deepcopy(original), inputs)
        except Exception:  # whatever is wrong with it is not the tool's
            with torch.no_grad():
                network.eval()(*batch(inputs, 2, noise=0.1))
            return
        raise


def train_once(network: nn.Module, inputs: Inputs) -> None:
    """One forward and backward pass in training mode on a batch of two, finite throughout."""
    outputs = tensors(network.train()(*batch(inputs, 2, noise=0.1)))
    loss = torch.stack([t.double().square().mean() for t in outputs if t.requires_grad]).sum()
    loss.backward()
    if not bool(torch.isfinite(loss)):
        raise Wrong("the outputs are not finite")


@torch.no_grad()
def counted(network: nn.Module, inputs: Inputs) -> dict[str, int]:
    """Multiply-accumulates by torch's counter, and parameters."""
    # Plain matrix products: the counter does not know the processor's fused attention and recurrent layers.
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH), unfused(network):
        network.eval()(*inputs)
    return {"flops": counter.get_total_flops() // 2, "params": sum(p.numel() for p in network.parameters())}


def unfused(network: nn.Module) -> AbstractContextManager[None]:
    """Without oneDNN, which has recurrent layers as one operator, where there are some; without it all else is slow."""
    recurrent = any("_hh" in name for name, _ in network.named_parameters())
    return torch.backends.mkldnn.flags(enabled=False) if recurrent else nullcontext()  # type: ignore[no-any-return]


@torch.no_grad()
def difference(found: Callable[[], object], expected: Callable[[], object]) -> float:
    """The largest difference of outputs relative to the largest expected one; infinite where shapes differ."""
    a, b = (tensors(_seeded(run, 0)) for run in (found, expected))
    if [t.shape for t in a] != [t.shape for t in b]:
        return float("inf")
    scale = max((float(t.abs().max()) for t in b if t.numel()), default=0.0)
    pairs = [(x.double(), y.double()) for x, y in zip(a, b, strict=True) if x.numel()]
    worst = max((float((x - y).abs().nan_to_num(float("inf")).max()) for x, y in pairs), default=0.0)
    return worst / max(scale, 1e-12)


def _seeded(run: Callable[[], object], seed: int) -> object:
    torch.manual_seed(seed)
    return run()


@torch.no_grad()
def draws(model: nn.Module, inputs: Inputs) -> bool:
    """Whether the answers of ``model`` are random, as those of an autoencoder that draws its code."""
    answers = [tensors(_seeded(lambda: model.eval()(*inputs), seed)) for seed in (0, 1)]
    return any(not torch.equal(a, b) for a, b in zip(*answers, strict=True))


def agree(found: nn.Module, expected: nn.Module, inputs: Inputs, what: str, pick: Pick = lambda y: y) -> float:
    """The difference of what ``pick`` takes of two networks' answers, in double precision where rounding could
    explain it."""
    found, expected = found.eval(), expected.eval()
    differ = difference(lambda: pick(found(*inputs)), lambda: pick(expected(*inputs)))
    if differ > LIMIT:
        try:
            exact = tuple(t.double() if t.is_floating_point() else t for t in inputs)
            a, b = copy.deepcopy(found).double(), copy.deepcopy(expected).double()
            differ = difference(lambda: pick(a(*exact)), lambda: pick(b(*exact)))
        except Exception:  # a network that fixes its precision is judged in single precision
            differ = differ if differ > 100 * LIMIT else 0.0
    if differ > LIMIT:
        raise Wrong(f"{what} by {differ:.1e} of the largest output")
    return differ


def zeroed(model: nn.Module, taken: dict[str, Tensor]) -> nn.Module:
    """A copy of ``model`` in which every weight is zero that is not among the flat indices ``taken`` of its tensor."""
    network = copy.deepcopy(model)
    whole = state(network)
    with torch.no_grad():
        for name, indices in taken.items():
            if name in whole and whole[name].numel() != indices.numel():
                mask = torch.zeros(whole[name].numel(), dtype=torch.bool)
                mask[indices.flatten()] = True
                whole[name].mul_(mask.view(whole[name].shape))
    return network


def state(model: nn.Module) -> dict[str, Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}
