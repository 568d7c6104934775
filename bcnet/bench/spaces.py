"""The spaces a table covers: every configuration of a small space, numbered, keyed and costed.

A *key* names widths as the released Channel-Bench-Macro tables do: one digit per variable, the
number of the candidate counted from 1 ("1234114"). An *index* counts the keys in ascending order
from 0. The two released spaces, ``mobilenet`` and ``resnet``, are those of two networks of the zoo.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from bcnet.errors import BcnetError, did_you_mean
from bcnet.space.cost import Cost
from bcnet.space.widths import Indices, Widths, WidthSpace, WidthVariable
from bcnet.utils.files import read_regular

DIGITS = "123456789abcdefghijklmnopqrstuvwxyz"
MAX_SIZE = 2**24
LARGEST_FILE = 2**24  # bytes; far more than a small space needs


class BenchSpace(WidthSpace):
    """A width space small enough to be tabled.

    ``costs`` holds what is known of "flops" and "params"; a table must agree with it. ``file`` and
    ``sha256`` name the released table of the space, where there is one.
    """

    def __init__(
        self,
        name: str,
        variables: Sequence[WidthVariable],
        costs: Mapping[str, Cost] | None = None,
        file: str | None = None,
        sha256: str | None = None,
    ):
        super().__init__(variables)
        if self.size > MAX_SIZE:
            raise BcnetError(f"space {name!r} has {self.size:,} widths, but a table holds at most {MAX_SIZE:,}")
        self.counts = np.array([len(v.candidates) for v in variables], dtype=np.int64)
        if self.counts.max() > len(DIGITS):
            raise BcnetError(f"space {name!r} has a variable of over {len(DIGITS)} candidates, too many for a key")
        self.name = name
        self.costs = dict(costs or {})
        self.file = file
        self.sha256 = sha256
        self._strides = np.append(np.cumprod(self.counts[:0:-1])[::-1], 1)
        self._ranks = [_ranks(v, int(s)) for v, s in zip(variables, self._strides, strict=True)]

    def index(self, widths: ArrayLike) -> Indices:
        """Widths (..., L) to indices (...,); a width that is no candidate is an error."""
        given = widths if isinstance(widths, np.ndarray) else self.check(widths)
        plain = np.issubdtype(given.dtype, np.integer) and given.shape[-1:] == (len(self),)
        if plain and (given >= 0).all() and (given <= self.max).all():
            index = np.asarray(sum(ranks[given[..., i]] for i, ranks in enumerate(self._ranks)))
            if (index >= 0).all():
                return index
        return self.encode(given) @ self._strides  # exact about what is wrong, and six times slower

    def widths(self, index: ArrayLike) -> Widths:
        """Indices (...,) to widths (..., L)."""
        return self.decode(self._digits(index))

    def all_widths(self) -> Widths:
        """Every configuration of the space in the order of the index, (size, L)."""
        return self.widths(np.arange(self.size))

    def keys(self, index: ArrayLike) -> NDArray[np.str_]:
        """Indices (...,) to keys (...,)."""
        digits = self._digits(index)
        letters = np.array(list(DIGITS))[digits]
        return np.ascontiguousarray(letters).view(f"<U{len(self)}")[..., 0]

    def parse(self, keys: str | Sequence[str] | NDArray[np.str_]) -> Indices:
        """A key to its index, or keys (n,) to indices (n,); a text that is no key of this space is an error."""
        if isinstance(keys, str):
            return self.parse([keys])[0]
        texts = keys.tolist() if isinstance(keys, np.ndarray) else list(keys)
        if all(isinstance(key, str) and len(key) == len(self) and key.isascii() for key in texts):
            letters = np.frombuffer("".join(texts).encode(), dtype=np.uint8)
            digits = _DIGIT_OF[letters].reshape(len(texts), len(self))
            if ((digits >= 0) & (digits < self.counts)).all():
                return digits @ self._strides
        wrong = next(key for key in texts if not self._is_key(key))
        raise BcnetError(
            f"{wrong!r:.60} is no key of space {self.name!r}: a key is {len(self)} digits, "
            f"each at most the number of its variable's candidates, {self.counts.tolist()}"
        )

    def _digits(self, index: ArrayLike) -> Indices:
        """Indices (...,) to candidate indices (..., L)."""
        given = np.asarray(index)
        if not np.issubdtype(given.dtype, np.integer) or ((given < 0) | (given >= self.size)).any():
            raise BcnetError(f"an index of space {self.name!r} is a whole number in 0..{self.size - 1}")
        return given[..., None] // self._strides % self.counts

    def _is_key(self, key: object) -> bool:
        if not isinstance(key, str) or len(key) != len(self):
            return False
        return all(0 <= DIGITS.find(digit) < count for digit, count in zip(key, self.counts, strict=True))


_DIGIT_OF = np.full(256, -1, dtype=np.int64)
_DIGIT_OF[[ord(digit) for digit in DIGITS]] = np.arange(len(DIGITS))


def _ranks(variable: WidthVariable, stride: int) -> Indices:
    """What each width adds to the index, (l + 1,); for widths that are no candidates a number so low that every sum
    with it is negative."""
    ranks = np.full(variable.max + 1, -MAX_SIZE, dtype=np.int64)
    ranks[list(variable.candidates)] = stride * np.arange(len(variable.candidates))
    return ranks


class Released(NamedTuple):
    """A released table: its network in the zoo, the paper's letters for its variables, its file and checksum."""

    network: str
    letters: tuple[str, ...]
    file: str
    sha256: str


