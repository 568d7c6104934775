"""Means with 95 % intervals (Student's t), as pages of results show them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from scipy.stats import t


def half(values: Sequence[float]) -> float:
    """Half of the interval of a mean of two values or more."""
    return float(t.ppf(0.975, len(values) - 1) * np.std(values, ddof=1) / len(values) ** 0.5)


def interval(values: Sequence[float], sign: str = "", digits: int = 2) -> str:
    """The mean, with ``sign="+"`` of a difference, and where there are two values or more half of its interval."""
    if not len(values):
        return "?"
    mean = f"{np.mean(values):{sign}.{digits}f}"
    return mean if len(values) < 2 else f"{mean} ± {half(values):.{digits}f}"
