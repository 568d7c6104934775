"""Checks of Triton kernels: in Triton's interpreter or, where BCNET_DEVICE is cuda, on a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

EXACT = """
import torch
torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
"""


def run_kernels(code: str, *arguments: str) -> None:
    """Run a script in a process of its own: the interpreter must be chosen before Triton is imported."""
    path = [str(Path(__file__).parents[2]), str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path)}
    if environment.get("BCNET_DEVICE", "cpu") == "cpu":
        environment["TRITON_INTERPRET"] = "1"
    command = [sys.executable, "-c", EXACT + code, *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-4000:]
