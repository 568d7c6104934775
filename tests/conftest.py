"""Shared by all tests: hypothesis draws the same examples in every run, so that a red run can be repeated."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import pytest
import torch
from hypothesis import settings
from traced import space_of

from bcnet.models.load import LoadedModel

settings.register_profile("bcnet", deadline=None, derandomize=True)
settings.load_profile("bcnet")


def _define_missing_operators() -> None:
    """The torchvision of the package index is made for CUDA: on a CPU-only torch it lacks its compiled operators and
    could not be imported. No test runs them, so that they are defined is enough."""
    try:
        made_for_cuda = sys.platform == "linux" and "+cpu" not in version("torchvision")
    except PackageNotFoundError:
        return
    if made_for_cuda and torch.version.cuda is None:
        for name in ("nms", "qnms"):
            _OPERATORS.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


_OPERATORS = torch.library.Library("torchvision", "FRAGMENT")
_define_missing_operators()


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


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Say at the end what was left out, and how to get it."""
    reasons = [report.longrepr[2] for report in terminalreporter.stats.get("skipped", ())]
    kinds = Counter("GPU" if "GPU" in r else "data" if _names_data(r) else "package" for r in reasons)
    words = {
        "GPU": "need a GPU",
        "data": "need data that is not part of the repository",
        "package": "need packages or a browser that are not installed (`make test-all` installs the packages)",
    }
    parts = [f"{kinds[kind]} {words[kind]}" for kind in words if kinds[kind]]
    terminalreporter.write_line(f"left out: {'; '.join(parts)}" if parts else "left out: nothing")


def _names_data(reason: str) -> bool:
    return any(words in reason for words in ("not part of the repository", "is not there", "are not at"))
