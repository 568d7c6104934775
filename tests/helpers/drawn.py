"""What a source of data draws, for tests of data."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor

from bcnet.data import Source
from bcnet.errors import BcnetError


def batches(source: Source, epoch: int = 0, start: int = 0) -> list[tuple[Tensor, Tensor]]:
    return list(source.batches(epoch, start))


def same(one: Iterable[tuple[Tensor, Tensor]], other: Iterable[tuple[Tensor, Tensor]]) -> bool:
    pairs = list(zip(one, other, strict=True))
    return bool(pairs) and all(torch.equal(a[0], b[0]) and torch.equal(a[1], b[1]) for a, b in pairs)


def labels_of(source: Source, epoch: int = 0) -> list[int]:
    return [int(label) for _, y in source.batches(epoch) for label in y]


def pairs(source: Source | None, epoch: int = 0, start: int = 0) -> list[tuple[Tensor, Tensor]]:
    """The batches of a source that must be there."""
    assert source is not None
    return batches(source, epoch, start)


def message(action: Any) -> str:
    """What a mistake is answered with."""
    with pytest.raises(BcnetError) as error:
        action()
    return str(error.value)
