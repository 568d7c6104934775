"""How many CNNs become width spaces: bcnet beside Torch-Pruning, over timm's and torchvision's models.

    python benchmarks/coverage.py [--resume] [--only PATTERN] [--tool NAME]

The list (coverage_models.txt, chosen by ``--list``): the smallest variant of every family of timm's CNN
modules, and all CNNs among torchvision's classification models. A family is the models of a module whose
names differ in numbers and size words only. Every model is measured in a child process of its own under a
time limit, and each result is appended to a cache, so that an interrupted run goes on with ``--resume``
(``--retry``: and measures again what failed).

Writes docs/results/coverage.json and, from it, docs/results/coverage.md.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import math
import multiprocessing
import os
import platform
import re
import resource
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

sys.path.insert(0, str(Path(__file__).parents[1]))

# A torchvision built for CUDA finds its compiled operators missing on a CPU-only torch, and could not be imported.
_missing = torch.library.Library("torchvision", "FRAGMENT")
for _name in ("nms", "qnms"):
    if not hasattr(torch.ops.torchvision, _name):
        _missing.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

import timm  # noqa: E402
import torch_pruning  # noqa: E402
import torchvision  # noqa: E402
from coverage_report import markdown  # noqa: E402

from bcnet.space.network import NetworkSpace, trace  # noqa: E402

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "docs" / "results"
LIST = Path(__file__).with_name("coverage_models.txt")
CACHE = ROOT / ".cache" / "coverage.jsonl"
LIMITS = {"bcnet": 300, "torch-pruning": 30}  # seconds of processor time for each tool's own work on one model
PATIENCE = 1200  # seconds on the clock after which a child process is ended whatever it does
MEMORY = 16 * 2**30  # bytes of address space for a child process
SIZE = 128  # side of the input, where the model runs at it
LARGEST = 100_000_000  # parameters of timm's models

MODULES = """
byoanet byobnet convmixer convnext cspnet densenet dla dpn edgenext efficientnet fasternet fastvit focalnet
ghostnet hardcorenas hgnet hrnet inception_next inception_resnet_v2 inception_v3 inception_v4 lcnetv2 mambaout
metaformer mobilenetv3 nasnet nfnet pnasnet rdnet regnet repghost repvit res2net resnest resnet resnetv2 rexnet selecsls
senet sknet starnet tresnet vgg vovnet xception xception_aligned
"""
LEFT_OUT = {"timm": ("caformer_*", "test_*"), "torchvision": ("swin*", "vit*", "maxvit*")}
SIZE_WORDS = "xxs xs xxl xl x xx tiny small base medium large atto femto pico nano zepto huge xlarge xxlarge kobe slim"
Row = dict[str, Any]


def names() -> list[str]:
    """``timm:NAME`` and ``torchvision:NAME`` of all models to measure."""
    return LIST.read_text().split()


def choose() -> list[str]:
    """The models to measure, chosen anew from the packages' registries."""
    families: dict[tuple[str, str], list[str]] = {}
    for module in MODULES.split():
        for name in timm.list_models(module=module, exclude_filters=list(LEFT_OUT["timm"])):
            families.setdefault((module, family(name)), []).append(name)
    chosen = [(size, name) for members in families.values() for size, name in [min((weight(n), n) for n in members)]]
    small = [f"timm:{name}" for size, name in chosen if size <= LARGEST]
    models = torchvision.models.list_models(module=torchvision.models)
    cnns = [n for n in models if not any(fnmatch.fnmatch(n, pattern) for pattern in LEFT_OUT["torchvision"])]
    return small + [f"torchvision:{name}" for name in cnns]


def family(name: str) -> str:
    """A model's name without numbers, size words and single letters."""
    words = re.sub(r"\d+", "", name).split("_")
    return "_".join(w for w in words if len(w) > 1 and w not in SIZE_WORDS.split())


def weight(name: str) -> int:
    """The number of parameters of a timm model, without making them."""
    with torch.device("meta"):
        return sum(p.numel() for p in timm.create_model(name).parameters())


def create(name: str) -> tuple[nn.Module, Tensor]:
    """The model with random weights and an input: SIZE pixels wide where it trains on that, else its own size."""
    torch.manual_seed(0)
    source, _, model_name = name.partition(":")
    if source == "timm":
        model = timm.create_model(model_name)
        own = model.default_cfg["input_size"][-1]
    else:
        model = torchvision.models.get_model(model_name)
        own = 299 if model_name.startswith("inception") else 224
    fixed = getattr(model, "default_cfg", {}).get("fixed_input_size", False)
    if not fixed and own > SIZE and _runs(model, SIZE):
        return model, torch.randn(1, 3, SIZE, SIZE)
    return model, torch.randn(1, 3, own, own)


