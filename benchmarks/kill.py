"""The kill test: runs are stopped at random moments, in every way they can be, and each time resumed to their end.

Ways to stop: SIGKILL and SIGTERM; SIGSTOP, during which nobody else may get in, and then going on; a disk that is full
from one moment on; of several processes, the death of one. Each run is stopped twice, the second time while it
resumes, and must end with the weights, widths and scores of the uninterrupted one, bit for bit. The run has every
stage: a trained start, a supernet, two targets with a search, a race and networks of their own; it saves after every
step. Processes are forked from one that has done the run itself, so that stops fall into work and not into imports.

    python benchmarks/kill.py --kills 100 --out docs/results/kill.json
    python benchmarks/kill.py --kills 100 --processes 2 --out docs/results/kill-2.json
"""

from __future__ import annotations

import argparse
import errno
import faulthandler
import json
import os
import random
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import accelerate  # noqa: F401, imported before anything is forked
import torch

import bcnet.cli  # noqa: F401
from bcnet.__main__ import main as bcnet_main
from bcnet.run.folder import RunFolder
from bcnet.run.pipeline import run_stages
from bcnet.run.recipe import Recipe
from bcnet.run.session import Run, facts
from bcnet.run.targets import folder_name
from bcnet.training import distributed
from bcnet.utils.provenance import provenance

sys.path.append(str(Path(__file__).parents[1] / "tests" / "helpers"))
from tinyrun import NETWORK

LONGEST = 300.0
"""Seconds in which a run must end."""
GRACE = 60.0
"""Seconds in which processes notice that one of them has died."""
STOPS = 2
"""How often each run is stopped."""

RECIPE: dict[str, Any] = {
    "data": "digits",
    "val_fraction": 0.2,
    "loading": {"batch_size": 256},
    "groups": 4,
    "least": 1,
    "targets": ["flops=60%", "flops=40%"],
    "given": {"epochs": 2, "warmup": 0},
    "score": "supernet",
    "supernet": {"epochs": 2, "warmup": 0},
    "search": {"evaluations": 6, "population": 4},
    "race": {"finalists": 2, "rounds": 1},
    "retrain": {"epochs": 2, "warmup": 0},
    "compare": ["uniform"],
    "checkpoint_minutes": 1e-9,
    "threads": 1,
}


@dataclass
class Work:
    """A run at work: ``bcnet`` in one or more processes of one group, and the file for what they say."""

    heard: Path
    processes: list[int] = field(default_factory=list)
    codes: list[int] = field(default_factory=list)

    def wait(self, seconds: float = LONGEST) -> bool:
        """Whether all processes ended within so many seconds."""
        end = time.monotonic() + seconds
        while len(self.codes) < len(self.processes) and time.monotonic() < end:
            pid, status = os.waitpid(self.processes[len(self.codes)], os.WNOHANG)
            if pid:
                self.codes.append(os.waitstatus_to_exitcode(status))
            else:
                time.sleep(0.005)
        return len(self.codes) == len(self.processes)

    def signal(self, number: int, *, only: int | None = None) -> None:
        try:
            if only is None:
                os.killpg(self.processes[0], number)
            else:
                os.kill(self.processes[only], number)
        except ProcessLookupError:
            pass

    def holds(self, folder: Path) -> bool:
        """Whether this run has come so far as to lock its folder."""
        lock = folder / "lock"
        return lock.exists() and lock.read_text().strip() == str(self.processes[0])

    @property
    def said(self) -> str:
        return self.heard.read_text()

    def failed(self, why: str) -> RuntimeError:
        """Where every process stands, in its own words, before all are killed."""
        said = self.said
        self.signal(signal.SIGUSR1)
        time.sleep(2)
        stands = self.heard.read_text().removeprefix(said)[-4000:]
        self.signal(signal.SIGKILL)
        return RuntimeError(f"{why} ({self.codes}): {said[-2000:]}{stands}")


