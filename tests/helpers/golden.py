"""The published widths, read from the text they come in."""

from __future__ import annotations

import re
from typing import Any


def golden_widths(entry: dict[str, Any]) -> list[int]:
    """Published widths in order of first use: ``out:a/b/...`` and ``out:[a,b c,d ...]`` are stages."""
    if "stages" in entry:
        stages = re.findall(r"(\d+):\[([^]]*)\]", entry["stages"])
        widths = [entry["stem"]]
    else:
        text = entry["widths"]
        if not isinstance(text, str):
            return list(text)
        stages = [(out, inner.replace("/", " ")) for out, _, inner in (part.partition(":") for part in text.split())]
        widths = []
    for out, inner in stages:
        first, *rest = [[int(w) for w in block.split(",")] for block in inner.split()] or [[]]
        widths += [*first, int(out), *(w for block in rest for w in block)]
    return widths