@torch.no_grad()
def _runs(model: nn.Module, size: int) -> bool:
    try:
        model.train()(torch.randn(2, 3, size, size))
    except Exception:  # a model that does not take this size is measured at its own
        return False
    return True


def measure_bcnet(model: nn.Module, x: Tensor, row: Row, stage: Callable[[str], None]) -> None:
    """Trace, couple, cost and run ``model`` at the smallest, random and largest widths."""
    stage("tracing and coupling")
    start = time.process_time()
    with timed_export() as export:
        space = trace(model, x)
    row["seconds"] = round(time.process_time() - start, 2)
    row["export_seconds"] = round(sum(export), 2)
    row["variables"] = len(space)
    row["fixed"] = [list(pair) for pair in space.fixed]
    stage("building")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        row["own_class"] = space.own_class
    if not space.own_class:
        row["graph_because"] = str(caught[-1].message)
    random = space.sample(np.random.default_rng(0))[0]
    for label, widths in (("smallest", space.min), ("random", random), ("largest", space.max)):
        stage(f"running at {label} widths")
        network = space.build(widths)
        train_once(network, x)
        stage(f"costing at {label} widths")
        check_costs(space, widths, network, x)
    stage("comparing with the original at full width")
    with torch.no_grad():
        found = tensors(space.build(space.max, weights_of=model).eval()(x))
        expected = tensors(model.eval()(x))
    row["difference"] = max(float((a - b).abs().max()) for a, b in zip(found, expected, strict=True))
    largest = max(float(t.abs().max()) for t in expected)
    if not row["difference"] <= 1e-5 * max(1.0, largest):
        raise ValueError(f"at full width the outputs differ by {row['difference']:.3g} (the largest is {largest:.3g})")


@contextmanager
def timed_export() -> Iterator[list[float]]:
    """Processor seconds of every call of torch.export inside the block."""
    plain, taken = torch.export.export, []

    def timed(*args: Any, **kwargs: Any) -> Any:
        start = time.process_time()
        try:
            return plain(*args, **kwargs)
        finally:
            taken.append(time.process_time() - start)

    torch.export.export = timed
    try:
        yield taken
    finally:
        torch.export.export = plain


