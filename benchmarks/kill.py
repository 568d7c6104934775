"""The kill test: SIGKILL at random moments of the default run, each followed by a resume to the end.

Every resumed run must end with the widths and accuracies of the uninterrupted one, bit for bit.

    python benchmarks/kill.py --kills 20 --at-once 2 --out docs/results/kill.json
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from bcnet.utils.provenance import provenance

COMMAND = [sys.executable, "-m", "bcnet", "run"]


def outcome(folder: Path) -> dict[str, Any]:
    """What must not depend on how often a run was killed."""
    names = json.loads((folder / "retrain.json").read_text())["networks"]
    results = {name: json.loads((folder / "retrain" / f"{name}.json").read_text()) for name in names}
    return {name: {key: r[key] for key in ("widths", "score", "loss")} for name, r in results.items()}


def finish(arguments: list[str]) -> float:
    """Run bcnet to its end; the seconds it took."""
    start = time.monotonic()
    subprocess.run([*COMMAND, *arguments], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return time.monotonic() - start


def killed(folder: Path, after: float, settings: list[str]) -> bool:
    """Start the default run and kill it ``after`` seconds; False where it had ended by then."""
    process = subprocess.Popen(
        [*COMMAND, "--out", str(folder), *settings],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        process.wait(after)
        return False
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return True


def trial(folder: Path, after: float, settings: list[str], expected: dict[str, Any]) -> dict[str, Any]:
    """Kill a run, resume it, and say whether it ended as expected."""
    for _ in range(5):
        if killed(folder, after, settings):
            break
        after /= 2  # it was faster than the uninterrupted one
        shutil.rmtree(folder)
    done = sorted(path.stem for path in folder.glob("*.json"))
    if (folder / "run.json").exists():
        finish(["--resume", str(folder)])
    else:  # killed before there was anything to resume: begin anew, as a person would
        finish(["--out", str(folder), *settings])
    same = outcome(folder) == expected
    shutil.rmtree(folder, ignore_errors=True)
    return {"killed_after_s": round(after, 1), "done": done, "same": same}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--at-once", type=int, default=1, help="runs side by side; each uses one core")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="for a shorter run")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("docs/results/kill.json"))
    options = parser.parse_args()
    place = Path(tempfile.mkdtemp(prefix="bcnet-kill-"))
    settings = [word for setting in options.set for word in ("--set", setting)]
    seconds = finish(["--out", str(place / "straight"), *settings])
    expected = outcome(place / "straight")
    rng = random.Random(options.seed)
    moments = [rng.uniform(0, seconds) for _ in range(options.kills)]
    report: dict[str, Any] = {
        **provenance(),
        "run": " ".join(["bcnet run", *settings]),
        "uninterrupted_s": round(seconds, 1),
        "outcome": expected,
        "kills": [],
    }
    with ThreadPoolExecutor(options.at_once) as pool:
        trials = [pool.submit(trial, place / f"{n:02d}", after, settings, expected) for n, after in enumerate(moments)]
        for number, ended in enumerate(as_completed(trials), 1):
            row = ended.result()
            report["kills"].append(row)
            report["all_same"] = all(row["same"] for row in report["kills"])
            print(f"{number:2d}  killed after {row['killed_after_s']:6.1f} s: same = {row['same']}", flush=True)
            options.out.parent.mkdir(parents=True, exist_ok=True)
            options.out.write_text(json.dumps(report, indent=1) + "\n")
    shutil.rmtree(place, ignore_errors=True)
    sys.exit(0 if report["all_same"] else 1)


if __name__ == "__main__":
    main()
