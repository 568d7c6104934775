"""Seeded mutation of every file that bcnet reads: each ends in one sentence, or in what was written.

A file is changed in a few bytes or, where it is JSON, in one value of it; then it is read as bcnet reads it. Anything
but a :class:`BcnetError` is a failure, and so are a read that takes ten seconds of a core, or a minute, and, for files
with digests, a result other than the original's. The digests of some files are put right again after the change, as a
stranger can.

    TMPDIR=/dev/shm python benchmarks/fuzz.py --count 10000 --seconds 120 --out docs/results/fuzz.json
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import random
import resource
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

from bcnet.errors import BcnetError
from bcnet.run import recipe

sys.path.insert(0, str(Path(__file__).parent))  # also where this file is imported by its path
from fuzz_formats import FORMATS, Format

NAMES = [kind.name for kind in FORMATS]
LONGEST, WAITS = 10, 60
"""Seconds that one read may take of a core, and in all: a machine may be busy with something else."""
MEMORY = 6 * 2**30
"""Bytes of address space, beyond what is taken at the start, that all reads together may take."""


class TooLong(BaseException):
    """A read that does not end; no `except Exception` may swallow it."""


@dataclass
class Tally:
    """What became of the mutants of one format."""

    format: str
    mutants: int = 0
    refused: int = 0
    same: int = 0
    other: int = 0
    slowest_s: float = 0.0
    sentences: set[str] = field(default_factory=set)
    failures: list[str] = field(default_factory=list)

    def row(self) -> dict[str, Any]:
        plain = {key: value for key, value in vars(self).items() if key != "sentences"}
        return {**plain, "slowest_s": round(self.slowest_s, 2), "kinds_of_sentences": len(self.sentences)}


def fuzz(kind: Format, count: int, seed: int = 0, seconds: float = math.inf) -> Tally:
    """Read ``count`` mutants of a format, or as many as so many seconds allow."""
    tally, end = Tally(kind.name), time.monotonic() + seconds
    # Most mutants of a run leave its recipe alone, and what a text says is a function of the text.
    remembered = mock.patch.object(recipe, "parse_yaml", functools.lru_cache(64)(recipe.parse_yaml))
    with tempfile.TemporaryDirectory(prefix="bcnet-fuzz-") as place, warnings.catch_warnings(), remembered:
        warnings.simplefilter("ignore")
        folder = Path(place) / "good"
        folder.mkdir()
        files = kind.make(folder)
        original = kind.read(folder)
        for number in range(count):
            if time.monotonic() > end:
                break
            tally.mutants += 1
            rng = random.Random(f"{seed} {kind.name} {number}")
            path = folder / rng.choice(files)
            good = path.read_bytes()
            with _restored(folder, path, good):
                kind.mutate(rng, folder, path, good)
                if path.read_bytes() != good:
                    _judge(kind, folder, original, number, tally)
    return tally


@contextmanager
def _restored(folder: Path, path: Path, good: bytes) -> Iterator[None]:
    """Afterwards the folder holds what it held before; reading may leave files, such as SQLite's own."""
    before = {p for p in folder.rglob("*") if p.is_file()}
    try:
        yield
    finally:
        for other in {p for p in folder.rglob("*") if p.is_file()} - before:
            other.unlink()
        path.write_bytes(good)


def _judge(kind: Format, folder: Path, original: Any, number: int, tally: Tally) -> None:
    start = time.process_time()
    try:
        with _alarm():
            found = kind.read(folder)
    except BcnetError as error:
        tally.refused += 1
        said = str(error).replace(str(folder), "FOLDER")
        tally.sentences.add("".join("0" if letter.isdigit() else letter for letter in said)[:60])
        if "\n" in said or not said or len(said) > 1000:
            tally.failures.append(f"{number}: not one sentence: {said[:100]!r}")
    except TooLong:
        tally.failures.append(f"{number}: over {LONGEST} s of a core, or {WAITS} s")
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        tally.failures.append(f"{number}: {type(error).__name__}: {str(error)[:100]}")
    else:
        if kind.equal(found, original):
            tally.same += 1
        else:
            tally.other += 1
            if kind.guarded:
                tally.failures.append(f"{number}: a silently different result")
    tally.slowest_s = max(tally.slowest_s, time.process_time() - start)


@contextmanager
def _alarm() -> Iterator[None]:
    def ring(*_: object) -> None:
        raise TooLong

    clocks = [(signal.SIGPROF, signal.ITIMER_PROF, LONGEST), (signal.SIGALRM, signal.ITIMER_REAL, WAITS)]
    before = [signal.signal(name, ring) for name, _, _ in clocks]
    for _, timer, seconds in clocks:
        signal.setitimer(timer, seconds)
    try:
        yield
    finally:
        for (name, timer, _), handler in zip(clocks, before, strict=True):
            signal.setitimer(timer, 0)
            signal.signal(name, handler)


def main() -> None:
    from bcnet.utils.provenance import provenance

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=10_000, help="mutants of each format")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", action="append", metavar="NAME", help="formats whose name begins so")
    parser.add_argument("--seconds", type=float, default=math.inf, help="for each format, at most")
    parser.add_argument("--out", type=Path, help="JSON file for the figures; complete formats are left out")
    options = parser.parse_args()
    chosen = [f for f in FORMATS if not options.only or any(f.name.startswith(name) for name in options.only)]
    taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (taken + MEMORY, resource.RLIM_INFINITY))
    there = options.out is not None and options.out.exists()
    rows = json.loads(options.out.read_text())["formats"] if there else []
    for kind in chosen:
        if any(row["format"] == kind.name and row["mutants"] >= options.count for row in rows):
            continue
        start = time.monotonic()
        tally = fuzz(kind, options.count, options.seed, options.seconds)
        row = {**tally.row(), "seconds": round(time.monotonic() - start, 1), "by": provenance()}
        rows = [each for each in rows if each["format"] != kind.name] + [row]
        rows.sort(key=lambda each: NAMES.index(each["format"]))
        figures = f"{tally.mutants:,} mutants: {tally.refused:,} refused, {tally.same:,} same, {tally.other:,} other"
        print(f"{kind.name:32s} {figures}, slowest {tally.slowest_s:.2f} s, {len(tally.failures)} failures", flush=True)
        for failure in tally.failures[:5]:
            print(f"    {failure}", flush=True)
        if options.out:
            options.out.parent.mkdir(parents=True, exist_ok=True)
            whole = {"mutants_of_each": options.count, "seed": options.seed, "formats": rows}
            options.out.write_text(json.dumps(whole, indent=1) + "\n")
    sys.exit(1 if any(row["failures"] for row in rows) else 0)


if __name__ == "__main__":
    main()
