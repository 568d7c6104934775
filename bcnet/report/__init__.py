"""The page a person looks at: one self-contained HTML file about a run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from bcnet.report.data import Curve, Figures, ReportData
from bcnet.report.page import render

if TYPE_CHECKING:
    from bcnet.runfolder import RunFolder

__all__ = ["Curve", "Figures", "ReportData", "render", "write_report"]


def write_report(run: RunFolder | str | Path, out: str | Path | None = None) -> Path:
    """Write the report of a run to ``out``, or to report.html in its folder."""
    from bcnet.errors import BcnetError
    from bcnet.runfolder import RunFolder

    opened = run if isinstance(run, RunFolder) else RunFolder.open(run)
    path = opened.path("report.html") if out is None else Path(out)
    page = render(ReportData.from_run(opened))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(page, "utf-8")
    except OSError as error:
        raise BcnetError(f"cannot write {path}: {error.strerror or error}") from None
    return path
