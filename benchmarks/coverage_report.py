"""docs/results/coverage.md from the rows of coverage.json."""

from __future__ import annotations

from typing import Any


def markdown(results: dict[str, Any]) -> str:
    return ""
