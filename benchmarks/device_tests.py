"""Runs the tests of all Triton kernels on a GPU, many at once, and writes what came of each.

    python benchmarks/device_tests.py --out docs/results/device-tests.json [--processes 14] [--seconds 90]

A test spends most of its time compiling kernels, on one core; so every test has a process of its own. The file is
written after each of them, and names those that there was no time for. The same tests run in Triton's interpreter
with the rest of the suite.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import torch
import triton
from parts import provenance

TESTS = Path(__file__).parents[1] / "tests"
WHERE = (
    "accel/test_kernels.py",
    "accel/test_enumeration_kernels.py",
    "accel/test_shared_convolution.py::test_sums_statistics_and_results",
)
PYTEST = (sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-o", "addopts=", "--noconftest", "-q")
PATH = os.pathsep.join([str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])])
ENVIRONMENT = {**os.environ, "PYTHONPATH": PATH}


def collect(chosen: str) -> list[str]:
    """The tests by their names for pytest, those whose names hold ``chosen``."""
    command = [*PYTEST, "--collect-only", *(str(TESTS / one) for one in WHERE)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=TESTS.parent, env=ENVIRONMENT)
    found = [line for line in done.stdout.splitlines() if "::" in line and chosen in line]
    if not found:
        raise SystemExit(f"pytest found no tests: {(done.stdout + done.stderr)[-500:]}")
    return found


def run(test: str, device: str, end: float) -> dict[str, Any]:
    """What came of a test that may run until ``end``, and why where it failed."""
    begun = time.monotonic()
    if end - begun < 1:
        return {"test": test, "outcome": "not reached", "seconds": 0.0}
    environment = {**ENVIRONMENT, "BCNET_DEVICE": device}
    process = subprocess.Popen(
        [*PYTEST, "--tb=short", test], env=environment, cwd=TESTS.parent, text=True, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    try:
        said, _ = process.communicate(timeout=end - begun)
        outcome = "passed" if process.returncode == 0 else "failed"
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # with the process that runs the kernels
        said, _ = process.communicate()
        outcome = "not finished"
    row = {"test": test, "outcome": outcome, "seconds": round(time.monotonic() - begun, 2)}
    return row if outcome == "passed" else {**row, "why": said[-1500:]}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cuda", choices=["cpu", "cuda"])
    parser.add_argument("--processes", type=int, default=14)
    parser.add_argument("--seconds", type=float, default=300.0, help="after which no test runs any more")
    parser.add_argument("--only", default="", help="a part of the names of the tests")
    args = parser.parse_args(arguments)
    end = time.monotonic() + args.seconds
    versions = {"torch": torch.__version__, "triton": triton.__version__}
    rows: list[dict[str, Any]] = []
    with ThreadPoolExecutor(args.processes) as pool:
        for future in as_completed([pool.submit(run, test, args.device, end) for test in collect(args.only)]):
            rows.append(future.result())
            print("{outcome:12s} {seconds:7.2f} s {test}".format(**rows[-1]), flush=True)
            done = {"provenance": provenance(args.device), "versions": versions, "device": args.device, "tests": rows}
            args.out.write_text(json.dumps(done, indent=1) + "\n")
    print(sum(row["outcome"] == "passed" for row in rows), "of", len(rows), "passed")
    for row in rows:
        if row["outcome"] == "failed":
            print(row["test"], row["why"], sep="\n")


if __name__ == "__main__":
    main()
