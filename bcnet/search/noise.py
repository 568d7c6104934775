"""Whether scores tell configurations apart at all, or differ by no more than the images they are measured on."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

CERTAIN = 0.01
"""The probability with which scores that mean nothing may pass for scores that do."""


def tells_apart(parts: ArrayLike) -> bool:
    """Whether the rows of ``parts`` (n, P), scores of n configurations on P parts of the images, differ by more than
    chance: an F test of a two-way analysis of variance, as all configurations see the same parts."""
    from scipy.stats import f

    values = np.asarray(parts, dtype=float)
    values = values[np.isfinite(values).all(axis=1)]
    n, count = values.shape
    if n < 2 or count < 2:
        return n > 1 and bool(np.ptp(values) > 0)  # nothing to measure noise by
    rows = values.mean(axis=1, keepdims=True)
    rest = values - rows - values.mean(axis=0, keepdims=True) + values.mean()
    between = count * float(rows.var(ddof=1))
    within = float((rest**2).sum()) / ((n - 1) * (count - 1))
    if within <= 1e-24 + 1e-12 * between:
        return between > 1e-24
    return float(f.sf(between / within, n - 1, (n - 1) * (count - 1))) < CERTAIN
