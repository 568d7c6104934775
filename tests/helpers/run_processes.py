"""Runs the command line in one process, or in two with either launcher, in tests/training/test_distributed.py."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import tinyrun
import yaml

HERE = Path(__file__).parent
LAUNCHERS = {
    "one": ["-m", "bcnet"],
    "torchrun": ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(HERE / "late_process.py")],
    "accelerate": [
        *("-m", "accelerate.commands.launch", "--cpu", "--num_processes", "2", "--num_machines", "1"),
        *("--mixed_precision", "no", "--dynamo_backend", "no", "-m", "bcnet"),
    ],
}


def run(folder: Path, launcher: str, *more: str) -> subprocess.CompletedProcess[str]:
    """``bcnet run`` of the tiny recipe into folder/LAUNCHER."""
    root = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    recipe = folder / "recipe.yaml"
    recipe.write_text(yaml.safe_dump({"version": 1, **tinyrun.recipe(folder).to_dict()}))
    given = more or ("--recipe", str(recipe), "--out", str(folder / launcher))
    command = [sys.executable, *LAUNCHERS[launcher], "run", *given, "--trust", "--device", "cpu"]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, cwd=folder)
