"""Slimming from Python by several processes: each learns from its share, and all come to what one comes to."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import slim_processes

from bcnet.run.session import Run
from bcnet.search import TrialStore

HELPER = Path(slim_processes.__file__)
TWO = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


def _slim(out: Path, *launcher: str) -> Run:
    paths = os.pathsep.join([str(HELPER.parents[2]), str(HELPER.parent)])
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, *launcher, str(HELPER), str(out)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    return Run.open(out)


def test_two_processes_slim_as_one(tmp_path: Path) -> None:
    pytest.importorskip("accelerate", reason="several processes need accelerate")
    one, two = _slim(tmp_path / "one"), _slim(tmp_path / "two", *TWO)
    batch = slim_processes.BATCH
    assert batch // 2 not in json.loads((tmp_path / "one-0.json").read_text())
    for rank in (0, 1):  # scores heal by whole batches, training is shared
        assert {batch // 2, batch} <= set(json.loads((tmp_path / f"two-{rank}.json").read_text()))
    assert two.read("search")["rules"].keys() == one.read("search")["rules"].keys()
    assert two.read("race")["finalists"].keys() == one.read("race")["finalists"].keys()
    probes = [{probe["lr"]: probe["loss"] for probe in run.read("rate")["probes"]} for run in (one, two)]
    assert probes[1] == pytest.approx(probes[0], rel=0.02)
    for run in (one, two):
        with TrialStore(run.path("trials.sqlite"), read_only=True) as store:
            assert len(store.trials()) == run.read("search")["evaluations"]