@dataclass(frozen=True)
class Job:
    """How bcnet is started, and in which place."""

    place: Path
    processes: int

    def start(self, folder: Path, disk_lasts: float | None = None) -> Work:
        """Begin the run in ``folder``, or go on with it where there is one."""
        begun = (folder / "run.json").exists() or (folder / "recipe.yaml").exists()
        new = ["--recipe", str(self.place / "every.yaml"), "--out", str(folder)]
        arguments = ["bcnet", "run", *(["--resume", str(folder)] if begun else new), "--trust"]
        work = Work(Path(tempfile.mkstemp(dir=self.place)[1]))
        port = _free_port()
        for rank in range(self.processes):
            pid = os.fork()
            if pid == 0:
                _be_bcnet(arguments, self._environment(rank, port), work, disk_lasts)
            work.processes.append(pid)
            os.setpgid(pid, work.processes[0])
        return work

    def _environment(self, rank: int, port: int) -> dict[str, str]:
        if self.processes == 1:
            return {}
        size = str(self.processes)
        here = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
        return {**here, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


def _be_bcnet(arguments: list[str], environment: dict[str, str], work: Work, disk_lasts: float | None) -> None:
    """What a forked process does until its end."""
    code = 1
    try:
        os.setpgid(0, work.processes[0] if work.processes else 0)
        os.dup2(os.open(work.heard, os.O_WRONLY | os.O_APPEND), 2)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        faulthandler.register(signal.SIGUSR1, sys.__stderr__)
        os.environ.update(environment)
        sys.argv = arguments
        if disk_lasts is not None:
            _fill_disk(time.monotonic() + disk_lasts)
        bcnet_main()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 0
    except BaseException as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
    finally:
        distributed.leave()
        sys.stderr.flush()
        os._exit(code)


def _fill_disk(end: float) -> None:
    flush = os.fsync

    def fsync(file: Any) -> None:
        if time.monotonic() > end:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        flush(file)

    os.fsync = fsync


def by_signal(number: int) -> Callable[[Job, Path, float], bool]:
    def stop(job: Job, folder: Path, after: float) -> bool:
        work = job.start(folder)
        if work.wait(after):
            return False
        work.signal(number)
        if not work.wait():
            raise work.failed(f"signal {number} did not end it")
        return True

    return stop


def by_full_disk(job: Job, folder: Path, after: float) -> bool:
    work = job.start(folder, disk_lasts=after)
    if not work.wait():
        raise work.failed("a full disk did not end it")
    if any(work.codes) and "no space is left" not in work.said:
        raise work.failed("a full disk was not named")
    return any(work.codes)


def by_pause(job: Job, folder: Path, after: float) -> bool:
    """A paused run keeps others out, and goes on by itself."""
    work = job.start(folder)
    if work.wait(after):
        return False
    work.signal(signal.SIGSTOP)
    if (folder / "run.json").exists() and work.holds(folder):
        other = job.start(folder)
        if not other.wait() or not any(other.codes) or "is working in" not in other.said:
            work.signal(signal.SIGKILL)
            raise other.failed("another process got in")
    work.signal(signal.SIGCONT)
    if not work.wait() or any(work.codes):
        raise work.failed("a paused run did not go on")
    return True


def by_one_death(job: Job, folder: Path, after: float) -> bool:
    """One of several processes is killed; the others end by themselves, or, where they wait for it to join them, by
    what launched them, as launchers do."""
    work = job.start(folder)
    if work.wait(after):
        return False
    work.signal(signal.SIGKILL, only=int(after * 1000) % job.processes)
    if not work.wait(GRACE) and work.holds(folder):
        raise work.failed("the others did not end")
    work.signal(signal.SIGKILL)
    return work.wait()


WAYS: dict[str, Callable[[Job, Path, float], bool]] = {
    "SIGKILL": by_signal(signal.SIGKILL),
    "SIGTERM": by_signal(signal.SIGTERM),
    "SIGSTOP": by_pause,
    "full disk": by_full_disk,
    "SIGKILL of one": by_one_death,
}


def outcome(folder: Path) -> dict[str, Any]:
    """What must not depend on how often a run was stopped: of every result with tensors, their digest and figures."""
    found = {}
    for path in sorted(folder.rglob("*.json")):
        content = json.loads(path.read_bytes())
        integrity = content.get("integrity") if isinstance(content, dict) else None
        if isinstance(integrity, dict) and integrity.get("tensors"):
            name = path.relative_to(folder).with_suffix("").as_posix()
            figures = {key: content[key] for key in ("widths", "score", "loss") if key in content}
            found[name] = {"tensors": integrity["tensors"]["sha256"], **figures}
    for place in (folder, *sorted(folder.glob("targets/*"))):
        run = RunFolder(place)
        for path in sorted(place.glob("*.json")):
            run.check(path.stem)
    return found


def reached(folder: Path) -> str:
    """The first result that a run lacks, such as ``train`` or ``targets/flops-40pc/race``."""
    targets = [f"targets/{folder_name(budget)}" for budget in RECIPE["targets"]]
    stages = ("run", "search", "rate", "race", "retrain", "compare", "export", "report")
    names = [
        "run",
        "trace",
        "given",
        "train",
        *(f"{t}/{name}" for t in targets for name in stages),
        "targets",
        "report",
    ]
    return next((name for name in names if not (folder / f"{name}.json").exists()), "end")


def trial(job: Job, folder: Path, ways: list[str], rng: random.Random, straight_s: float) -> list[dict[str, Any]]:
    """Stop a run some times and have it end; a row for every stop."""
    rows = []
    latest = straight_s
    for way in ways:
        after = rng.uniform(0, latest)
        if not WAYS[way](job, folder, after):
            break  # it was faster than the uninterrupted one, or has ended after a pause
        rows.append({"way": way, "after_s": round(after, 2), "at": reached(folder)})
        latest = max(0.5, latest - after)
    work = job.start(folder)
    if not work.wait() or any(work.codes):
        raise work.failed("it could not be resumed")
    return rows


def warm_up(place: Path) -> None:
    """A run in this process: what it imports and compiles need not be done again by every process forked from it."""
    recipe = Recipe.read(place / "every.yaml")
    run = Run.create(place / "warm", recipe, facts(["kill"], recipe, "cpu"))
    with run.lock():
        run_stages(run)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100, help="stops in all")
    parser.add_argument("--processes", type=int, default=1, help="of each run")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("docs/results/kill.json"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    place = Path(tempfile.mkdtemp(prefix="bcnet-kill-"))
    (place / "tiny.py").write_text(NETWORK)
    (place / "every.yaml").write_text(Recipe.parse({"model": f"{place / 'tiny.py'}:tiny", **RECIPE}).to_yaml())
    job = Job(place, options.processes)
    warm_up(place)
    begun = time.monotonic()
    straight = job.start(place / "straight")
    if not straight.wait() or any(straight.codes):
        raise straight.failed("the uninterrupted run failed")
    seconds, expected = time.monotonic() - begun, outcome(place / "straight")
    report: dict[str, Any] = {
        **provenance(),
        "seed": options.seed,
        "processes": options.processes,
        "recipe": RECIPE,
        "uninterrupted_s": round(seconds, 1),
        "outcome": expected,
        "runs": 0,
        "all_same": True,
        "kills": [],
    }
    rng = random.Random(options.seed)
    ways = [way for way in WAYS if options.processes > 1 or way != "SIGKILL of one"]
    while len(report["kills"]) < options.kills and report["runs"] < 10 * options.kills:
        folder, number = place / f"{report['runs']:03d}", len(report["kills"])
        planned = [ways[(number + n) % len(ways)] for n in range(STOPS)]
        begun = time.monotonic()
        rows = trial(job, folder, planned, rng, seconds)
        if not rows:  # the machine is faster now than when the uninterrupted run was timed
            seconds = time.monotonic() - begun
        same = outcome(folder) == expected
        report["runs"] += 1
        report["kills"] += [{**row, "same": same} for row in rows]
        report["all_same"] &= same
        told = ", ".join(f"{row['way']} after {row['after_s']:.1f} s" for row in rows)
        print(f"{len(report['kills']):3d}  {told}: same = {same}", flush=True)
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(report, indent=1) + "\n")
        if same:
            shutil.rmtree(folder, ignore_errors=True)
    if report["all_same"]:
        shutil.rmtree(place, ignore_errors=True)
    sys.exit(0 if report["all_same"] else 1)


if __name__ == "__main__":
    main()
