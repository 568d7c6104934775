"""The files that bcnet reads, for benchmarks/fuzz.py: how to make a good one, to change it, and to read it."""

from __future__ import annotations

import atexit
import functools
import io
import json
import os
import pickle
import random
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from fuzz_changes import change_bytes, change_cells, change_description, change_json, change_result, change_tensors
from torch import nn

from bcnet.bench import BenchSpace, ChannelBench
from bcnet.bench.build import BuildConfig, open_results
from bcnet.bench.rank import _read_report as read_rank
from bcnet.data import LoadOptions
from bcnet.data.cifar10 import read_cifar10
from bcnet.data.imagefolder import FolderData, read_folder
from bcnet.latency.table import LatencyTable
from bcnet.run import serialization
from bcnet.run.folder import RunFolder
from bcnet.run.pipeline import run_stages
from bcnet.run.recipe import Recipe
from bcnet.run.report import write_report
from bcnet.run.session import Run, facts
from bcnet.search.store import TrialStore
from bcnet.space.cost import QuadraticCost
from bcnet.space.network import trace
from bcnet.space.widths import WidthSpace, WidthVariable, candidates
from bcnet.training import checkpoint

Mutate = Callable[[random.Random, Path, Path, bytes], None]


@dataclass(frozen=True)
class Format:
    """``make(folder)`` writes good files and names those to change; ``read(folder)`` reads them as bcnet does.

    ``guarded``: what is read must be the original or refused.
    """

    name: str
    make: Callable[[Path], list[str]]
    read: Callable[[Path], Any]
    mutate: Mutate
    guarded: bool

    @staticmethod
    def equal(a: Any, b: Any) -> bool:
        return _plain(a) == _plain(b)


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return str(value.dtype), list(value.shape), value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    if isinstance(value, np.ndarray):
        return str(value.dtype), value.shape, value.tobytes()
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value


# Good files


class Small(nn.Sequential):
    """A network so small that it is traced in a moment."""

    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(1), nn.Linear(4, 10)
        )