def check_costs(space: NetworkSpace, widths: np.ndarray, network: nn.Module, x: Tensor) -> None:
    """The network's FLOPs by torch's counter and its parameters are what the space says."""
    # Attention by plain matrix products: the counter does not know the fused operator of the processor.
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH), torch.no_grad():
        network.eval()(x)
    counted = {"flops": counter.get_total_flops() // 2, "params": sum(p.numel() for p in network.parameters())}
    for name, number in counted.items():
        said = int(space.costs[name](widths)[0])
        if said != number:
            raise ValueError(f"{name} are {number:,}, but the space says {said:,}")


def measure_torch_pruning(model: nn.Module, x: Tensor, row: Row, stage: Callable[[str], None]) -> None:
    """Halve ``model`` with Torch-Pruning's magnitude pruner, leaving the classifier alone."""
    stage("building the dependency graph")
    classes = tensors(model.eval()(x))[0].shape[1]
    layers = [m for m in model.modules() if isinstance(m, (nn.Linear, nn.Conv2d))]
    kept = [m for m in layers if m.weight.shape[0] == classes]
    before = sum(p.numel() for p in model.parameters())
    start = time.process_time()
    importance = torch_pruning.importance.GroupMagnitudeImportance(p=2)
    pruner = torch_pruning.pruner.BasePruner(model, x, importance, pruning_ratio=0.5, ignored_layers=kept)
    row["seconds"] = round(time.process_time() - start, 2)
    row["groups"] = sum(1 for _ in pruner.DG.get_all_groups(ignored_layers=kept))
    stage("pruning")
    pruner.step()
    row["params_left"] = round(sum(p.numel() for p in model.parameters()) / before, 3)
    stage("running the pruned network")
    train_once(model, x)
    if tensors(model.eval()(x))[0].shape[1] != classes:
        raise ValueError("the pruned network has another number of classes")
    if row["params_left"] == 1:
        raise ValueError("nothing was pruned")


def train_once(network: nn.Module, x: Tensor) -> None:
    """One forward and backward pass in training mode on a batch of two."""
    outputs = tensors(network.train()(torch.cat([x, x])))
    torch.stack([t.float().sum() for t in outputs]).sum().backward()


def tensors(tree: object) -> list[Tensor]:
    return [t for t in torch.utils._pytree.tree_leaves(tree) if isinstance(t, Tensor)]


MEASURES = {"bcnet": measure_bcnet, "torch-pruning": measure_torch_pruning}


def child(tool: str, name: str, pipe: Connection) -> None:
    """Measure one model and send its row after every stage; the last row sent is the result."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    row: Row = {"model": name, "tool": tool, "failed_at": "creating the model", "error": None}

    def stage(text: str) -> None:
        row["failed_at"] = text
        pipe.send(row)

    pipe.send(row)
    try:
        model, x = create(name)
        row["input"] = x.shape[-1]
        used = math.ceil(time.process_time())
        resource.setrlimit(resource.RLIMIT_CPU, (used + LIMITS[tool], resource.RLIM_INFINITY))
        MEASURES[tool](model, x, row, stage)
        row["failed_at"] = None
    except Exception as error:  # whatever a model or a tool raises is a result here
        text = (str(error).strip().splitlines() or [""])[0][:300]
        row["error"] = text if type(error).__name__ == "BcnetError" else f"{type(error).__name__}: {text}"
    pipe.send(row)


def measure(tool: str, name: str) -> Row:
    """The row of one model, from a child process that is ended when its time is over."""
    context = multiprocessing.get_context("fork")
    mine, theirs = context.Pipe(duplex=False)
    process = context.Process(target=child, args=(tool, name, theirs))
    start = time.monotonic()
    process.start()
    theirs.close()
    row: Row = {"model": name, "tool": tool, "failed_at": "starting", "error": None}
    while mine.poll(max(0.0, start + PATIENCE - time.monotonic())):
        try:
            row = mine.recv()
        except EOFError:
            break
    else:
        os.kill(process.pid, signal.SIGXCPU)
    process.join()
    if row["failed_at"] and not row["error"]:
        late = process.exitcode == -signal.SIGXCPU
        ended = f"not done within {LIMITS[tool]} s" if late else f"its process ended with exit code {process.exitcode}"
        row |= {"error": ended, "timed_out": late}
    return row | {"total_seconds": round(time.monotonic() - start, 1)}


def cached() -> dict[tuple[str, str], Row]:
    lines = CACHE.read_text().splitlines() if CACHE.exists() else []
    return {(row["tool"], row["model"]): row for row in map(json.loads, lines)}


def run(options: argparse.Namespace) -> None:
    """Measure what is asked for and not cached yet."""
    CACHE.parent.mkdir(exist_ok=True)
    if not (options.resume or options.retry):
        CACHE.unlink(missing_ok=True)
    done = cached()
    commit = head()
    wanted = [n for n in names() if fnmatch.fnmatch(n, options.only)]
    todo = [(tool, name) for name in wanted for tool in options.tool]
    todo = [key for key in todo if key not in done or (options.retry and done[key]["failed_at"])]
    for i, (tool, name) in enumerate(todo):
        row = measure(tool, name) | {"commit": commit}
        with CACHE.open("a") as file:
            file.write(json.dumps(row) + "\n")
        outcome = f"{row['failed_at']}: {row['error']}" if row["failed_at"] else "works"
        print(f"[{i + 1}/{len(todo)}] {tool:13} {name:45} {row['total_seconds']:6.1f} s  {outcome}", flush=True)


def head() -> str:
    git = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=True, cwd=ROOT)
    return git.stdout.strip()


def write() -> None:
    """docs/results/coverage.json and .md from the cache."""
    done = cached()
    versions = {m.__name__: m.__version__ for m in (torch, timm, torchvision, torch_pruning, np)}
    results = {
        "command": "python benchmarks/coverage.py",
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "commit": head(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, 1 thread, Python {platform.python_version()}",
        "versions": versions,
        "limits_in_seconds": LIMITS,
        "rows": [done[tool, name] for name in names() for tool in MEASURES if (tool, name) in done],
    }
    (RESULTS / "coverage.json").write_text(json.dumps(results, indent=1) + "\n")
    (RESULTS / "coverage.md").write_text(markdown(results))


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure how many CNNs bcnet and Torch-Pruning can resize.")
    parser.add_argument("--resume", action="store_true", help="go on where the last run ended")
    parser.add_argument("--retry", action="store_true", help="as --resume, and measure again what failed")
    parser.add_argument("--only", default="*", metavar="PATTERN", help="models to measure, e.g. 'timm:resnet*'")
    parser.add_argument("--tool", choices=list(MEASURES), action="append", help="measure with this tool only")
    parser.add_argument("--list", action="store_true", help="only choose the models anew from the packages' registries")
    parser.add_argument("--report", action="store_true", help="only write the results from the cache")
    options = parser.parse_args()
    options.tool = options.tool or list(MEASURES)
    torch.set_num_threads(1)
    if options.list:
        LIST.write_text("\n".join(choose()) + "\n")
        return
    if not options.report:
        run(options)
    write()


if __name__ == "__main__":
    main()
