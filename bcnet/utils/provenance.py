"""Where a figure comes from: command, commit, machine, versions and date, to be kept beside it."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any


def provenance(device: str = "cpu", packages: tuple[str, ...] = ("torch", "numpy")) -> dict[str, Any]:
    """Facts about this process, ready for JSON; ``device`` is where it computed."""
    return {
        "command": " ".join([_program(), *sys.argv[1:]]),
        "commit": commit(),
        "machine": _machine(device),
        "versions": {"python": platform.python_version(), **{name: package_version(name) for name in packages}},
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
    }


def _program() -> str:
    """What was run: a script of bcnet's own checkout as it is called from there, anything else by its name."""
    script, root = Path(sys.argv[0]).resolve(), Path(__file__).resolve().parents[2]
    own = script.suffix == ".py" and script.is_relative_to(root)
    return f"python {script.relative_to(root).as_posix()}" if own else script.name


def origin(facts: dict[str, Any]) -> str:
    """What :func:`provenance` found, apart from the command, as half a sentence for a page of results."""
    short = str(facts["commit"])[:12]
    return f"{facts['date'][:10]}, {facts['machine']}, torch {facts['versions']['torch']}, commit {short}"


def commit() -> str | None:
    """The commit of bcnet's own checkout, if it is one; ``$BCNET_COMMIT`` names it for a copy without history."""
    if os.environ.get("BCNET_COMMIT"):
        return os.environ["BCNET_COMMIT"]
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return found.stdout.strip() or None if found.returncode == 0 else None


def package_version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _machine(device: str) -> str:
    if device.startswith("cuda"):
        import torch

        return torch.cuda.get_device_name()
    return f"{platform.machine()}, {os.cpu_count()} cores"