RELEASED = {
    "mobilenet": Released(
        "channel_bench_mobilenet",
        ("c0", "h1", "h2", "h3", "c4", "h5", "c6"),
        "Results_MobileNet.json",
        "f640474d8ff3ff2231d0c45986bb0f10af291545316342fb009952e7641908e0",
    ),
    "resnet": Released(
        "channel_bench_resnet",
        ("c0", "m1", "m2", "m3", "c4", "m5", "m6"),
        "Results_ResNet.json",
        "bf13bcaea3f2076f2c1bfbf5c2fee044aafe0385fae6a0d64c433b1d7f5a7520",
    ),
}


@cache
def _released(name: str) -> BenchSpace:
    """A released space: variables, layers and costs are those of its network, traced."""
    from bcnet.models.load import load_model

    network, letters, file, sha256 = RELEASED[name]
    traced = load_model(f"zoo:{network}").space(groups=4)
    variables = [replace(v, name=letter) for v, letter in zip(traced.variables, letters, strict=True)]
    costs = {name: traced.costs[name] for name in ("flops", "params")}
    return BenchSpace(name, variables, costs, file, sha256)


def get_space(space: str | WidthSpace) -> BenchSpace:
    """A released space by its name, a space in a JSON file by its path, or any width space as a BenchSpace."""
    if isinstance(space, BenchSpace):
        return space
    if isinstance(space, WidthSpace):
        return BenchSpace("custom", space.variables, getattr(space, "costs", None))
    if isinstance(space, str) and space in RELEASED:
        return _released(space)
    if str(space).endswith(".json"):
        return _read_space(Path(space))
    guess = did_you_mean(space, RELEASED) or f"name {', '.join(RELEASED)} or the .json file of a space"
    raise BcnetError(f"there is no space {str(space)!r:.60}: {guess}")


def _read_space(path: Path) -> BenchSpace:
    try:
        text = read_regular(path, LARGEST_FILE).decode("utf-8")
        return BenchSpace(path.stem, WidthSpace.from_json(text).variables)
    except BcnetError as error:
        raise BcnetError(f"{path} is no file of a space: {error}") from None
    except OSError as error:
        raise BcnetError(f"cannot read the space {path}: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise BcnetError(f"{path} is no file of a space: it is not text") from None
