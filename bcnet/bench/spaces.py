"""The spaces a table covers: every widths of a small space, numbered, keyed and costed.

A *key* names widths as the released Channel-Bench-Macro tables do: one digit per variable, the
number of the candidate counted from 1 ("1234114"). An *index* counts the keys in ascending order
from 0. The two released spaces, ``mobilenet`` and ``resnet``, come with their exact costs.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike, NDArray

from bcnet.errors import BcnetError
from bcnet.space.cost import Cost, QuadraticCost
from bcnet.space.widths import Widths, WidthSpace, WidthVariable, candidates

DIGITS = "123456789abcdefghijklmnopqrstuvwxyz"
MAX_SIZE = 2**24

Indices = NDArray[np.int64]


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
        """Every widths of the space in the order of the index, (size, L)."""
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
    """A width's share of the index, by width: (l + 1,); so negative for no candidate that any sum is."""
    ranks = np.full(variable.max + 1, -MAX_SIZE, dtype=np.int64)
    ranks[list(variable.candidates)] = stride * np.arange(len(variable.candidates))
    return ranks


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


def _mobilenet_flops(c0: int, h1: int, h2: int, h3: int, c4: int, h5: int, c6: int) -> int:
    at_16 = 27 * c0 + (2 * c0 + 9) * (h1 + h2) + c0 * h3
    at_8 = (9 + c4) * h3 + (2 * c4 + 9) * h5 + c4 * c6
    return 16 * 16 * at_16 + 8 * 8 * at_8 + 10 * c6


def _mobilenet_params(c0: int, h1: int, h2: int, h3: int, c4: int, h5: int, c6: int) -> int:
    blocks = (2 * c0 + 13) * (h1 + h2) + (c0 + c4 + 13) * h3 + 4 * c4 + (2 * c4 + 13) * h5
    return 33 * c0 + blocks + c4 * c6 + 12 * c6 + 10


def _resnet_flops(c0: int, m1: int, m2: int, m3: int, c4: int, m5: int, m6: int) -> int:
    at_16 = 27 * c0 + 18 * c0 * (m1 + m2)
    at_8 = 9 * (c0 + c4) * m3 + 18 * c4 * (m5 + m6)
    return 16 * 16 * at_16 + 8 * 8 * at_8 + 10 * c4


def _resnet_params(c0: int, m1: int, m2: int, m3: int, c4: int, m5: int, m6: int) -> int:
    blocks = (18 * c0 + 2) * (m1 + m2) + (9 * c0 + 9 * c4 + 2) * m3 + (18 * c4 + 2) * (m5 + m6)
    return 33 * c0 + blocks + 16 * c4 + 10


_HIDDEN = ("expand.conv", "expand.bn", "depthwise.conv", "depthwise.bn", "project.conv")
_AROUND = ("expand.conv", "project.conv", "project.bn")
_INSIDE = ("conv1.conv", "conv1.bn", "conv2.conv")
_OUTSIDE = ("conv1.conv", "conv2.conv", "conv2.bn")


def _block(number: int, *layers: str) -> tuple[str, ...]:
    return tuple(f"block{number}.body.{layer}" for layer in layers)


def _quarters(**variables: tuple[int, tuple[str, ...]]) -> list[WidthVariable]:
    """Variables by name, from their channels and their layers."""
    return [WidthVariable(name, candidates(full, groups=4), layers) for name, (full, layers) in variables.items()]


MOBILENET = BenchSpace(
    "mobilenet",
    _quarters(
        c0=(128, ("stem.conv", "stem.bn", *_block(1, *_AROUND), *_block(2, *_AROUND), *_block(3, "expand.conv"))),
        h1=(768, _block(1, *_HIDDEN)),
        h2=(768, _block(2, *_HIDDEN)),
        h3=(768, _block(3, *_HIDDEN)),
        c4=(256, (*_block(3, "project.conv", "project.bn"), *_block(4, *_AROUND), "head.conv")),
        h5=(1536, _block(4, *_HIDDEN)),
        c6=(1024, ("head.conv", "head.bn", "classifier")),
    ),
    {"flops": quadratic(_mobilenet_flops, 7), "params": quadratic(_mobilenet_params, 7)},
    "Results_MobileNet.json",
    "f640474d8ff3ff2231d0c45986bb0f10af291545316342fb009952e7641908e0",
)
RESNET = BenchSpace(
    "resnet",
    _quarters(
        c0=(256, ("stem.conv", "stem.bn", *_block(1, *_OUTSIDE), *_block(2, *_OUTSIDE), *_block(3, "conv1.conv"))),
        m1=(256, _block(1, *_INSIDE)),
        m2=(256, _block(2, *_INSIDE)),
        m3=(512, _block(3, *_INSIDE)),
        c4=(512, (*_block(3, "conv2.conv", "conv2.bn"), *_block(4, *_OUTSIDE), *_block(5, *_OUTSIDE), "classifier")),
        m5=(512, _block(4, *_INSIDE)),
        m6=(512, _block(5, *_INSIDE)),
    ),
    {"flops": quadratic(_resnet_flops, 7), "params": quadratic(_resnet_params, 7)},
    "Results_ResNet.json",
    "bf13bcaea3f2076f2c1bfbf5c2fee044aafe0385fae6a0d64c433b1d7f5a7520",
)
SPACES = {space.name: space for space in (MOBILENET, RESNET)}


def get_space(space: str | WidthSpace) -> BenchSpace:
    """A released space by its name, a space in a JSON file by its path, or any width space as a BenchSpace."""
    if isinstance(space, BenchSpace):
        return space
    if isinstance(space, WidthSpace):
        return BenchSpace("custom", space.variables, getattr(space, "costs", None))
    if isinstance(space, str) and space in SPACES:
        return SPACES[space]
    if str(space).endswith(".json"):
        return _read_space(Path(space))
    near = difflib.get_close_matches(str(space).lower(), SPACES, n=1, cutoff=0.5)
    hint = f" (did you mean {near[0]!r}?)" if near else ""
    raise BcnetError(
        f"there is no space {str(space)!r:.60}{hint}: name {', '.join(SPACES)} or the .json file of a space"
    )


def _read_space(path: Path) -> BenchSpace:
    try:
        text = path.read_text(encoding="utf-8")
        return BenchSpace(path.stem, WidthSpace.from_json(text).variables)
    except BcnetError as error:
        raise BcnetError(f"{path} is no file of a space: {error}") from None
    except OSError as error:
        raise BcnetError(f"cannot read the space {path}: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise BcnetError(f"{path} is no file of a space: it is not text") from None
