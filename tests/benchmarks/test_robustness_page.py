"""The page on robustness names the tests that keep each cure: all of them must be there."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ATTACKS = json.loads((ROOT / "docs" / "results" / "attacks.json").read_text())
NAMED = sorted({test for rows in ATTACKS.values() for tests in rows.values() for test in tests})


@pytest.mark.parametrize("test", NAMED)
def test_every_test_that_the_page_names_is_there(test: str) -> None:
    file, _, name = test.partition("::")
    assert re.search(rf"^def {name}\(", (ROOT / "tests" / file).read_text(), re.MULTILINE)
    assert f"`{test}`" in (ROOT / "docs" / "results" / "robustness.md").read_text()
