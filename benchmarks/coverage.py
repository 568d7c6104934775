"""How many CNNs become width spaces: bcnet beside Torch-Pruning and ModelOpt's FastNAS, over the networks of many zoos.

    python benchmarks/coverage.py [--resume] [--only PATTERN] [--tool NAME]

The lists: coverage_fresh.txt and coverage_unseen.txt, networks that had no part in the making of bcnet, and
coverage_models.txt, those that had, every 14th of them (coverage_list.py says how they were chosen). Zoos whose package
is not installed are left out, with a notice. Every network is measured in a child process of its own under limits of
time and memory, and each result is appended to a cache, so that an interrupted run goes on with ``--resume``
(``--retry``: and measures again what failed; ``--again``: all that is asked for). Without a cache it goes on from the
rows of docs/results/coverage.json.

Writes docs/results/coverage.json and, from it, docs/results/coverage.md.
"""

from __future__ import annotations

import argparse
import fnmatch
import gc
import importlib.util
import json
import math
import multiprocessing
import os
import platform
import random
import resource
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from datetime import UTC, datetime
from importlib import metadata
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from torch import nn

if importlib.util.find_spec("bcnet") is None:
    sys.path.insert(0, str(Path(__file__).parents[1]))

from coverage_bcnet import Row, measure_bcnet
from coverage_checks import Wrong
from coverage_report import markdown
from coverage_rivals import measure_fastnas, measure_torch_pruning
from coverage_zoos import PACKAGES, create, installed, versions

import bcnet
from bcnet.errors import BcnetError

HERE = Path(__file__).parent
RESULTS = HERE.parent / "docs" / "results"
UNSEEN, SEEN, LATER = (HERE / f"coverage_{name}.txt" for name in ("unseen", "models", "fresh"))
EVERY = 14
CACHE = Path(os.environ.get("COVERAGE_CACHE", HERE.parent / ".cache" / "coverage.jsonl"))
TOOLS = {"bcnet": "bcnet", "torch-pruning": "torch-pruning", "fastnas": "nvidia-modelopt"}
MODULES = {"torch-pruning": "torch_pruning", "fastnas": "modelopt.torch.nas"}
MEASURES = {"bcnet": measure_bcnet, "torch-pruning": measure_torch_pruning, "fastnas": measure_fastnas}
LIMITS = {"bcnet": 120, "torch-pruning": 30, "fastnas": 30}  # seconds of processor time, checks and all, for a network
PATIENCE = 1200  # seconds on the clock after which a child process is ended whatever it does
MEMORY = 12 * 2**30  # bytes of address space for a child process


def names() -> list[str]:
    """``zoo:NAME`` of all networks whose zoo is installed: all that had no part in the making, every 14th that had."""
    every = UNSEEN.read_text().split() + SEEN.read_text().split()[::EVERY] + LATER.read_text().split()
    return [name for name in every if installed(name)]


