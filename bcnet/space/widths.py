"""What may vary: width variables, their candidates, and the space they span.

Pure numpy. A *width variable* is a set of channel dimensions that must have one width; its
*candidates* are closed under complement, ``c -> l + l_s - c``, so that the BCv2 principle is fair.
"""

from __future__ import annotations

import json
import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from bcnet.errors import BcnetError

FORMAT_VERSION = 1
MAX_WIDTH = 2**20  # no layer is wider; keeps a hostile file from claiming all memory

Widths = NDArray[np.int64]
Floats = NDArray[np.float64]
Indices = NDArray[np.int64]
Side = Literal["left", "right"]


def candidates(largest: int, groups: int, base: int = 1, unit: int = 1, least: int = 1) -> tuple[int, ...]:
    """Widths a variable of ``largest`` channels may take, ascending, multiples of ``unit``.

    With ``l`` channels in ``K`` groups they are about ``base*l/K, (base+1)*l/K, ..., l``: the lower
    half is rounded, the upper half mirrors it, so the set is closed under ``c -> l + l_s - c`` for
    every l, K and base. Where l is at most the number of groups, every width is a candidate. None has fewer
    channels than ``least``, unless l itself does.
    """
    if groups < 1:
        raise BcnetError(f"groups is {groups}, but a space needs at least 1 group")
    if not 1 <= base <= groups:
        raise BcnetError(f"base is {base}, but it counts groups and must lie in 1..{groups}")
    if largest < 1:
        raise BcnetError(f"a width variable needs at least 1 channel, not {largest}")
    if unit < 1 or largest % unit:
        raise BcnetError(f"{largest} channels cannot be divided into units of {unit}")
    if largest > MAX_WIDTH:
        raise BcnetError(f"{largest} channels are too many: a width variable may have at most {MAX_WIDTH}")
    if least < 1:
        raise BcnetError(f"least is {least}, but a layer needs at least 1 channel")
    largest_unit = largest // unit
    least_unit = min(-(-least // unit), largest_unit)
    base = max(base, -(-least_unit * groups // largest_unit))
    count = groups - base + 1
    exact_base = largest_unit * base / groups
    smallest = min(max(1, math.floor(exact_base + 0.5)), largest_unit)
    if largest_unit - smallest + 1 <= count:
        return tuple(unit * c for c in range(smallest, largest_unit + 1))
    if count == 1:
        return (largest,)
    if count % 2 and (largest_unit - smallest) % 2:
        # The middle candidate is its own complement, so l + l_s must be even.
        smallest += 1 if exact_base > smallest or smallest == least_unit else -1
    step = (largest_unit - smallest) / (count - 1)
    lower = [math.floor(smallest + i * step + 0.5) for i in range((count + 1) // 2)]
    mirrored = {largest_unit + smallest - c for c in lower}
    return tuple(unit * c for c in sorted(mirrored.union(lower)))


@dataclass(frozen=True)
class WidthVariable:
    """Channel dimensions that share one width."""

    name: str
    candidates: tuple[int, ...]
    layers: tuple[str, ...] = ()
    unit: int = 1

    def __post_init__(self) -> None:
        try:
            object.__setattr__(self, "candidates", tuple(operator.index(c) for c in self.candidates))
        except TypeError:
            raise BcnetError(f"variable {self.name!r} has candidates that are not whole numbers") from None
        rising = all(a < b for a, b in zip(self.candidates, self.candidates[1:], strict=False))
        if not self.candidates or self.candidates[0] < 1 or not rising:
            raise BcnetError(
                f"variable {self.name!r} needs ascending candidates of at least 1, got {list(self.candidates)!r:.80}"
            )
        if self.candidates[-1] > MAX_WIDTH:
            raise BcnetError(f"variable {self.name!r:.80} is too wide: a width variable may have at most {MAX_WIDTH}")
        if self.unit < 1 or any(c % self.unit for c in self.candidates):
            unit = f"{self.unit!s:.20}"
            raise BcnetError(f"variable {self.name!r:.80} has candidates that are not multiples of its unit {unit}")

    @property
    def max(self) -> int:
        """``l``, the largest candidate: the width of the original network."""
        return self.candidates[-1]

    @property
    def base(self) -> int:
        """``l_s``, the smallest candidate: the base width."""
        return self.candidates[0]


class WidthSpace:
    """All widths: one candidate per variable. ``L = len(space)``; widths are int64 arrays (..., L).

    ``steps`` (L,) are what uniform scaling rounds widths to, the variables' units where left out.
    """

    def __init__(self, variables: Sequence[WidthVariable], steps: Sequence[int] | None = None, least: int = 1):
        if not variables:
            raise BcnetError("a width space needs at least one width variable")
        names = [v.name for v in variables]
        if len(set(names)) != len(names):
            raise BcnetError("the names of width variables must differ from each other")
        self.variables = tuple(variables)
        self.max: Widths = np.array([v.max for v in variables], dtype=np.int64)
        self.min: Widths = np.array([v.base for v in variables], dtype=np.int64)
        self._tables = [np.array(v.candidates, dtype=np.int64) for v in variables]
        self._steps = np.array([v.unit for v in variables] if steps is None else steps, dtype=np.int64)
        self._least = np.minimum(self.max, -(-least // self._steps) * self._steps)

    def __len__(self) -> int:
        return len(self.variables)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, WidthSpace) and self.variables == other.variables

    def __hash__(self) -> int:
        return hash(self.variables)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(v.name for v in self.variables)

    @property
    def steps(self) -> Widths:
        """What uniform scaling rounds the width of each variable to: (L,)."""
        return self._steps

    @property
    def layer_counts(self) -> NDArray[np.float64]:
        """How many layers have channels of each variable, at least one: (L,)."""
        return np.array([max(len(v.layers), 1) for v in self.variables], dtype=np.float64)

    @property
    def size(self) -> int:
        """The exact number of configurations."""
        return math.prod(len(v.candidates) for v in self.variables)

    def check(self, widths: ArrayLike) -> Widths:
        """``widths`` (..., L) as int64, each within 1..l of its variable, or a :class:`BcnetError`.

        Widths between candidates are allowed: a network can be built at any of them.
        """
        try:
            given = np.asarray(widths)
        except ValueError:
            raise BcnetError("widths must be rows of whole numbers of equal length") from None
        if given.ndim == 0 or not _holds_real_numbers(given):
            raise BcnetError(f"widths must be whole numbers, one per variable, got {widths!r:.80}")
        if given.shape[-1] != len(self):
            raise BcnetError(f"this space has {len(self)} width variables, but {given.shape[-1]} widths were given")
        if np.issubdtype(given.dtype, np.floating) and not (np.isfinite(given) & (given == np.floor(given))).all():
            raise BcnetError(f"widths must be whole numbers, one per variable, got {widths!r:.80}")
        units = np.array([v.unit for v in self.variables])
        bad = (given < 1) | (given > self.max) | (given % units != 0)
        if bad.any():
            place = tuple(int(i) for i in np.argwhere(bad)[0])
            variable = self.variables[place[-1]]
            steps = f" in multiples of {variable.unit}" if variable.unit > 1 else ""
            raise BcnetError(
                f"width {int(given[place])} of variable {variable.name!r} (number {place[-1] + 1}) "
                f"must lie in {variable.unit}..{variable.max}{steps}"
            )
        return given.astype(np.int64)

    def sample(self, rng: np.random.Generator, n: int = 1) -> Widths:
        """``n`` widths drawn uniformly, shape (n, L)."""
        counts = [len(table) for table in self._tables]
        return self.decode(rng.integers(0, counts, size=(n, len(self))))

    def decode(self, indices: ArrayLike) -> Widths:
        """Candidate indices (..., L) to widths (..., L)."""
        index = np.asarray(indices)
        if not np.issubdtype(index.dtype, np.integer) and index.size:
            raise BcnetError("indices of candidates must be whole numbers")
        index = index.astype(np.int64)
        if index.shape[-1:] != (len(self),):
            raise BcnetError(f"this space has {len(self)} width variables, so indices need that many columns")
        counts = np.array([len(t) for t in self._tables])
        if (index < 0).any() or (index >= counts).any():
            raise BcnetError("an index lies outside its variable's candidates")
        columns = [table[index[..., i]] for i, table in enumerate(self._tables)]
        return np.stack(columns, axis=-1)

    def floor(self, widths: ArrayLike) -> Widths:
        """The widest candidates that are at most ``widths`` (..., L); the narrowest where there is none."""
        rows = np.asarray(widths)
        columns = [
            np.asarray(v.candidates)[np.maximum(np.searchsorted(v.candidates, rows[..., i], side="right") - 1, 0)]
            for i, v in enumerate(self.variables)
        ]
        return np.stack(columns, axis=-1).astype(np.int64)

    def encode(self, widths: ArrayLike) -> NDArray[np.int64]:
        """Widths (..., L) to candidate indices (..., L); a width that is no candidate is an error."""
        given = self.check(widths)
        index = np.stack([np.searchsorted(t, given[..., i]) for i, t in enumerate(self._tables)], axis=-1)
        counts = np.array([len(t) for t in self._tables])
        bad = self.decode(np.minimum(index, counts - 1)) != given
        if bad.any():
            place = tuple(int(i) for i in np.argwhere(bad)[0])
            variable, width = self.variables[place[-1]], int(given[place])
            known = list(variable.candidates)
            raise BcnetError(f"width {width} is not a candidate of variable {variable.name!r}: {known}")
        return index

    def scaled(self, factor: float, multiple: int = 0) -> Widths:
        """Every width times ``factor``, rounded down as the paper does, or to the nearest ``multiple`` where that is
        given; at least one multiple, or the fewest channels that a layer of this space may keep: shape (L,)."""
        if not 0 < factor < math.inf:
            raise BcnetError(f"widths can be scaled by a positive number only, not by {factor}")
        if multiple:
            steps = np.array([math.lcm(v.unit, multiple) for v in self.variables])
            nearest = np.floor(self.max * factor / steps + 0.5 + 1e-9).astype(np.int64) * steps
            return np.minimum(np.maximum(nearest, steps), self.max)
        # A hair above, so that 0.7 * 10 is 7 although it is 6.999... in binary.
        whole = np.floor(self.max * factor / self._steps + 1e-9).astype(np.int64) * self._steps
        return np.clip(whole, self._least, self.max)

    def uniform(self, cost: Callable[[Widths], ArrayLike], limit: float, multiple: int = 0) -> Widths:
        """The widest uniform scaling whose ``cost`` (widths (n, L) -> (n,)) is at most ``limit``, rounded as
        :meth:`scaled` does: shape (L,)."""
        apart = 2 if multiple else 1  # the nearest multiple changes at half channels if the multiple is odd
        factors = np.unique(np.concatenate([np.arange(1, apart * m + 1) / (apart * m) for m in np.unique(self.max)]))
        low, high = 0, len(factors)
        while low < high:
            middle = (low + high) // 2
            if float(np.asarray(cost(self.scaled(factors[middle], multiple)[None]))[0]) <= limit:
                low = middle + 1
            else:
                high = middle
        if low == 0:
            smallest = float(np.asarray(cost(self.scaled(factors[0], multiple)[None]))[0])
            raise BcnetError(f"no uniform scaling costs at most {limit:,.0f}: the smallest costs {smallest:,.0f}")
        return self.scaled(factors[low - 1], multiple)

    def to_json(self) -> str:
        rows = [
            {"name": v.name, "candidates": list(v.candidates), "layers": list(v.layers), "unit": v.unit}
            for v in self.variables
        ]
        return json.dumps({"format": "bcnet.widthspace", "version": FORMAT_VERSION, "variables": rows})

    @classmethod
    def from_json(cls, text: str) -> WidthSpace:
        """The inverse of :meth:`to_json`; a text of another format or version is an error."""
        try:
            data: Any = json.loads(text)
        except (ValueError, RecursionError):
            raise BcnetError("this is not the JSON text of a width space") from None
        if not isinstance(data, dict) or data.get("format") != "bcnet.widthspace":
            raise BcnetError("this JSON does not describe a width space")
        version = data.get("version")
        if type(version) is not int or version != FORMAT_VERSION:
            raise BcnetError(
                f"this width space has format version {version!r:.40}, but this bcnet reads {FORMAT_VERSION}"
            )
        rows = data.get("variables")
        if not isinstance(rows, list):
            raise BcnetError("this width space lacks its list of variables")
        return cls([_variable(row) for row in rows])


def _variable(row: Any) -> WidthVariable:
    """One row of the JSON text, every entry of the type that :meth:`WidthSpace.to_json` writes."""
    match row:
        case {"name": str(name), "candidates": list(widths), "layers": list(layers), "unit": int(unit)}:
            if all(type(c) is int for c in (*widths, unit)) and all(isinstance(layer, str) for layer in layers):
                return WidthVariable(name, tuple(widths), tuple(layers), unit)
    raise BcnetError(
        "a variable of this width space needs a name, candidates and a unit in whole numbers, and names of layers"
    )


def _holds_real_numbers(given: NDArray[Any]) -> bool:
    """Whether an array holds integers or floats; whole numbers beyond int64 make an array of objects."""
    if given.dtype == object:
        return all(type(value) is int for value in given.flat)
    return given.dtype.kind in "iuf"
