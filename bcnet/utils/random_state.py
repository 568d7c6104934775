"""Random numbers that are borrowed and given back."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


def swap_random_states(new: tuple[Any, Any, Any] | None = None) -> tuple[Any, Any, Any]:
    """Give the global random states of torch (on the CPU), numpy and random, and put ``new`` ones in their place."""
    import numpy as np
    import torch

    # The legacy global state of numpy is what a user's code draws from.
    before = torch.get_rng_state(), np.random.get_state(), random.getstate()  # noqa: NPY002
    if new is not None:
        torch.set_rng_state(new[0])
        np.random.set_state(new[1])  # noqa: NPY002
        random.setstate(new[2])
    return before


@contextmanager
def kept_random_state() -> Iterator[None]:
    """Restore the global random states (torch, numpy, random) afterwards, whatever is drawn or seeded within.

    Works as a decorator, too.
    """
    import torch

    gpus = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None
    states = swap_random_states()
    try:
        yield
    finally:
        swap_random_states(states)
        if gpus is not None:
            torch.cuda.set_rng_state_all(gpus)
