"""The cheapest assignment of a sum of unary and pairwise terms, by min-sum elimination on its graph.

On a chain this is Viterbi's algorithm; on the coupling graph of a network it costs K to the power of the
graph's width. Where a table would grow beyond a limit it is split (mini-buckets): the minimum found is
then a lower bound, and the assignment a good one rather than the best.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bcnet.space.widths import Floats

MOST_ENTRIES = 200_000

Pairs = Mapping[tuple[int, int], Floats]


@dataclass(frozen=True)
class _Factor:
    """A table over the variables ``scope`` (ascending), one axis for each."""

    scope: tuple[int, ...]
    table: Floats


class Elimination:
    """A graph of pairwise terms, ready to be minimised for many tables: the order of elimination is chosen once."""

    def __init__(self, counts: NDArray[np.int64], edges: list[tuple[int, int]]):
        self._counts = [int(count) for count in counts]
        self._order = _min_degree_order(len(counts), edges)

    def minimise(self, unary: list[Floats], pairs: Pairs) -> tuple[NDArray[np.int64], float]:
        """An assignment (L,) of candidate indices, and a lower bound on the minimum, of
        ``sum_i unary[i][x_i] + sum_ij pairs[i, j][x_i, x_j]``; both are exact unless a table had to be split."""
        factors = [_Factor((i,), table) for i, table in enumerate(unary)]
        factors += [_Factor(edge, table) for edge, table in pairs.items()]
        buckets: dict[int, list[_Factor]] = {}
        bound = 0.0
        for variable in self._order:
            buckets[variable] = [f for f in factors if variable in f.scope]
            factors = [f for f in factors if variable not in f.scope]
            for bucket in self._split(buckets[variable]):
                rest = self._sum(bucket, variable)
                if rest.scope:
                    factors.append(rest)
                else:
                    bound += float(rest.table)
        return self._decode(buckets), bound

    def _split(self, factors: list[_Factor]) -> list[list[_Factor]]:
        """The factors in as few groups as keep every joint table small."""
        groups: list[list[_Factor]] = []
        for factor in sorted(factors, key=lambda f: -len(f.scope)):
            for group in groups:
                joint = set(factor.scope).union(*(f.scope for f in group))
                if np.prod([float(self._counts[v]) for v in joint]) <= MOST_ENTRIES:
                    group.append(factor)
                    break
            else:
                groups.append([factor])
        return groups

    def _sum(self, factors: list[_Factor], variable: int) -> _Factor:
        """The sum of factors, minimised over ``variable``."""
        scope = tuple(sorted(set().union(*(f.scope for f in factors))))
        shape = [self._counts[v] for v in scope]
        total = np.zeros(shape)
        for factor in factors:
            total += factor.table.reshape([self._counts[v] if v in factor.scope else 1 for v in scope])
        axis = scope.index(variable)
        return _Factor(scope[:axis] + scope[axis + 1 :], total.min(axis=axis))

    def _decode(self, buckets: dict[int, list[_Factor]]) -> NDArray[np.int64]:
        chosen: dict[int, int] = {}
        for variable in reversed(self._order):
            total = np.zeros(self._counts[variable])
            for factor in buckets[variable]:
                total += factor.table[tuple(slice(None) if v == variable else chosen[v] for v in factor.scope)]
            chosen[variable] = int(total.argmin())
        return np.array([chosen[v] for v in range(len(self._counts))])


def _min_degree_order(count: int, edges: list[tuple[int, int]]) -> list[int]:
    """Variables in the order of elimination: always one with the fewest neighbours, which then all get linked."""
    near: dict[int, set[int]] = {v: set() for v in range(count)}
    for i, j in edges:
        near[i].add(j)
        near[j].add(i)
    order = []
    for _ in range(count):
        variable = min(near, key=lambda v: (len(near[v]), v))
        linked = near.pop(variable)
        for v in linked:
            near[v] |= linked - {v}
            near[v].discard(variable)
        order.append(variable)
    return order
