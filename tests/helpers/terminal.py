"""``bcnet`` on the command line, for tests: in this process or in one of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from typing import Any

from click.testing import Result
from typer.testing import CliRunner

from bcnet.cli import app


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments), prog_name="bcnet")


def answer(*arguments: str) -> dict[str, Any]:
    """What a command that succeeds says with ``--json``."""
    result = run(*arguments, "--json")
    assert result.exit_code == 0, result.stderr
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def hear_ctrl_c() -> None:
    """For ``preexec_fn``: what a shell starts in the background ignores Ctrl-C, and so does all that it starts."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def shell(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """``bcnet`` in a process of its own, without a terminal."""
    return subprocess.run(
        [sys.executable, "-m", "bcnet", *arguments],
        capture_output=True,
        text=True,
        encoding="utf-8",
        env=os.environ | {"PYTHONIOENCODING": "utf-8"} | environment,
    )


def cells(output: str) -> list[list[str]]:
    """The rows of all tables in ``output``."""
    return [[cell.strip() for cell in line.strip("│").split("│")] for line in output.splitlines() if line[:1] == "│"]
