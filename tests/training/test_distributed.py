"""Two processes on the CPU end as one would, and say clearly what they lack."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import run_processes
import torch
import toy
import two_processes
from safetensors.torch import load_file

from bcnet.errors import BcnetError
from bcnet.run.pipeline import stages_of
from bcnet.run.session import Run
from bcnet.search import TrialStore
from bcnet.training import checkpoint, distributed

pytestmark = pytest.mark.usefixtures("one_thread")


def launch(folder: Path) -> None:
    root = Path(__file__).parents[2]
    helpers = root / "tests" / "helpers"
    environment = {**os.environ, "PYTHONPATH": f"{root}{os.pathsep}{helpers}", "OMP_NUM_THREADS": "1"}
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    run = subprocess.run(
        [sys.executable, *launcher, str(helpers / "two_processes.py"), str(folder)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert run.returncode == 0, run.stderr[-4000:]


def test_two_processes_end_as_one(tmp_path: Path) -> None:
    """Stopped on the way and resumed: the same paths, and the same weights, losses and scores within tolerance."""
    launch(tmp_path)
    ranks = [load_file(tmp_path / f"rank{rank}.safetensors") for rank in range(2)]
    for found in ranks:
        assert found.pop("world") == 2
        assert found.pop("waits_days") == 20  # while one works alone
        assert found.pop("images") == 8
        assert found.pop("steps") == toy.EPOCHS * toy.STEPS - (two_processes.STOP - 1)
    assert all(torch.equal(ranks[0][name], ranks[1][name]) for name in ranks[0])

    alone = distributed.Place(0, 1, torch.device("cpu"))
    _, wanted = two_processes.train(alone, tmp_path / "alone")
    assert wanted.pop("images") == 16
    assert wanted.pop("steps") == toy.EPOCHS * toy.STEPS
    assert torch.equal(ranks[0].pop("widths"), wanted.pop("widths"))
    for name, tensor in wanted.items():
        torch.testing.assert_close(
            ranks[0][name], tensor, rtol=1e-3, atol=1e-5, msg=lambda m, name=name: f"{name}: {m}"
        )

    # One checkpoint a step, written by one process: the numbers have no gaps and the two newest are kept.
    names = sorted(path.name for path in (tmp_path / "checkpoints").glob("*"))
    assert names == [f"checkpoint-{toy.EPOCHS * toy.STEPS - 1:06d}", f"checkpoint-{toy.EPOCHS * toy.STEPS:06d}"]
    assert checkpoint.unpack(*checkpoint.load(tmp_path / "checkpoints"))["step"] == toy.EPOCHS * toy.STEPS


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    """The same run by one process, and by two with either launcher."""
    found = {}
    for name in run_processes.LAUNCHERS:
        folder = tmp_path_factory.mktemp(name)
        done = run_processes.run(folder, name)
        assert done.returncode == 0, done.stderr[-4000:]
        assert done.stderr.count("trace: find the width variables") == 1  # one process speaks
        found[name] = Run(folder / name)
    return found


@pytest.mark.parametrize("launcher", ["torchrun", "accelerate"])
def test_a_run_of_two_processes_ends_as_one(finished: dict[str, Run], launcher: str) -> None:
    one, two = finished["one"], finished[launcher]
    assert all(two.done(stage) for stage in stages_of(two.recipe))
    assert two.read("search")["best"]["widths"] == one.read("search")["best"]["widths"]
    assert two.read("search")["best"]["score"] == pytest.approx(one.read("search")["best"]["score"], abs=0.01)
    for name in one.read("retrain")["networks"]:
        wanted, found = one.read(f"retrain/{name}"), two.read(f"retrain/{name}")
        assert [h["loss"] for h in found["history"]] == pytest.approx([h["loss"] for h in wanted["history"]], rel=1e-4)
        assert found["loss"] == pytest.approx(wanted["loss"], rel=1e-3)
        for key, tensor in one.tensors(f"retrain/{name}").items():
            torch.testing.assert_close(two.tensors(f"retrain/{name}")[key], tensor, rtol=1e-2, atol=1e-2, msg=key)
    with TrialStore(one.path("trials.sqlite")) as wanted_store, TrialStore(two.path("trials.sqlite")) as store:
        assert [t.widths for t in store.trials()] == [t.widths for t in wanted_store.trials()]


def said(text: str) -> str:
    """What a process printed, without the frames that a launcher may draw."""
    return " ".join(text.replace("│", " ").split())


def test_two_processes_mend_a_run_and_say_what_is_wrong_once(finished: dict[str, Run]) -> None:
    """The first holds the folder's lock for both."""
    run = finished["torchrun"]
    damaged = run.path("train.safetensors")
    data = bytearray(damaged.read_bytes())
    data[-9] ^= 1
    damaged.write_bytes(data)
    run.remove("report")
    before = {row["name"]: (row["widths"], row["score"]) for row in run.read("compare")["networks"]}
    again = run_processes.run(run.folder.parent, "torchrun", "--resume", str(run.folder))
    assert again.returncode == 0, again.stderr[-4000:]
    note = f"{damaged} is damaged (it was changed after it was written): train is done again"
    assert said(again.stderr).count(note) == 1
    assert run.done("report")
    after = {row["name"]: (row["widths"], row["score"]) for row in run.read("compare")["networks"]}
    assert after == before  # what followed from the supernet was made again, and came out the same
    with run.lock():
        kept_out = run_processes.run(run.folder.parent, "torchrun", "--resume", str(run.folder))
    assert kept_out.returncode != 0
    assert f"process {os.getpid()} is working in {run.folder}: wait until it ends" in said(kept_out.stderr)
    assert "RuntimeError" not in kept_out.stderr
    taken = run_processes.run(run.folder.parent, "torchrun")
    assert taken.returncode != 0
    assert f"{run.folder} holds a run already: resume it with --resume, or choose another folder" in said(taken.stderr)


def test_a_lost_process_is_told_from_other_errors(monkeypatch: Any) -> None:
    closed = RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:22963")
    assert not distributed.lost_another(closed)  # there is no other
    monkeypatch.setattr(distributed.dist, "is_initialized", lambda: True)
    assert distributed.lost_another(closed)
    assert not distributed.lost_another(RuntimeError("shapes do not fit"))


def test_alone() -> None:
    place = distributed.start(cpu=True)
    assert (place.shard, place.device) == ((0, 1), torch.device("cpu"))
    assert distributed.world() == (0, 1)


def test_more_processes_than_gpus(monkeypatch: Any) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(BcnetError) as error:
        distributed.start()
    assert str(error.value) == (
        "2 processes were launched on a machine with 1 GPUs: launch one for each GPU, or train on the CPU"
    )


def test_without_accelerate(monkeypatch: Any) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setitem(sys.modules, "accelerate", None)
    with pytest.raises(BcnetError) as error:
        distributed.start(cpu=True)
    assert str(error.value) == "training with several processes needs accelerate: pip install accelerate"