@functools.cache
def _finished() -> Path:
    """A whole run, made once."""
    folder = Path(tempfile.mkdtemp(prefix="bcnet-fuzz-run-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    recipe = Recipe.parse(
        {
            "model": "zoo:digits_cnn",
            "start": "scratch",
            "data": "digits",
            "groups": 2,
            "supernet": {"epochs": 1},
            "search": {"evaluations": 6, "population": 3},
            "retrain": {"epochs": 1},
            "threads": 1,
        }
    )
    run = Run.create(folder, recipe, facts(["fuzz"], recipe, "cpu"))
    with run.lock():
        run_stages(run)
    return folder


def _copy_run(folder: Path, *files: str) -> list[str]:
    shutil.copytree(_finished(), folder, dirs_exist_ok=True)
    return list(files)


RESULTS = ("run", "trace", "train", "search", "retrain", "retrain/found", "compare", "export", "report")


def run_results(folder: Path) -> list[str]:
    return _copy_run(folder, *(f"{name}.json" for name in RESULTS))


def _read_results(folder: Path) -> Any:
    run = RunFolder.open(folder)
    return run.recipe.to_dict(), {name: (run.check(name), run.read(name))[1] for name in RESULTS if name != "run"}


def _read_report(folder: Path) -> Any:
    run = RunFolder.open(folder)
    run.read("report")
    return write_report(run, folder / "page.html").stat().st_size > 0


def _run_tensors(folder: Path) -> Any:
    run = RunFolder.open(folder)
    return {name: run.tensors(name) for name in ("train", "retrain/found")}


def _read_trials(folder: Path) -> Any:
    with TrialStore(folder / "trials.sqlite", read_only=True) as store:
        return [t.to_dict() for t in store.trials()], store.settings()


def _write_recipe(folder: Path) -> list[str]:
    (folder / "recipe.yaml").write_text(Recipe.read("digits").to_yaml())
    return ["recipe.yaml"]


def _read_recipe(folder: Path) -> Any:
    recipe = Recipe.read(folder / "recipe.yaml")
    return recipe.to_yaml()


def _write_checkpoint(folder: Path) -> list[str]:
    tree = {"step": 3, "net": {"a": torch.arange(6.0), "b": torch.ones(2, 2)}, "history": [[1, 0.5, 0.1]]}
    path = checkpoint.save(folder, *checkpoint.pack(tree))
    return [f"{path.name}/{file.name}" for file in path.iterdir()]


def _read_checkpoint(folder: Path) -> Any:
    return checkpoint.unpack(*checkpoint.load(folder))


@functools.cache
def _space() -> Any:
    torch.manual_seed(0)
    return trace(Small(), torch.zeros(1, 1, 8, 8), groups=4)


def _write_export(folder: Path) -> list[str]:
    space = _space()
    scale = {"mean": (4.9,), "std": (6.0,)}
    description = serialization.Description(
        {space.names[0]: 3}, ((1, 8, 8),), "zoo:digits_cnn", 10, normalisation=scale
    )
    serialization.save(folder, space.build([3]), description)
    return [serialization.DESCRIPTION, serialization.WEIGHTS]


def _read_export(folder: Path) -> Any:
    """As ``bcnet.load``, but traced once: that alone takes half a second."""
    found = serialization.describe(folder)
    kept = serialization._space
    serialization._space = lambda *_: _space()
    try:
        network = serialization.load(folder, model=Small)
    finally:
        serialization._space = kept
    return found, dict(network.state_dict())


def _write_space(folder: Path) -> list[str]:
    variables = [WidthVariable(f"v{i}", candidates(8 * i, 4), (f"l{i}",), 1) for i in range(1, 5)]
    (folder / "space.json").write_text(WidthSpace(variables).to_json())
    return ["space.json"]


def _read_space(folder: Path) -> Any:
    from bcnet.bench.spaces import get_space

    space = get_space(str(folder / "space.json"))
    return space.to_json(), space.all_widths()[:10]


COSTS = {"flops": 9.0, "params": 10.0}
"""What a channel of the first width costs by itself; both also cost the product of the widths."""
SMALL_SPACE = BenchSpace(
    "small",
    [WidthVariable(name, candidates(8, groups=4)) for name in ("a", "b")],
    {name: QuadraticCost(0, np.array([k, 0.0]), np.array([[0.0, 1.0], [0.0, 0.0]])) for name, k in COSTS.items()},
)


def _write_table(folder: Path) -> list[str]:
    rng = np.random.default_rng(0)
    ChannelBench(SMALL_SPACE, rng.uniform(80, 95, (SMALL_SPACE.size, 3)).round(2)).save(folder / "table.json")
    return ["table.json"]


def _read_table(folder: Path) -> Any:
    table = ChannelBench.load(SMALL_SPACE, folder / "table.json")
    return table.acc, table.costs, table.best().mean


def _write_latency(folder: Path) -> list[str]:
    rng = np.random.default_rng(0)
    network = {"widths": [3, 4], "predicted": 1e5, "measured": 1.1e5, "fitted": False}
    table = {
        "format": "bcnet.latency",
        "version": 1,
        "facts": {"device": "cpu", "batch": 1, "threads": 1},
        "layers": ["a", "b"],
        "row_forms": rng.uniform(0, 1, (2, 3)).tolist(),
        "column_forms": rng.uniform(0, 1, (2, 3)).tolist(),
        "rows": [[1, 2, 4, 8]] * 2,
        "columns": [[1, 2, 4, 8]] * 2,
        "table": rng.uniform(1e3, 1e5, (2, 4, 4)).tolist(),
        "traffic": [0.0, 1.0, 1.0],
        "weights": [100.0, 1.0, 0.1],
        "networks": [network],
    }
    (folder / "latency.json").write_text(json.dumps(table))
    return ["latency.json"]


def _read_latency(folder: Path) -> Any:
    table = LatencyTable.from_json((folder / "latency.json").read_text("utf-8", "replace"))
    return table([[3, 4], [1, 8]]), table.error


def _cifar_rows(n: int = 3) -> tuple[np.ndarray, list[int]]:
    rng = np.random.default_rng(n)
    return rng.integers(0, 256, (n, 3072), dtype=np.uint8), rng.integers(0, 10, n).tolist()


CIFAR_PARTS = (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch")


def _write_binary(folder: Path) -> list[str]:
    images, labels = _cifar_rows()
    rows = np.concatenate([np.array(labels, dtype=np.uint8)[:, None], images], axis=1)
    for name in CIFAR_PARTS:
        (folder / f"{name}.bin").write_bytes(rows.tobytes())
    return [f"{name}.bin" for name in CIFAR_PARTS]


def _write_pickled(folder: Path) -> list[str]:
    images, labels = _cifar_rows()
    for name in CIFAR_PARTS:
        (folder / name).write_bytes(pickle.dumps({b"data": images, b"labels": labels}, protocol=4))
    return list(CIFAR_PARTS)


def _write_parquet(folder: Path) -> list[str]:
    import pyarrow.parquet
    from PIL import Image

    images, labels = _cifar_rows()
    held = []
    for values in images:
        held.append(io.BytesIO())
        Image.fromarray(values.reshape(32, 32, 3)).save(held[-1], "png")
    table = pyarrow.table({"img": [{"bytes": image.getvalue(), "path": None} for image in held], "label": labels})
    for part in ("train", "test"):
        pyarrow.parquet.write_table(table, folder / f"{part}.parquet")
    return ["train.parquet", "test.parquet"]


def _write_cache(folder: Path) -> list[str]:
    _write_parquet(folder)
    _read_cifar(folder)
    return [str(path.relative_to(folder)) for path in (folder / "bcnet").iterdir()]


def _read_cifar(folder: Path) -> Any:
    os.environ["XDG_CACHE_HOME"] = str(folder)  # of decoded parquet files
    found = read_cifar10(folder)
    return found.train.images, found.train.labels, found.test.images, found.test.labels


def _write_images(folder: Path) -> list[str]:
    from PIL import Image

    rng = np.random.default_rng(0)
    names = []
    for label in ("cat", "dog"):
        (folder / label).mkdir()
        for number, kind in enumerate(("png", "jpg", "bmp", "webp", "ppm")):
            held = io.BytesIO()
            image = Image.fromarray(rng.integers(0, 256, (12, 16, 3), dtype=np.uint8))
            image.save(held, {"jpg": "jpeg"}.get(kind, kind))
            name = f"{label}/{number}.{kind}"
            (folder / name).write_bytes(held.getvalue())
            names.append(name)
    return names


def _read_images(folder: Path) -> Any:
    data = FolderData(read_folder(folder), LoadOptions(image_size=8, workers=0))
    return [x.shape for x, _ in data.plain().batches(0)]


def _write_widths(folder: Path) -> list[str]:
    (folder / "widths.json").write_text(json.dumps({"widths": {"a": 3, "b": 4}}))
    return ["widths.json"]


def _read_widths(folder: Path) -> Any:
    from bcnet.cli.network import _read_file

    return _read_file(folder / "widths.json")


BUILD = BuildConfig("zoo:digits_cnn", "digits")


def _write_build(folder: Path) -> list[str]:
    results = open_results(folder, BUILD)
    for number in range(20):
        results.add({"widths": number // 2, "seed": number % 2, "best": 90 + number / 10, "last": 89.0})
    return ["results.jsonl"]


def _read_build(folder: Path) -> Any:
    return open_results(folder, BUILD).known


def _write_rank(folder: Path) -> list[str]:
    figures = {"method": "bcv2", "seed": 0, "pearson": 0.9, "spearman": 0.9, "kendall": 0.7}
    (folder / "rank.json").write_text(json.dumps(figures))
    return ["rank.json"]


FORMATS: tuple[Format, ...] = (
    Format("results, bytes", run_results, _read_results, change_bytes, guarded=True),
    Format("results, values", run_results, _read_results, change_json, guarded=True),
    Format("results, digests put right", run_results, _read_report, change_result, guarded=False),
    Format("tensors of a run", lambda f: _copy_run(f, "train.safetensors", "retrain/found.safetensors"), _run_tensors,
           change_bytes, guarded=True),
    Format("recipe of a run", lambda f: _copy_run(f, "recipe.yaml"), lambda f: RunFolder.open(f).recipe.to_dict(),
           change_bytes, guarded=True),
    Format("recipe", _write_recipe, _read_recipe, change_bytes, guarded=False),
    Format("trials, bytes", lambda f: _copy_run(f, "trials.sqlite"), _read_trials, change_bytes, guarded=True),
    Format("trials, digests put right", lambda f: _copy_run(f, "trials.sqlite"), _read_trials, change_cells,
           guarded=False),
    Format("checkpoint", _write_checkpoint, _read_checkpoint, change_bytes, guarded=True),
    Format("export, bytes", _write_export, _read_export, change_bytes, guarded=True),
    Format("export, digest of weights put right", lambda f: _write_export(f)[1:], _read_export, change_tensors,
           guarded=False),
    Format("export, digests put right", lambda f: _write_export(f)[:1], _read_export, change_description,
           guarded=False),
    Format("width space, bytes", _write_space, _read_space, change_bytes, guarded=False),
    Format("width space, values", _write_space, _read_space, change_json, guarded=False),
    Format("table, bytes", _write_table, _read_table, change_bytes, guarded=False),
    Format("table, values", _write_table, _read_table, change_json, guarded=False),
    Format("latency table, bytes", _write_latency, _read_latency, change_bytes, guarded=False),
    Format("latency table, values", _write_latency, _read_latency, change_json, guarded=False),
    Format("results of bench build", _write_build, _read_build, change_bytes, guarded=False),
    Format("rank.json", _write_rank, lambda f: read_rank(f / "rank.json"), change_bytes, guarded=False),
    Format("widths for bcnet cost", _write_widths, _read_widths, change_bytes, guarded=False),
    Format("CIFAR-10, binary", _write_binary, _read_cifar, change_bytes, guarded=False),
    Format("CIFAR-10, pickled", _write_pickled, _read_cifar, change_bytes, guarded=False),
    Format("CIFAR-10, parquet", _write_parquet, _read_cifar, change_bytes, guarded=False),
    Format("CIFAR-10, cache", _write_cache, _read_cifar, change_bytes, guarded=True),
    Format("images", _write_images, _read_images, change_bytes, guarded=False),
)  # fmt: skip
