"""Kernels of a network compiled ahead of its first step, side by side: one by one they would take most of a minute.

Which they are is found by a dry run: the engine steps on the meta device, where tensors have shapes but no values.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn

from bcnet.errors import first_line
from bcnet.space.widths import Widths
from bcnet.supernet.supernet import Supernet
from bcnet.utils.random_state import kept_random_state

if TYPE_CHECKING:
    from bcnet.accel.fused_step.eager import Statistics
    from bcnet.accel.fused_step.engine import FusedEngine
    from bcnet.accel.kernels.launch import Request

DRAWN = 8
"""Configurations of a supernet whose kernels are compiled, beside the narrowest and the widest."""


def compile_ahead(
    engine: FusedEngine, x: Tensor, widths: Sequence[Widths] | None = None, answers: Statistics | None = None
) -> None:
    """Compile what the steps of ``engine`` will launch on batches like x (n, C, h, w), at ``widths`` or at some of all
    configurations; with ``answers``, what answers by these statistics will launch instead.

    If that fails, a warning says so and kernels are compiled when they are first launched."""
    engine.ready = True
    if not x.is_cuda:
        return
    from bcnet.accel.kernels import launch  # Triton, which there may not be without a GPU

    if launch.INTERPRETED:
        return
    try:
        device = torch.cuda.current_device() if x.device.index is None else x.device.index
        launch.compile_all(dry_run(engine, tuple(x.shape), widths, answers), device)
    except Exception as error:  # a compiler's errors are of many kinds, and none should end a run
        why = first_line(error)
        warnings.warn(f"kernels are compiled one by one, as they are needed, not ahead: {why:.120}", stacklevel=2)


def dry_run(
    engine: FusedEngine,
    shape: tuple[int, ...],
    widths: Sequence[Widths] | None = None,
    answers: Statistics | None = None,
) -> list[Request]:
    """The kernels that a step or an answer needs for batches of ``shape``; nothing is computed."""
    from bcnet.accel.kernels.launch import noting

    space = engine.net.space
    some = widths or [space.max, space.min, *space.sample(np.random.default_rng(0), DRAWN)]
    with kept_random_state(), noting() as noted:
        twin = engine.on(_shapes_only(engine.net))
        x = torch.empty(shape, device="meta")
        y = torch.empty(shape[0], dtype=torch.int64, device="meta")
        for one in some:
            if answers is None:
                twin.step(x, y, [(one, side) for side in engine.net.sides])
            else:
                twin.logits(x, one, statistics=answers)
        if widths is None and engine.statistics == "tracked":  # a scorer, which asks for answers as well
            twin.logits(x, some[0])
    return noted


def _shapes_only(net: Supernet) -> Supernet:
    """A copy on the meta device, without copying values first."""
    return copy.deepcopy(net, {id(t): _meta(t) for t in (*net.parameters(), *net.buffers())})


def _meta(tensor: Tensor) -> Tensor:
    twin = tensor.detach().to("meta")
    return nn.Parameter(twin, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else twin
