"""A table of networks trained from scratch at every configuration of a small space, and what can be asked of it."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from bcnet.bench import correlation, schema
from bcnet.bench.correlation import Correlations
from bcnet.bench.files import find_table
from bcnet.bench.scorer import TableScorer
from bcnet.bench.spaces import BenchSpace, get_space
from bcnet.errors import BcnetError, did_you_mean
from bcnet.space.cost import Cost
from bcnet.space.widths import Floats, Widths, WidthSpace
from bcnet.utils.files import clear_errors, digest, read_regular, write_file


class Entry(NamedTuple):
    """What a table holds of some widths; every field has the leading shape of what was asked for."""

    widths: Widths
    """(..., L)"""
    acc: Floats
    """Accuracy in percent after each of S training runs, (..., S)."""
    mean: Floats
    std: Floats
    """Over the runs, with S - 1 degrees of freedom; 0 for one run."""
    flops: NDArray[np.int64]
    params: NDArray[np.int64]


class ChannelBench:
    """Accuracies and costs of all n widths of a space, as arrays in the order of the space's index.

    ``widths`` (n, L), ``acc`` (n, S) in percent, ``mean`` and ``std`` (n,), ``costs`` name -> (n,) with
    "flops", "params" and whatever :meth:`add_cost` added. ``sha256`` is the checksum of the file the
    table came from, ``released`` whether that is the one released for the space.
    """

    def __init__(self, space: str | WidthSpace, acc: ArrayLike, costs: Mapping[str, ArrayLike] | None = None):
        self.space = get_space(space)
        self.widths = self.space.all_widths()
        self.acc = _accuracies(acc, self.space)
        self.mean: Floats = self.acc.mean(axis=1)
        self.std: Floats = schema.deviation(self.acc)
        self.costs: dict[str, NDArray[Any]] = {}
        self.path: Path | None = None
        self.sha256: str | None = None
        self.released = False
        for array in (self.widths, self.acc, self.mean, self.std):
            array.setflags(write=False)
        for name, cost in {**self.space.costs, **(costs or {})}.items():
            self.add_cost(name, cost)
        for name in schema.COSTS:
            self._check_cost(name)

    @classmethod
    def load(
        cls, space: str | WidthSpace, path: str | os.PathLike[str] | None = None, verify: bool = True
    ) -> ChannelBench:
        """Reads the table of a space: "mobilenet", "resnet", or any small space with a table of your own.

        ``path`` is a file, or a folder of released files; without it the table is looked for in the
        folder ``$CHANNEL_BENCH_DIR``, then in the user cache. Every table must hold each key of its space
        once, with plausible accuracies and with the costs its space knows. The table of a released space
        must moreover be the released one, by checksum; ``verify=False`` admits another, such as one you
        have trained yourself.
        """
        wanted = get_space(space)
        file = find_table(wanted, path)
        try:
            content = read_regular(file, schema.LARGEST)
            table = cls(wanted, *schema.parse(content, wanted))
        except OSError as error:
            raise BcnetError(f"cannot read the table {file}: {error.strerror or error}") from None
        except BcnetError as error:
            raise BcnetError(f"the table {file} is no table of space {wanted.name!r}: {error}") from None
        table.path, table.sha256 = file, digest(content)
        table.released = table.sha256 == wanted.sha256
        if verify and wanted.sha256 and not table.released:
            raise BcnetError(
                f"the table {file} is not the released one of space {wanted.name!r} (SHA-256 {table.sha256[:12]}, "
                f"expected {wanted.sha256[:12]}): fetch that with 'bcnet bench fetch {wanted.name}', "
                f"or admit a table of your own with verify=False (--no-verify)"
            )
        return table

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Writes the table in the released schema, whole or not at all, and returns its path."""
        target = Path(path)
        with clear_errors(f"the table {target}"):
            write_file(target, schema.dump(self.space, self.acc, self.costs))
        return target

    def __len__(self) -> int:
        return self.space.size

    def add_cost(self, name: str, cost: Cost | ArrayLike) -> None:
        """Adds a cost to budget by, say a measured latency: one number for every configuration (n,), or a function
        of widths (n, L) that gives them."""
        values = np.array(cost(self.widths) if callable(cost) else cost)
        if values.shape != (len(self),) or values.dtype.kind not in "iuf" or not np.isfinite(values).all():
            raise BcnetError(
                f"cost {name!r} needs {len(self):,} finite numbers, one for every configuration of the table"
            )
        values.setflags(write=False)
        self.costs[name] = values

    def query(self, widths: ArrayLike | str) -> Entry:
        """The entry of widths (..., L), or of a key."""
        return self._at(self.space.parse(widths) if isinstance(widths, str) else self.space.index(widths))

    def best(self, budgets: Mapping[str, float] | None = None) -> Entry:
        """The entry of the highest mean accuracy among those whose costs are all within ``budgets``,
        name -> most allowed: ``best({"flops": 50e6, "params": 1e6})``."""
        return self._at(self._ranked(budgets)[0])

    def top(self, n: int, budgets: Mapping[str, float] | None = None) -> Entry:
        """The entries of the ``n`` highest mean accuracies within ``budgets``, or of as many as there are."""
        if n < 1:
            raise BcnetError(f"n is {n}, but it must be at least 1")
        return self._at(self._ranked(budgets)[:n])

    def correlate(self, scores: ArrayLike) -> Correlations:
        """How well ``scores`` (n,), one for every configuration in the order of the index, rank the mean accuracies."""
        given = np.asarray(scores)
        if given.shape != (len(self),):
            raise BcnetError(f"the table holds {len(self):,} widths, but {given.size:,} scores were given")
        return correlation.correlations(given, self.mean)

    def ceiling(self) -> Correlations:
        """What a perfect predictor would reach in :meth:`correlate`, given the noise between seeds;
        :func:`bcnet.bench.correlation.noise_ceiling` says how it is estimated."""
        return correlation.noise_ceiling(self.acc)

    def scorer(self, seed: int = 0) -> TableScorer:
        """A scorer for simulated search, which counts its evaluations."""
        return TableScorer(self.space, self.acc, seed)

    def _at(self, index: NDArray[np.int64]) -> Entry:
        return Entry(
            self.widths[index],
            self.acc[index],
            self.mean[index],
            self.std[index],
            self.costs["flops"][index],
            self.costs["params"][index],
        )

    def _check_cost(self, name: str) -> None:
        """The table's "flops" and "params" must be whole numbers, and those of its space where it knows them."""
        column = self.costs.get(name)
        if column is None or column.dtype.kind not in "iu":
            raise BcnetError(f"space {self.space.name!r} does not know its {name}: give the table whole numbers for it")
        if name in self.space.costs:
            right = self.space.costs[name](self.widths)
            wrong = np.flatnonzero(column != right)
            if len(wrong):
                at = wrong[0]
                raise BcnetError(
                    f"key '{self.space.keys(at)}' has {name} {column[at]:,}, but its widths cost {right[at]:,}"
                )

    def _ranked(self, budgets: Mapping[str, float] | None) -> NDArray[np.int64]:
        """Indices within the budgets, the most accurate first, equals by index."""
        constraints = dict(budgets or {})
        inside = np.ones(len(self), dtype=bool)
        for name, limit in constraints.items():
            if name not in self.costs:
                guess = did_you_mean(name, self.costs) or f"it has {', '.join(self.costs)}"
                raise BcnetError(f"the table has no cost {name!r}: {guess}")
            if isinstance(limit, bool) or not isinstance(limit, int | float | np.number) or math.isnan(limit):
                raise BcnetError(f"the budget of {name} must be a number, got {limit!r:.40}")
            inside &= self.costs[name] <= limit
        if not inside.any():
            asked = ", ".join(f"{name} <= {limit:,.12g}" for name, limit in constraints.items())
            least = ", ".join(f"{name} {self.costs[name].min():,.12g}" for name in constraints)
            raise BcnetError(f"no widths of space {self.space.name!r} keep within {asked}; the least there is: {least}")
        index = np.flatnonzero(inside)
        return index[np.argsort(-self.mean[index], kind="stable")]


def _accuracies(acc: ArrayLike, space: BenchSpace) -> Floats:
    values = np.array(acc, dtype=np.float64)
    if values.ndim != 2 or len(values) != space.size or values.shape[1] < 1:
        raise BcnetError(
            f"a table of space {space.name!r} needs accuracies of shape ({space.size}, seeds), got {values.shape}"
        )
    if not ((values >= 0) & (values <= 100)).all():
        raise BcnetError("accuracies must be percentages in 0..100")
    return values
