"""A source in two halves that share no input, for decisions of which the second must not see what the first saw."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from bcnet.data.source import Batch, Source, check_start


@dataclass(frozen=True)
class Half:
    """One half of ``source``: of any two inputs that follow each other each half has one, as ``seed`` draws it.

    So inputs that are sorted by class are divided class by class, whatever the size of a batch. The source must give
    the same inputs in the same order on every pass. Batches that hold nothing of a half are left out; a source of one
    input cannot be divided, and both halves have it.
    """

    source: Source
    second: bool
    seed: int

    def __len__(self) -> int:
        """Batches in an epoch, at most."""
        return len(self.source)

    def batches(self, epoch: int, start: int = 0, device: torch.device | str | None = None) -> Iterator[Batch]:
        check_start(start, len(self))
        rng = np.random.default_rng([self.seed, 40])
        position, given, last, coin = 0, 0, None, False
        for last in self.source.batches(epoch, 0, device):
            mine = []
            for place in range(len(last[0])):
                coin = not coin if position % 2 else bool(rng.integers(2))
                position += 1
                if coin == self.second:
                    mine.append(place)
            if mine:
                given += 1
                if given > start:
                    at = torch.tensor(mine, device=last[0].device)
                    yield last[0][at], last[1][at.to(last[1].device)]
        if position == 1 and not given and last is not None:
            yield last


def halves(source: Source, seed: int) -> tuple[Half, Half]:
    """Both halves of ``source``."""
    return Half(source, False, seed), Half(source, True, seed)
