"""NVIDIA ModelOpt's FastNAS: widths by the accuracy that each layer loses when it alone is narrowed.

The search is ModelOpt's own (``modelopt.torch.prune``), scored as it recommends, by the accuracy on held-out images
after its own calibration of batch norm. Its channels are found again in the trained network by their batch norms.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Sequence
from pathlib import Path

import torch
from channels import Cutter, Kept
from parts import Batch, BcnetError
from scipy.optimize import linear_sum_assignment
from side_by_side import evaluate
from torch import nn

DIVISOR = 8
"""Widths are multiples of this by default: ModelOpt's own 32 leaves narrow layers as they are, and 44M out of reach."""
RATIOS = tuple(0.05 * i for i in range(1, 21))
TRIES = 6


def search(
    cutter: Cutter,
    flops: float,
    training: Sequence[Batch],
    val: Sequence[Batch],
    checkpoint: Path,
    dtype: str,
    divisor: int = DIVISOR,
) -> Kept:
    """The channels FastNAS keeps within ``flops``, as bcnet counts them, in multiples of ``divisor``.

    ``training`` are the batches that calibrate batch norm. ``checkpoint`` keeps what single layers lose, so that a
    second budget needs no measuring.
    """
    limit = flops
    for _ in range(TRIES):
        kept = _once(cutter, limit, training, val, checkpoint, dtype, divisor)
        found = cutter.flops(torch.tensor([len(stay) for stay in kept]).numpy())
        if found <= flops:
            return kept
        limit *= flops / found  # it counts some operations otherwise
    raise BcnetError(f"FastNAS does not reach {flops:,.0f} FLOPs: raise the budget")


def _once(
    cutter: Cutter,
    limit: float,
    training: Sequence[Batch],
    val: Sequence[Batch],
    checkpoint: Path,
    dtype: str,
    divisor: int,
) -> Kept:
    import modelopt.torch.nas.autonas as autonas
    import modelopt.torch.prune as mtp

    autonas.MODELOPT_QUEUE_MAXLEN = len(training)  # batches of this size are enough, and 50 of them take long
    device = val[0][0].device
    model = copy.deepcopy(cutter.model).to(device)  # it refuses channels-last
    layers = {"channels_ratio": RATIOS, "kernel_size": (), "channel_divisor": divisor}
    features = {"*": {"features_ratio": RATIOS, "feature_divisor": divisor}}
    mode = [("fastnas", {"nn.Conv2d": {"*": layers}, "nn.BatchNorm2d": features, "nn.Linear": features})]
    pruned, _ = mtp.prune(
        model,
        mode,
        {"flops": 2 * limit},  # it counts multiplications and additions
        (cutter.example.to(device),),
        {
            "data_loader": training,
            "collect_func": lambda batch: batch[0],
            "max_iter_data_loader": len(training),
            "score_func": lambda network: evaluate(network, val, dtype)["accuracy"],
            "checkpoint": str(checkpoint),
            "verbose": False,
        },
    )
    return kept_in(cutter, pruned.cpu())


def kept_in(cutter: Cutter, pruned: nn.Module) -> Kept:
    """Which channels of the trained network a network cut from it by others has: those with the same batch norms."""
    kept = []
    for variable in cutter.space.variables:
        names = [
            n for n in variable.layers if isinstance(cutter.model.get_submodule(n), nn.modules.batchnorm._BatchNorm)
        ]
        old, new = (
            torch.stack(list(itertools.chain.from_iterable(_affine(m.get_submodule(n)) for n in names)), 1).double()
            for m in (cutter.model, pruned)
        )
        rows, columns = linear_sum_assignment(torch.cdist(new, old).numpy())
        if torch.cdist(new, old)[rows, columns].max() > 1e-5:
            raise BcnetError(f"the channels of {variable.name} are not those of the trained network")
        kept.append(sorted(columns.tolist()))
    return kept


def _affine(norm: nn.Module) -> tuple[torch.Tensor, torch.Tensor]:
    return norm.weight.detach(), norm.bias.detach()
