"""Networks of given widths trained from scratch, several at once: what benchmarks that train many of them share.

A small network does not fill a large GPU. So one, two, ... processes are timed on the first network, as many are kept
as bring more steps a second, and each of them trains a network at a time. Rows are written as they come; networks whose
rows are there are not trained again, and one that would not end in time is dropped after its first epochs.
"""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from bcnet.accel import plain_step
from bcnet.data import LoadOptions, load_data
from bcnet.data.device import TrainSource
from bcnet.models.load import load_model
from bcnet.training.optim import Optimisation
from bcnet.training.retraining import Retrainer, Retraining, evaluate
from bcnet.utils.provenance import provenance

TIMED = 60
"""Batches of a round of timing."""
WORTH = 1.05
"""How many times as many steps a second another process must bring."""
PROJECTED = 3
"""Epochs after which a training that would not end in time is dropped: the first has libraries set themselves up."""
PATIENCE = 300.0
"""Seconds that processes wait for one another before they are timed."""
Row = dict[str, Any]


@dataclass(frozen=True)
class Job:
    """A network to train: ``place`` tells its row from others, ``recipe`` has the settings of an Optimisation."""

    place: Row
    network: str
    widths: tuple[int, ...]
    seed: int
    recipe: Row
    fused: bool = True


@dataclass(frozen=True)
class Setting:
    """Where and how long all are trained; ``processes`` are the most that are tried at once, exactly as many without
    ``timed``; with ``mps`` they share the GPU by NVIDIA's service where it can be had."""

    data: str
    out: Path
    device: str = "cpu"
    seconds: float = math.inf
    processes: int = 1
    timed: bool = True
    mps: bool = False
    batch: int = 256


def known(file: Path) -> list[Row]:
    """The rows of a file of lines, where there is one."""
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def add(file: Path, row: Row) -> None:
    with open(file, "a") as lines:
        lines.write(json.dumps(row) + "\n")


def train_all(jobs: Sequence[Job], setting: Setting) -> bool:
    """Train every network whose row is not there yet, the first ones first; whether all of them could be trained."""
    end = time.time() + setting.seconds
    left = [job for job in jobs if not any(job.place.items() <= row.items() for row in known(setting.out))]
    if not left:
        return True
    context, most = multiprocessing.get_context("spawn"), min(setting.processes, len(left))
    with _shared_gpu(setting) as shared:
        gates = {n: context.Barrier(n) for n in range(1, most + 1)}
        with context.Pool(most, _begin, (setting, gates)) as pool:
            at_once = _timed(pool, left[0], most, shared, setting) if setting.timed and most > 1 else most
            facts = {"processes": at_once, "mps": shared}
            return _trained(pool, left, at_once, end, facts, setting.out)


def _trained(pool: Any, jobs: list[Job], at_once: int, end: float, facts: Row, out: Path) -> bool:
    waiting, good = list(jobs), True
    running: dict[Any, Job] = {}
    while waiting or running:
        while waiting and len(running) < at_once and time.time() < end:
            job = waiting.pop(0)
            running[pool.apply_async(_train, (job, end))] = job
        if not running:
            break
        for answer in [answer for answer in running if answer.ready()]:
            job = running.pop(answer)
            try:
                row = answer.get()
            except Exception as error:  # one network that fails is no reason to lose the others
                print(f"{job.place}: {type(error).__name__}: {error}", flush=True)
                good = False
                continue
            if row is not None:
                add(out, {**row, **facts})
                shown = {key: row[key] for key in ("best", "last", "ms_a_step", "seconds")}
                print(job.place, shown, flush=True)
        time.sleep(0.05)
    if waiting:
        print(f"{len(waiting)} networks were not begun: the time is over", flush=True)
    return good


def _timed(pool: Any, job: Job, most: int, shared: bool, setting: Setting) -> int:
    """How many processes train most steps a second."""
    best, chosen = 0.0, 1
    for count in range(1, most + 1):
        answers = [pool.apply_async(_time, (job, count)) for _ in range(count)]
        found = [answer.get() for answer in answers]
        speed = sum(1e3 / ms for ms in found)
        row = {"throughput": job.place, "processes": count, "mps": shared, "ms_a_step": found, "steps_a_second": speed}
        add(setting.out, row)
        print(f"{count} at once: {speed:.0f} steps a second", flush=True)
        if speed > WORTH * best:
            best, chosen = speed, count
    return chosen


# What follows runs in the processes that train.


@dataclass
class _Here:
    """What a process keeps from one network to the next."""

    setting: Setting | None = None
    gates: dict[int, Any] = field(default_factory=dict)
    data: Any = None
    spaces: Row = field(default_factory=dict)
    timed: Any = None
    failure: str = ""


_HERE = _Here()


def _begin(setting: Setting, gates: dict[int, Any]) -> None:
    torch.set_num_threads(1)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    options = LoadOptions(batch_size=setting.batch, eval_batch_size=5000, channels_last=True)
    _HERE.setting, _HERE.gates = setting, gates
    try:
        _HERE.data = load_data(setting.data, device=setting.device, options=options)
    except Exception as error:  # a pool would begin such a process again and again
        _HERE.failure = f"{type(error).__name__}: {error}"


