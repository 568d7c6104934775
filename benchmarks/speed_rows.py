"""Times where users wait, one row after the other, each beside PyTorch's own way in the same process, by turns.

    python benchmarks/device_tests.py --out $OUT/device-tests.json --seconds 100 > $OUT/device-tests.txt 2>&1 &
    python benchmarks/speed_rows.py --ahead --seconds 90 2>&1 | tee $OUT/ahead.txt; wait
    python benchmarks/speed_rows.py --out $OUT/speed-rows.json --seconds 400 2>&1 | tee $OUT/rows.txt

Rows come in the order of their importance. A row runs in a process of its own with a limit of seconds, so that one that
fails or hangs costs no other, and what it has found until then is kept; the file is written after each. What a row does
before its first ``yield`` is for the CPU alone and is not timed: it happens while the row before is measured. With
``--ahead`` nothing is measured: it fills the compilers' caches, so that rows need not wait for them, and may run beside
other work. Images are random: speed does not depend on them. ``--device cpu`` tries the script with the reference
kernels at tiny sizes, ``--rows NAME ...`` takes some rows. Those
named ``imagenet NAME`` take up to 200 steps of a recipe's supernet, scoring and retraining.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from speed_base import Bench
from speed_work import COMPILED, ENUMERATION, ROWS, exhaustive

from bcnet.utils.provenance import provenance


def command_of(name: str, device: str, out: Path) -> list[str]:
    return [sys.executable, __file__, "--row", name, "--device", device, "--out", str(out)]


class Row:
    """A row in a process of its own, which prepares itself and waits for its turn."""

    def __init__(self, name: str, device: str):
        self.folder = tempfile.TemporaryDirectory()
        self.out = Path(self.folder.name) / "row.json"
        streams = {"stdin": subprocess.PIPE, "stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
        command = command_of(name, device, self.out)
        self.process = subprocess.Popen(command, text=True, start_new_session=True, **streams)  # type: ignore[call-overload]

    def run(self, limit: float) -> dict[str, Any]:
        begun, failed = time.perf_counter(), ""
        try:
            _, said = self.process.communicate("go\n", timeout=limit)
            failed = said.strip()[-400:] if self.process.returncode else ""
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)  # with the processes that it started
            self.process.communicate()
            failed = f"it took more than {limit:.0f} s"
        found = json.loads(self.out.read_text()) if self.out.exists() else {}
        self.folder.cleanup()
        return {**found, "row_s": time.perf_counter() - begun, **({"failed": failed} if failed else {})}


def row(args: argparse.Namespace) -> None:
    """What the process of a row does; ``parts_s`` are the seconds until each of its parts was there."""
    parts = ROWS[args.row][1](Bench(args.device, args.warm))
    found, seconds = next(parts), list[float]()
    if not args.warm and not sys.stdin.readline():
        return  # nobody waits for it any more
    begun = time.perf_counter()
    for part in parts:
        seconds.append(round(time.perf_counter() - begun, 2))
        found |= part
        written = args.out.with_suffix(".part")
        written.write_text(json.dumps({**found, "parts_s": seconds}))
        written.replace(args.out)


def fill_caches(device: str, limit: float) -> None:
    """All that is compiled, side by side: the fused kernels of all networks by one process, so that none is compiled
    twice, and what others compile by themselves."""
    begun = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "found.json"
        commands = [[*command_of(name, device, out), "--warm"] for name in COMPILED]
        if device == "cuda":
            commands += [exhaustive(space, out, "--warm") for space in ENUMERATION]
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "start_new_session": True}
        kernels = [sys.executable, str(Path(__file__).with_name("speed_kernels.py")), device]
        started = {"fused kernels": subprocess.Popen(kernels, start_new_session=True)}
        started |= {" ".join(c[1:5]): subprocess.Popen(c, **quiet) for c in commands}  # type: ignore[call-overload]
        for name, process in started.items():
            try:
                process.wait(max(1.0, limit - (time.perf_counter() - begun)))
                ended = f"ended with {process.returncode}"
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                ended = "was cut short"
            print(f"{time.perf_counter() - begun:5.1f} s {name} {ended}", flush=True)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--device", default="cuda", choices=["cpu", "cuda"])
    parser.add_argument("--rows", nargs="+", choices=list(ROWS), default=list(ROWS))
    parser.add_argument("--row", choices=list(ROWS), help=argparse.SUPPRESS)
    parser.add_argument("--warm", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--ahead", action="store_true", help="only fill the compilers' caches")
    parser.add_argument("--seconds", type=float, default=400, help="of all together")
    args = parser.parse_args(arguments)
    if args.row:
        row(args)
        return
    if args.ahead:
        fill_caches(args.device, args.seconds)
        return
    if args.out is None:
        parser.error("--out FILE.json says where the figures go")
    begun = time.perf_counter()
    found: dict[str, Any] = {"provenance": provenance(args.device)}
    waiting = [Row(args.rows[0], args.device)]
    for number, name in enumerate(args.rows):
        waiting += [Row(later, args.device) for later in args.rows[number + 1 : number + 2]]
        left = args.seconds - (time.perf_counter() - begun)
        found[name] = waiting.pop(0).run(max(1, min(ROWS[name][0], left)))
        print(f"{name:35s} {json.dumps(found[name])[:400]}", flush=True)
        args.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