def child(tool: str, name: str, pipe: Connection) -> None:
    """Measure one network and send its row after every check; the last row sent is the result."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    row: Row = {"model": name, "tool": tool, "failures": [], "at": "creating the model"}

    def check(what: str, do: Callable[[], object]) -> bool:
        row["at"] = what
        pipe.send(row)
        try:
            do()
        except Exception as error:  # whatever a network or a tool raises is a result here
            row["failures"].append({"at": what, "kind": kind_of(error, tool), "error": told(error)})
            return False
        return True

    def measured() -> None:
        model, inputs = create(name)
        row["inputs"] = [list(t.shape[1:]) for t in inputs]
        used = math.ceil(time.process_time())
        resource.setrlimit(resource.RLIMIT_CPU, (used + LIMITS[tool], resource.RLIM_INFINITY))
        MEASURES[tool](model, inputs, row, check)

    check("creating the model", measured)
    row["at"] = None
    pipe.send(row)


def kind_of(error: Exception, tool: str) -> str:
    """How a check failed: a result that is wrong without a word, a refusal in one sentence, or a raw error."""
    if isinstance(error, Wrong):
        return "wrong"
    return "refused" if isinstance(error, BcnetError) and tool == "bcnet" else "raw"


def told(error: Exception) -> str:
    text = (str(error).strip().splitlines() or [""])[0][:400]
    return text if isinstance(error, (BcnetError, Wrong)) else f"{type(error).__name__}: {text}"


def measure(tool: str, name: str) -> Row:
    """The row of one network, from a child process that is ended when its time is over."""
    context = multiprocessing.get_context("fork")
    mine, theirs = context.Pipe(duplex=False)
    process = context.Process(target=child, args=(tool, name, theirs))
    start = time.monotonic()
    process.start()
    theirs.close()
    row: Row = {"model": name, "tool": tool, "failures": [], "at": "starting"}
    while mine.poll(max(0.0, start + PATIENCE - time.monotonic())):
        try:
            row = mine.recv()
        except EOFError:
            break
    else:
        os.kill(process.pid or 0, signal.SIGKILL)
    process.join()
    at = row.pop("at")
    if at is not None:
        late = process.exitcode in (-signal.SIGXCPU, -signal.SIGKILL)
        ended = f"not done within {LIMITS[tool]} s" if late else f"its process ended with exit code {process.exitcode}"
        row["failures"].append({"at": at, "kind": "late" if late else "raw", "error": ended})
    return row | {"total_seconds": round(time.monotonic() - start, 1)}


def cached() -> dict[tuple[str, str], Row]:
    """The latest row of every network, with ``first``: how, and at which commit, it failed when first met."""
    lines = CACHE.read_text().splitlines() if CACHE.exists() else []
    rows: dict[tuple[str, str], Row] = {}
    for row in map(json.loads, lines):
        key = row["tool"], row["model"]
        now = {"commit": row["commit"], "failures": row["failures"]}
        rows[key] = row | {"first": rows[key]["first"] if key in rows else row.get("first", now)}
    return rows


def restore() -> None:
    """A cache of the published rows, where there is none."""
    if not CACHE.exists():
        rows = json.loads((RESULTS / "coverage.json").read_text())["rows"]
        CACHE.write_text("".join(json.dumps(row) + "\n" for row in rows))


def run(options: argparse.Namespace) -> None:
    """Measure what is asked for and not cached yet."""
    if not (options.resume or options.retry or options.again):
        CACHE.unlink(missing_ok=True)
    for package in sorted(set(PACKAGES.values()) - {PACKAGES[n.partition(":")[0]] for n in names()}):
        print(f"{package} is not installed, so its networks are left out")
    load(options.tool)
    done = cached()
    commit = head()
    mixed = names()
    random.Random(0).shuffle(mixed)  # a part of the run tells of all zoos
    wanted = dict.fromkeys(n for pattern in options.only or ["*"] for n in mixed if fnmatch.fnmatch(n, pattern))
    todo = [(tool, name) for name in wanted for tool in options.tool]
    todo = [key for key in todo if options.again or key not in done or (options.retry and done[key]["failures"])]
    for i, (tool, name) in enumerate(todo):
        row = measure(tool, name) | {"commit": commit}
        with CACHE.open("a") as file:
            file.write(json.dumps(row) + "\n")
        outcome = "; ".join(f"{f['at']}: {f['kind']}: {f['error']}" for f in row["failures"]) or "works"
        print(f"[{i + 1}/{len(todo)}] {tool:13} {name:45} {row['total_seconds']:6.1f} s  {outcome}", flush=True)


def load(tools: list[str]) -> None:
    """Import what every child needs once, before they fork: tools, zoos, and what torch imports at its first export."""
    for tool in set(tools) & set(MODULES):
        importlib.import_module(MODULES[tool])
    for package in {PACKAGES[n.partition(":")[0]] for n in names()}:
        importlib.import_module("monai.networks.nets" if package == "monai" else package)
    tiny = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Conv2d(8, 4, 1))
    measure_bcnet(tiny, (torch.randn(1, 3, 8, 8),), {}, lambda _, do: do() is do or True)
    gc.freeze()  # children then share these objects instead of copying them


def head() -> str:
    """The commit of the bcnet that is measured."""
    where = Path(bcnet.__file__).parent
    git = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=True, cwd=where)
    return git.stdout.strip()


def write() -> None:
    """docs/results/coverage.json and .md from the cache."""
    done = cached()
    unseen, fresh = set(UNSEEN.read_text().split()), set(LATER.read_text().split())
    keys = [(tool, name) for name in names() for tool in MEASURES if (tool, name) in done]
    rows = [done[key] | {"unseen": key[1] in unseen, "fresh": key[1] in fresh} for key in keys]
    tools = {TOOLS[row["tool"]] for row in rows} - {"bcnet"}
    results = {
        "command": "python benchmarks/coverage.py",
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "commits": sorted({row["commit"] for row in rows if row["tool"] == "bcnet"}),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, 1 thread, Python {platform.python_version()}",
        "versions": {"torch": torch.__version__}
        | {tool: metadata.version(tool) for tool in sorted(tools)}
        | versions(row["model"] for row in rows),
        "earlier": len(SEEN.read_text().split()),
        "limits_in_seconds": LIMITS,
        "rows": rows,
    }
    (RESULTS / "coverage.json").write_text(json.dumps(results, indent=1) + "\n")
    (RESULTS / "coverage.md").write_text(markdown(results))


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure how many CNNs bcnet and other tools can resize.")
    parser.add_argument("--resume", action="store_true", help="go on where the last run ended")
    parser.add_argument("--retry", action="store_true", help="as --resume, and measure again what failed")
    parser.add_argument("--again", action="store_true", help="as --resume, and measure again whatever is asked for")
    parser.add_argument("--only", action="append", metavar="PATTERN", help="networks to measure, e.g. 'timm:resnet*'")
    parser.add_argument("--tool", choices=list(MEASURES), action="append", help="measure with this tool only")
    parser.add_argument("--report", action="store_true", help="only write the results from the cache")
    parser.add_argument("--no-report", action="store_true", help="only measure")
    options = parser.parse_args()
    options.tool = options.tool or list(MEASURES)
    torch.set_num_threads(1)
    CACHE.parent.mkdir(exist_ok=True)
    if options.resume or options.retry or options.again or options.report:
        restore()
    if not options.report:
        run(options)
    if not options.no_report:
        write()


if __name__ == "__main__":
    main()
