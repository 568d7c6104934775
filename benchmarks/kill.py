"""The kill test: a run is stopped at random moments, in every way it can be, and each time resumed to its end.

Ways to stop: SIGKILL and SIGTERM; SIGSTOP, during which nobody else may get in, and then going on; a disk that is full
from one moment on. Every run must end with the weights, widths and scores of the uninterrupted one, bit for bit. Any
recipe will do, and any way to start bcnet (``--start`` for several processes).

    python benchmarks/kill.py --kills 100 --at-once 2 --out docs/results/kill.json
    python benchmarks/kill.py --start "torchrun --nproc-per-node 2 -m bcnet" --recipe my.yaml
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bcnet.run.folder import RunFolder
from bcnet.utils.provenance import provenance

FULL_DISK = """
import errno, os, sys, time
end, flush = time.monotonic() + float(sys.argv.pop(1)), os.fsync
def fsync(file):
    if time.monotonic() > end:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    flush(file)
os.fsync = fsync
from bcnet.__main__ import main
sys.argv[0] = "bcnet"
main()
"""


@dataclass(frozen=True)
class Job:
    """What is run: how bcnet is started, and with which settings."""

    start: tuple[str, ...]
    settings: tuple[str, ...]

    def begin(self, folder: Path, start: tuple[str, ...] | None = None) -> subprocess.Popen[str]:
        return self._popen([*(start or self.start), "run", "--out", str(folder), *self.settings])

    def resume(self, folder: Path) -> subprocess.Popen[str]:
        return self._popen([*self.start, "run", "--resume", str(folder)])

    @staticmethod
    def _popen(command: list[str]) -> subprocess.Popen[str]:
        return subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True
        )


def outcome(folder: Path) -> dict[str, Any]:
    """What must not depend on how often a run was stopped: of every result with tensors, their digest and figures."""
    found = {}
    for path in sorted(folder.rglob("*.json")):
        content = json.loads(path.read_bytes())
        integrity = content.get("integrity") if isinstance(content, dict) else None
        if isinstance(integrity, dict) and integrity.get("tensors"):
            name = path.relative_to(folder).with_suffix("").as_posix()
            RunFolder(folder).check(name)
            figures = {key: content[key] for key in ("widths", "score", "loss") if key in content}
            found[name] = {"tensors": integrity["tensors"]["sha256"], **figures}
    return found


def ended(process: subprocess.Popen[str]) -> float:
    """Wait for the end of a run that must end well; the seconds that took."""
    start = time.monotonic()
    _, said = process.communicate()
    if process.returncode:
        raise RuntimeError(f"bcnet ended with {process.returncode}: {said[-300:]}")
    return time.monotonic() - start


def by_signal(number: int) -> Callable[[Job, Path, float], bool]:
    def stop(job: Job, folder: Path, after: float) -> bool:
        process = job.begin(folder)
        try:
            process.communicate(timeout=after)
            return False
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, number)
            process.communicate()
            return True

    return stop


def by_full_disk(job: Job, folder: Path, after: float) -> bool:
    process = job.begin(folder, (sys.executable, "-c", FULL_DISK, str(after)))
    _, said = process.communicate()
    if process.returncode not in (0, 2) or (process.returncode == 2 and "no space is left" not in said):
        raise RuntimeError(f"a full disk ended in {process.returncode}: {said[-300:]}")
    return process.returncode == 2


def by_pause(job: Job, folder: Path, after: float) -> bool:
    """A paused run keeps others out, and goes on by itself."""
    process = job.begin(folder)
    try:
        process.communicate(timeout=after)
        return False
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGSTOP)
    if (folder / "run.json").exists():
        other = job.resume(folder)
        _, said = other.communicate()
        if other.returncode == 0 or "is working in" not in said:
            os.killpg(process.pid, signal.SIGKILL)
            raise RuntimeError(f"another process got in ({other.returncode}): {said[-300:]}")
    os.killpg(process.pid, signal.SIGCONT)
    ended(process)
    return True


WAYS: dict[str, Callable[[Job, Path, float], bool]] = {
    "SIGKILL": by_signal(signal.SIGKILL),
    "SIGTERM": by_signal(signal.SIGTERM),
    "SIGSTOP": by_pause,
    "full disk": by_full_disk,
}


def trial(job: Job, folder: Path, way: str, after: float, expected: dict[str, Any]) -> dict[str, Any]:
    """Stop a run, resume it, and say whether it ended as expected."""
    for _ in range(5):
        if WAYS[way](job, folder, after):
            break
        after /= 2  # it was faster than the uninterrupted one
        shutil.rmtree(folder)
    done = sorted(path.stem for path in folder.glob("*.json"))
    begun = (folder / "run.json").exists() or (folder / "recipe.yaml").exists()
    ended(job.resume(folder) if begun else job.begin(folder))  # else there is nothing to resume: begin anew
    same = outcome(folder) == expected
    shutil.rmtree(folder, ignore_errors=True)
    return {"way": way, "after_s": round(after, 1), "done": done, "same": same}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--at-once", type=int, default=1, help="runs side by side; each uses one core")
    parser.add_argument("--recipe", default="digits")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="for a shorter run")
    parser.add_argument("--start", default=f"{sys.executable} -m bcnet", help="how bcnet is started")
    parser.add_argument("--ways", default=",".join(WAYS), help="of stopping, by commas")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("docs/results/kill.json"))
    options = parser.parse_args()
    place = Path(tempfile.mkdtemp(prefix="bcnet-kill-"))
    settings = [word for setting in options.set for word in ("--set", setting)]
    job = Job(tuple(shlex.split(options.start)), (*(("--recipe", options.recipe) if options.recipe else ()), *settings))
    seconds = ended(job.begin(place / "straight"))
    expected = outcome(place / "straight")
    rng = random.Random(options.seed)
    ways = [way for way in options.ways.split(",") if way in WAYS]
    plans = [(ways[n % len(ways)], rng.uniform(0, seconds)) for n in range(options.kills)]
    report: dict[str, Any] = {
        **provenance(),
        "run": " ".join(["bcnet run", *job.settings]),
        "uninterrupted_s": round(seconds, 1),
        "outcome": expected,
        "kills": [],
    }
    with ThreadPoolExecutor(options.at_once) as pool:
        trials = [
            pool.submit(trial, job, place / f"{n:03d}", way, after, expected) for n, (way, after) in enumerate(plans)
        ]
        for number, done in enumerate(as_completed(trials), 1):
            row = done.result()
            report["kills"].append(row)
            report["all_same"] = all(row["same"] for row in report["kills"])
            print(f"{number:3d}  {row['way']:9s} after {row['after_s']:6.1f} s: same = {row['same']}", flush=True)
            options.out.parent.mkdir(parents=True, exist_ok=True)
            options.out.write_text(json.dumps(report, indent=1) + "\n")
    shutil.rmtree(place, ignore_errors=True)
    sys.exit(0 if report["all_same"] else 1)


if __name__ == "__main__":
    main()
