"""Makes ``synthetic_table.json``, a table of the released schema for tests: run this file to make it again.

Its space is a stem, a hidden layer and an end of four candidates each; its accuracies saturate with FLOPs and
have seed noise. No network was trained for it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bcnet.bench import BenchSpace, ChannelBench
from bcnet.space.cost import QuadraticCost
from bcnet.space.widths import WidthVariable, candidates


def quadratic(formula: Callable[..., int], count: int) -> QuadraticCost:
    """The :class:`QuadraticCost` of a polynomial of degree two in ``count`` widths, read off its values."""
    unit = np.eye(count, dtype=np.int64)

    def at(point: NDArray[np.int64]) -> int:
        return formula(*point.tolist())

    constant = at(0 * unit[0])
    Q = np.zeros((count, count))
    q = np.zeros(count)
    for i in range(count):
        Q[i, i] = (at(2 * unit[i]) - 2 * at(unit[i]) + constant) / 2
        q[i] = at(unit[i]) - constant - Q[i, i]
        for j in range(i + 1, count):
            Q[i, j] = at(unit[i] + unit[j]) - at(unit[i]) - at(unit[j]) + constant
    return QuadraticCost(constant, q, Q)


FILE = Path(__file__).with_name("synthetic_table.json")
SPACE = BenchSpace(
    "synthetic",
    [WidthVariable(name, candidates(largest, groups=4)) for name, largest in (("c0", 16), ("h1", 48), ("c2", 32))],
    {
        "flops": quadratic(lambda c0, h1, c2: 64 * (27 * c0 + c0 * h1) + 16 * (9 * h1 + h1 * c2) + 10 * c2, 3),
        "params": quadratic(lambda c0, h1, c2: 29 * c0 + (c0 + 11) * h1 + (h1 + 2) * c2 + 10 * c2 + 10, 3),
    },
    "synthetic_table.json",
    "57469f7c825d65bace880f661a5f14cfb6ed460727ae91ab10f5e6e096f190de",
)


def make() -> ChannelBench:
    """The synthetic table, 64 networks of three seeds."""
    share = SPACE.costs["flops"](SPACE.all_widths()) / SPACE.costs["flops"](SPACE.max)
    noise = np.random.default_rng(0).normal(scale=0.2, size=(SPACE.size, 3))
    # Two decimals, as of an accuracy over 10,000 images; so the file is the same on every machine.
    return ChannelBench(SPACE, np.round(92 - 1 / (0.3 + share[:, None]) + noise, 2))


if __name__ == "__main__":
    make().save(FILE)
