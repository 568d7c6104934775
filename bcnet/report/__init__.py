"""The page a person looks at: one self-contained HTML file, made from plain data."""

from bcnet.report.data import Curve, Figures, ReportData
from bcnet.report.page import render

__all__ = ["Curve", "Figures", "ReportData", "render"]
