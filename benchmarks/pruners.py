"""Torch-Pruning's methods brought to a budget of FLOPs, as the channels that each keeps.

``local`` prunes every layer by one ratio, which is bisected; ``global`` and ``isomorphic`` rank the channels of many
layers together and prune in small steps until the budget holds, as the package's own benchmark does. FLOPs are counted
as bcnet counts them, for all.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch_pruning as tp
from channels import Cutter, Kept
from parts import Batch, BcnetError
from torch import nn
from torch.nn import functional

SCORERS: dict[str, Callable[[], tp.importance.Importance]] = {
    "l2": lambda: tp.importance.GroupMagnitudeImportance(p=2),
    "bn": tp.importance.BNScaleImportance,
    "taylor": tp.importance.GroupTaylorImportance,
    "fpgm": tp.importance.FPGMImportance,
    "lamp": tp.importance.LAMPImportance,
}
SCOPES = ("local", "global", "isomorphic")
STEPS = 400
"""In how many steps a global pruner would prune everything."""
HALVINGS = 14
AT_ONCE = 64
"""Images whose gradients are computed together, for the memory of small machines."""
MOST = 0.95
"""The largest share of a layer that global pruning may take: without a bound it empties layers."""

METHODS = tuple(f"tp-{scope}-{scorer}" for scope in SCOPES for scorer in SCORERS)


def gradients(model: nn.Module, batches: list[Batch]) -> None:
    """Set the gradients of the loss, which Taylor importance reads."""
    model.eval().zero_grad()
    count = sum(len(y) for _, y in batches)
    for batch in batches:
        for x, y in zip(*(part.split(AT_ONCE) for part in batch), strict=True):
            (functional.cross_entropy(model(x), y, reduction="sum") / count).backward()


def prune(cutter: Cutter, method: str, flops: float, batches: list[Batch]) -> Kept:
    """The channels that ``method`` (``tp-SCOPE-SCORER``) keeps within ``flops``."""
    if method not in METHODS:
        raise BcnetError(f"unknown method {method!r}: known are {', '.join(METHODS)}")
    _, scope, scorer = method.split("-")
    model = copy.deepcopy(cutter.model)
    if scorer == "taylor":
        gradients(model.to(batches[0][0].device), batches)
        model.cpu()
    if scope == "local":
        return _bisected(cutter, model, scorer, flops)
    work = _Work(cutter, model, scorer, scope, 1.0, STEPS)
    for _ in range(STEPS):
        work.step(flops)
        if work.flops <= flops:
            return work.kept
    raise BcnetError(f"{method} does not reach {flops:,.0f} FLOPs: raise the budget")


def widest(cutter: Cutter, method: str, holds: Callable[[Kept], bool], halvings: int) -> Kept | None:
    """The channels of the widest network of ``method`` for which ``holds`` is true, by bisection of the way that it
    prunes; None where there is none. For criteria that need no gradients."""
    _, scope, scorer = method.split("-")
    if scope == "local":
        ratios = [step / STEPS for step in range(1, STEPS)]
        way: Callable[[int], Kept] = lambda at: _local(cutter, cutter.model, scorer, ratios[at]).kept  # noqa: E731
        count = len(ratios)
    else:
        work, steps = _Work(cutter, cutter.model, scorer, scope, 1.0, STEPS), []
        for _ in range(round(MOST * STEPS)):
            work.step()
            steps.append(list(work.kept))  # a step replaces entries of the list itself
        way, count = steps.__getitem__, len(steps)
    low, high, best = 0, count - 1, None
    for _ in range(halvings):
        middle = (low + high) // 2
        kept = way(middle)
        if holds(kept):
            high, best = middle, kept
        else:
            low = middle
    return best


def _local(cutter: Cutter, model: nn.Module, scorer: str, ratio: float) -> _Work:
    work = _Work(cutter, model, scorer, "local", ratio, 1)
    work.step()
    return work


def _bisected(cutter: Cutter, model: nn.Module, scorer: str, flops: float) -> Kept:
    """The least ratio of local pruning that holds the budget."""
    low, high, best = 0.0, 1.0, None
    for _ in range(HALVINGS):
        ratio = (low + high) / 2
        work = _local(cutter, model, scorer, ratio)
        if work.flops <= flops:
            high, best = ratio, work.kept
        else:
            low = ratio
    if best is None:
        raise BcnetError(f"local pruning does not reach {flops:,.0f} FLOPs: raise the budget")
    return best


class _Work:
    """A copy of ``model`` while it is pruned; ``kept`` are the original numbers of its channels."""

    def __init__(self, cutter: Cutter, model: nn.Module, scorer: str, scope: str, ratio: float, steps: int):
        self.cutter, self.model = cutter, copy.deepcopy(model)
        for copied, original in zip(self.model.parameters(), model.parameters(), strict=True):
            copied.grad = None if original.grad is None else original.grad.clone()
        self.roots = cutter._roots(self.model)
        self.kept: Kept = [list(range(root.out_channels)) for root in self.roots]
        self.pruner = tp.BasePruner(
            self.model,
            cutter.example,
            SCORERS[scorer](),
            global_pruning=scope != "local",
            isomorphic=scope == "isomorphic",
            pruning_ratio=ratio,
            max_pruning_ratio=1.0 if scope == "local" else MOST,
            iterative_steps=steps,
            ignored_layers=[m for m in self.model.modules() if isinstance(m, nn.Linear)],
        )

    def step(self, enough: float = 0.0) -> None:
        """Prune one step further, or as much of it as brings the network to ``enough`` FLOPs."""
        for group in self.pruner.step(interactive=True):
            for number, root in enumerate(self.roots):
                for dep, idxs in group:
                    if dep.target.module is root and dep.handler == tp.prune_conv_out_channels:
                        gone = set(idxs)
                        self.kept[number] = [c for place, c in enumerate(self.kept[number]) if place not in gone]
                        break
            group.prune()
            if self.flops <= enough:
                break
        if [len(stay) for stay in self.kept] != self.cutter.widths(self.model).tolist():
            raise BcnetError("Torch-Pruning pruned a layer that is no first layer of bcnet's variables")

    @property
    def flops(self) -> int:
        return self.cutter.flops(self.cutter.widths(self.model))