class _Short:
    """The first batches of a source, as an epoch."""

    def __init__(self, source: TrainSource):
        self.source = source

    def __len__(self) -> int:
        return min(TIMED, len(self.source))

    def batches(self, epoch: int, start: int = 0, device: Any = None) -> Iterator[Any]:
        yield from (b for _, b in zip(range(start, len(self)), self.source.batches(epoch, start, device), strict=False))


def _opened(job: Job, short: bool = False) -> tuple[Any, Any, list[str]]:
    """The network, its training, and by which engine it is trained, once that is known."""
    if _HERE.failure:
        raise RuntimeError(_HERE.failure)
    if job.network not in _HERE.spaces:
        space = _HERE.spaces[job.network] = load_model(job.network).space(groups=10_000)
        _ = space.own_class  # which may draw random numbers
    assert _HERE.setting is not None
    torch.manual_seed(job.seed)
    network = _HERE.spaces[job.network].build(job.widths).to(_HERE.setting.device)
    on_gpu, engine = _HERE.setting.device.startswith("cuda"), ["autograd"]

    def fast(net: Any, x: Any, loss: Any) -> Any:
        step, words = plain_step(net, x, loss)
        engine[0] = words
        return step

    whole = _HERE.data.whole
    source = whole.data.train(whole.options, job.seed)
    recipe = Optimisation(**{"bf16": on_gpu, **job.recipe})
    config = Retraining(recipe, seed=job.seed)
    loop = Retrainer(network, _Short(source) if short else source, config, fast=fast if job.fused else None)
    return network, loop, engine


def _wait() -> None:
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def _time(job: Job, count: int) -> float:
    """Milliseconds of a step while ``count`` processes train, of which this is one."""
    if _HERE.timed is None:
        _HERE.timed = _opened(job, short=True)[1]
        _HERE.timed.run(None, 1)
    loop = _HERE.timed
    before = loop.step // len(loop.source)
    _wait()
    _HERE.gates[count].wait(PATIENCE)
    start = time.perf_counter()
    loop.run(None, before + 3)
    _wait()
    return 1e3 * (time.perf_counter() - start) / (3 * len(loop.source))


def _train(job: Job, end: float) -> Row | None:
    """The row of a network after all epochs, with its accuracy on the test images after each; None without time."""
    _HERE.timed = None
    start = time.perf_counter()
    network, loop, engine = _opened(job)
    device = str(next(network.parameters()).device)
    epochs, tested, stepping, counted = loop.optimisation.epochs, [], 0.0, 0
    for epoch in range(1, epochs + 1):
        begun = time.perf_counter()
        loop.run(None, epoch)
        _wait()
        if epoch > 1:
            stepping, counted = stepping + time.perf_counter() - begun, counted + loop.per_epoch
        tested.append(100 * evaluate(network, _HERE.data.test, bf16=device.startswith("cuda"))["score"])
        each = time.perf_counter() - begun
        if epoch >= min(PROJECTED, epochs) and time.time() + each * (epochs - epoch) > end:
            print(f"{job.place}: dropped after {epoch} epochs, {each:.1f} s each: it would not end in time", flush=True)
            return None
    loop.finish()
    space = _HERE.spaces[job.network]
    costs = {name: int(space.costs[name](job.widths)[0]) for name in ("flops", "params")}
    best = max(tested)
    facts = {"engine": engine[0], "ms_a_step": round(1e3 * stepping / max(counted, 1), 3), "epochs": epochs}
    facts |= {"seconds": round(time.perf_counter() - start, 1), **provenance(device)}
    found = {"last": tested[-1], "best": best, "best_epoch": 1 + tested.index(best), "tested": tested}
    return {**job.place, "seed": job.seed, "widths": list(job.widths), **costs, **found, **facts}


@contextmanager
def _shared_gpu(setting: Setting) -> Iterator[bool]:
    """Let kernels of several processes run on the GPU at the same time, where it is asked for and can be had; whether
    they do. Without it the processes take turns."""
    if not setting.mps or setting.processes < 2:
        yield False
        return
    if shutil.which("nvidia-cuda-mps-control") is None:
        print("NVIDIA's multi-process service is not installed here: processes take turns", flush=True)
        yield False
        return
    with tempfile.TemporaryDirectory() as folder:
        os.environ |= {"CUDA_MPS_PIPE_DIRECTORY": folder, "CUDA_MPS_LOG_DIRECTORY": folder}
        subprocess.run(["nvidia-cuda-mps-control", "-d"], check=False)
        tried = [sys.executable, "-c", "import torch; torch.ones(1, device='cuda').sum().item()"]
        try:
            works = subprocess.run(tried, timeout=60, check=False).returncode == 0
        except subprocess.TimeoutExpired:
            works = False
        try:
            if not works:
                print("NVIDIA's multi-process service does not work here: processes take turns", flush=True)
                _end_service()
            yield works
        finally:
            if works:
                _end_service()


def _end_service() -> None:
    subprocess.run(["nvidia-cuda-mps-control"], input="quit\n", text=True, timeout=60, check=False)
    for name in ("CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY"):
        os.environ.pop(name, None)
