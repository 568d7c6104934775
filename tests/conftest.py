"""Shared by all tests: hypothesis draws the same examples in every run, so that a red run can be repeated."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings
from traced import space_of

from bcnet.models.load import LoadedModel

settings.register_profile("bcnet", deadline=None, derandomize=True)
settings.load_profile("bcnet")


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Another number of threads adds in another order, and the last bits differ."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def traced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A network is traced once for all tests."""
    monkeypatch.setattr(LoadedModel, "space", space_of)
