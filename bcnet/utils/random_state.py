"""Random numbers that are borrowed and given back."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def kept_random_state() -> Iterator[None]:
    """Whatever is drawn or seeded within, the global random states (torch, numpy, random) are afterwards as before.

    A decorator, too.
    """
    import numpy as np
    import torch

    gpus = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None
    # The legacy global state of numpy is what a user's code draws from.
    states = torch.get_rng_state(), np.random.get_state(), random.getstate()  # noqa: NPY002
    try:
        yield
    finally:
        torch.set_rng_state(states[0])
        np.random.set_state(states[1])  # noqa: NPY002
        random.setstate(states[2])
        if gpus is not None:
            torch.cuda.set_rng_state_all(gpus)
