"""Nothing is lost when a training stops, however it stops."""

from __future__ import annotations

import errno
import itertools
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import toy
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from bcnet.data import from_loaders
from bcnet.data.source import LoaderSource, Source
from bcnet.errors import BcnetError, NotFinite
from bcnet.supernet.paths import PathSampling
from bcnet.supernet.training import train_supernet
from bcnet.training import checkpoint
from bcnet.training.task import Task

ALL = toy.EPOCHS * toy.STEPS


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: Any) -> Path:
    """The checkpoints of a run that was never stopped."""
    folder: Path = tmp_path_factory.mktemp("whole")
    toy.train(folder)
    return folder


@pytest.mark.parametrize("step", [1, 2, toy.STEPS, toy.STEPS + 1, ALL])
def test_a_resumed_run_is_the_uninterrupted_one(tmp_path: Path, whole: Path, step: int) -> None:
    """Weights, optimizer, averages, loss log and history, bit for bit, whichever step it was stopped in."""
    with pytest.raises(toy.Stopped):
        train_supernet(toy.supernet(), toy.source(), toy.config(), folder=tmp_path, progress=toy.stop_at(step))
    net, trained = toy.train(tmp_path)
    toy.same(tmp_path, whole)
    again, once_more = toy.train(tmp_path)
    assert trained.history == once_more.history
    assert len(trained.history) == toy.EPOCHS
    assert len(trained.log) == 4 * ALL
    for mine, theirs in zip(net.parameters(), again.parameters(), strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("step", [3, 4])
def test_a_run_stopped_within_a_pair_of_alternating_steps_is_resumed_fairly(tmp_path: Path, step: int) -> None:
    alternating = toy.config(PathSampling(sides="alternate"))
    train_supernet(toy.supernet(), toy.source(), alternating, folder=tmp_path / "whole")
    with pytest.raises(toy.Stopped):
        train_supernet(toy.supernet(), toy.source(), alternating, folder=tmp_path / "parts", progress=toy.stop_at(step))
    trained = train_supernet(toy.supernet(), toy.source(), alternating, folder=tmp_path / "parts")
    toy.same(tmp_path / "parts", tmp_path / "whole")
    rows = trained.log.widths.reshape(-1, 2, 2, trained.log.variables)  # pairs, steps, paths, widths
    assert (rows[:, 0] == rows[:, 1]).all()


@pytest.mark.parametrize("optimizer", ["sgd", "rmsprop"])
def test_resume_with_a_loader_of_ones_own(tmp_path: Path, optimizer: Any) -> None:
    """A DataLoader that shuffles and adds noise from torch's and numpy's global random numbers."""

    class Noisy(TensorDataset):
        def __getitem__(self, index: int) -> tuple[Tensor, ...]:
            x, y = super().__getitem__(index)
            return x + 0.1 * torch.randn(1) + 0.1 * float(np.random.rand()), y  # noqa: NPY002, as users do

    def loader() -> Source:
        return from_loaders(DataLoader(Noisy(*toy.images()), 16, shuffle=True), [toy.images()]).train

    settings = toy.config(optimizer=optimizer, lr=0.02)
    train_supernet(toy.supernet(), loader(), settings, folder=tmp_path / "whole")
    with pytest.raises(toy.Stopped):
        train_supernet(toy.supernet(), loader(), settings, folder=tmp_path / "parts", progress=toy.stop_at(9))
    train_supernet(toy.supernet(), loader(), settings, folder=tmp_path / "parts")
    toy.same(tmp_path / "parts", tmp_path / "whole")


def newest(folder: Path) -> str:
    return max((path.name for path in folder.glob("checkpoint-*")), default="")


RUN = "import sys, toy, torch; torch.set_num_threads(1); print('start', flush=True); toy.train(sys.argv[1])"


def test_sigkill_at_random_moments(tmp_path: Path, whole: Path) -> None:
    rng = random.Random(1)
    root = Path(__file__).parents[2]
    for _ in range(2):
        environment = {**os.environ, "PYTHONPATH": f"{root}{os.pathsep}{root / 'tests' / 'helpers'}"}
        process = subprocess.Popen(
            [sys.executable, "-c", RUN, str(tmp_path)], stdout=subprocess.PIPE, text=True, env=environment
        )
        assert process.stdout is not None
        assert process.stdout.readline() == "start\n"
        began, deadline = newest(tmp_path), time.monotonic() + 300
        while newest(tmp_path) == began and time.monotonic() < deadline:
            time.sleep(0.002)
        time.sleep(rng.uniform(0, 0.05))
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
        process.stdout.close()
    toy.train(tmp_path)
    toy.same(tmp_path, whole)


def batches(bad: int) -> list[tuple[Tensor, Tensor]]:
    """Six batches of 16, one of them with a pixel that is no number."""
    x, y = toy.images()
    x[16 * bad, 0, 0, 0] = torch.nan
    return list(zip(x.split(16), y.split(16), strict=True))


def test_a_loss_that_is_no_number_stops_the_run(tmp_path: Path) -> None:
    source = LoaderSource(batches(bad=3))
    with pytest.raises(BcnetError) as error:
        train_supernet(toy.supernet(), source, toy.config(warmup=0), folder=tmp_path)
    assert str(error.value) == "batch 4 of the training data holds values that are infinite or NaN: clean it"
    tree = checkpoint.unpack(*checkpoint.load(tmp_path))
    assert tree["step"] == 3
    assert all(torch.isfinite(tensor).all() for tensor in tree["net"].values())
    with pytest.raises(BcnetError, match=r"^batch 4 of the training data holds values"):
        train_supernet(toy.supernet(), source, toy.config())


def test_a_loss_that_overflows_says_what_is_left(tmp_path: Path) -> None:
    """Not the data's fault: after the first steps the loss itself is divided by zero."""
    calls = itertools.count()
    task = Task(lambda o, y: F.cross_entropy(o, y) / float(next(calls) < 12), lambda o, y: o[:, 0])
    with pytest.raises(NotFinite) as error:
        train_supernet(toy.supernet(), toy.source(), toy.config(), task, tmp_path)
    assert str(error.value).startswith("the loss became infinite or NaN by step ")
    assert str(error.value).endswith(
        f"the last good checkpoint is in {tmp_path}; lower lr, add warmup or clip the gradient"
    )


def test_weights_that_are_no_numbers_are_not_saved(tmp_path: Path) -> None:
    """A finite loss whose gradient is not: the root of zero."""
    task = Task(lambda o, y: F.cross_entropy(o, y) + (0 * o).sqrt().sum(), lambda o, y: o[:, 0])
    with pytest.raises(BcnetError, match=r"^the weights became infinite or NaN by step 1 .*: nothing was saved"):
        train_supernet(toy.supernet(), toy.source(), toy.config(clip=0), task, tmp_path)
    assert not list(tmp_path.glob("checkpoint-*"))


def test_a_full_disk(tmp_path: Path, whole: Path, monkeypatch: Any) -> None:
    with pytest.raises(toy.Stopped):
        train_supernet(toy.supernet(), toy.source(), toy.config(), folder=tmp_path, progress=toy.stop_at(5))
    with monkeypatch.context() as patched:

        def full(_: int) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        patched.setattr(os, "fsync", full)
        with pytest.raises(BcnetError) as error:
            toy.train(tmp_path)
    assert str(error.value) == (
        f"no space is left for a checkpoint in {tmp_path}: free some and resume, the checkpoint before it is kept"
    )
    toy.train(tmp_path)
    toy.same(tmp_path, whole)


def test_a_damaged_checkpoint(tmp_path: Path, whole: Path) -> None:
    with pytest.raises(toy.Stopped):
        train_supernet(toy.supernet(), toy.source(), toy.config(), folder=tmp_path, progress=toy.stop_at(5))
    (tmp_path / newest(tmp_path) / "tensors.safetensors").write_bytes(b"")
    with pytest.warns(UserWarning, match="was loaded instead"):
        toy.train(tmp_path)
    toy.same(tmp_path, whole)


def test_a_checkpoint_of_another_supernet(tmp_path: Path) -> None:
    toy.train(tmp_path)
    with pytest.raises(BcnetError) as error:
        train_supernet(toy.supernet("bc"), toy.source(), toy.config(), folder=tmp_path)
    assert str(error.value) == f"the checkpoint in {tmp_path} is of another network: choose another folder"
