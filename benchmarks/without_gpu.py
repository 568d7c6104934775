"""What stands in for the kernels where there is no GPU, and what they are compared with where there is one."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "tests" / "helpers"))

import reference_kernels as reference

__all__ = ["reference"]
