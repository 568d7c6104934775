"""Runs of a tiny network that tests of several modules begin with."""

from __future__ import annotations

from pathlib import Path

import pytest
import tinyrun

from bcnet.run.session import Run


@pytest.fixture(scope="module")
def untrained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, tinyrun.Notes]:
    """A run of a network that knows nothing, up to its training, and what it said."""
    notes = tinyrun.Notes()
    run = tinyrun.trained(tmp_path_factory.mktemp("untrained"))
    return tinyrun.work(run, until="given", listener=notes), notes


@pytest.fixture(scope="module")
def weights(untrained: tuple[Run, tinyrun.Notes]) -> Path:
    """Weights of the tiny network that know something."""
    return untrained[0].path("given.safetensors")
