"""Runs the tests of all Triton kernels on a GPU, and writes what came of each.

    python benchmarks/device_tests.py --out docs/results/device-tests.json [--device cpu]

The same tests run in Triton's interpreter with the rest of the suite.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
from parts import provenance

TESTS = Path(__file__).parents[1] / "tests"
FILES = ("accel/test_kernels.py", "accel/test_enumeration_kernels.py")


class Outcomes:
    """What pytest reports, kept; nothing is printed, which is what needs its optional parts."""

    def __init__(self) -> None:
        self.found: list[dict[str, Any]] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or not report.passed:
            row = {"test": report.nodeid, "outcome": report.outcome, "seconds": round(report.duration, 2)}
            self.found.append(row if report.passed else {**row, "why": str(report.longrepr)[-1500:]})
            print(f"{row['outcome']:8s} {row['seconds']:7.2f} s {row['test']}", flush=True)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cuda", choices=["cpu", "cuda"])
    args = parser.parse_args(arguments)
    os.environ["BCNET_DEVICE"] = args.device
    outcomes = Outcomes()
    where = [str(TESTS / name) for name in FILES]
    status = pytest.main([*where, "-p", "no:terminal", "-p", "no:cacheprovider", "-o", "addopts="], plugins=[outcomes])
    versions = {"torch": torch.__version__, "triton": triton.__version__}
    done = {"provenance": provenance(), "versions": versions, "status": int(status), "tests": outcomes.found}
    args.out.write_text(json.dumps(done, indent=1))
    failed = [row["test"] for row in outcomes.found if row["outcome"] == "failed"]
    print(f"{len(outcomes.found) - len(failed)} of {len(outcomes.found)} passed", *failed, sep="\n")


if __name__ == "__main__":
    main()
