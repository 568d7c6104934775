"""The folder of a run: results that are there as a whole or not at all, and a lock that keeps others out.

A result is a JSON file, with a safetensors file beside it where it has weights. Both are written under another
name, flushed to the disk and renamed; the JSON comes last, so what it says is there *is* there.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

from torch import Tensor

from bcnet.errors import BcnetError
from bcnet.run.recipe import Recipe
from bcnet.training import distributed
from bcnet.utils.files import UNFINISHED, clear_errors, tensor_bytes, write_file

FORMAT_VERSION = 1
RESUME = "resume, what is there is kept"


class RunFolder:
    """Results by name: ``trace`` is RUN/trace.json, ``retrain/found`` is RUN/retrain/found.json and so on."""

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)

    @classmethod
    def create(cls, folder: str | Path, recipe: Recipe, facts: dict[str, Any]) -> Self:
        """A new run; ``facts`` go into run.json."""
        run = cls(folder)
        if run.done("run"):
            raise BcnetError(f"{run.folder} holds a run already: resume it with --resume, or choose another folder")
        found = [path.name for path in run.folder.iterdir()] if run.folder.is_dir() else []
        # A run killed at its start leaves these.
        if any(name not in ("lock", "recipe.yaml") and not name.startswith(UNFINISHED) for name in found):
            raise BcnetError(f"{run.folder} holds other files: choose an empty folder")
        run._write_file("recipe.yaml", recipe.to_yaml().encode())
        run.write("run", facts)
        return run

    @classmethod
    def open(cls, folder: str | Path) -> Self:
        """A run that was created before."""
        run = cls(folder)
        if not run.done("run") or not run.path("recipe.yaml").is_file():
            raise BcnetError(f"{run.folder} is no folder of a run: run.json and recipe.yaml are looked for")
        return run

    @property
    def recipe(self) -> Recipe:
        return Recipe.read(self.path("recipe.yaml"))

    def path(self, *parts: str) -> Path:
        return self.folder.joinpath(*parts)

    def done(self, name: str) -> bool:
        return self.path(f"{name}.json").is_file()

    def read(self, name: str) -> dict[str, Any]:
        """The result called ``name``."""
        path = self.path(f"{name}.json")
        try:
            data = json.loads(path.read_bytes())
        except FileNotFoundError:
            raise BcnetError(f"{self.folder} has no {path.name} yet: `bcnet run --resume {self.folder}`") from None
        except (OSError, ValueError, RecursionError):
            data = None
        if not isinstance(data, dict):
            raise BcnetError(f"{path} is damaged: remove it and resume the run")
        if data.get("version") != FORMAT_VERSION:
            raise BcnetError(
                f"{path} has format version {data.get('version')!r:.20}, but this bcnet reads {FORMAT_VERSION}"
            )
        return data

    def write(self, name: str, result: dict[str, Any], tensors: dict[str, Tensor] | None = None) -> None:
        if tensors is not None:
            self._write_file(f"{name}.safetensors", tensor_bytes(tensors))
        text = json.dumps({"version": FORMAT_VERSION, **result}, indent=1, default=lambda value: value.tolist())
        self._write_file(f"{name}.json", text.encode())
        distributed.wait()  # until it is there for all processes

    def tensors(self, name: str) -> dict[str, Tensor]:
        """The tensors that were written with a result, on the CPU."""
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        path = self.path(f"{name}.safetensors")
        try:
            return load_file(path)
        except (OSError, SafetensorError):
            raise BcnetError(f"{path} is missing or damaged: remove {name}.json and resume the run") from None

    def remove(self, name: str) -> None:
        """Forget a result, or a folder of them."""
        distributed.wait()  # until no process reads it any more
        if not distributed.main_process():
            return
        for suffix in (".json", ".safetensors"):
            self.path(name + suffix).unlink(missing_ok=True)
        shutil.rmtree(self.path(name), ignore_errors=True)
        with contextlib.suppress(OSError):  # the folder it lay in, where that is empty now
            self.path(name).parent.rmdir()

    def abandon(self) -> None:
        """Leave nothing of a run that could not begin, so that its folder can be used for the next try."""
        if not distributed.main_process():
            return
        for name in ("run.json", "recipe.yaml", "latency.json", "lock"):
            self.path(name).unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            self.folder.rmdir()

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Keep other processes out; the lock ends with this process, however it ends.

        Of several processes that work together, the first one holds it for all.
        """
        if not distributed.main_process():
            yield
            return
        try:
            import fcntl
        except ImportError:  # Windows
            warnings.warn("this system has no file locks: start one process per run folder only", stacklevel=3)
            yield
            return
        with clear_errors(str(self.folder), RESUME):
            self.folder.mkdir(parents=True, exist_ok=True)
            file = open(self.path("lock"), "a+")  # noqa: SIM115, closed below
        with file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                file.seek(0)
                raise BcnetError(
                    f"process {file.read(20).strip() or 'unknown'} is working in {self.folder}: "
                    "wait until it ends, or choose another folder"
                ) from None
            file.truncate(0)
            file.write(f"{os.getpid()}\n")
            file.flush()
            yield

    def _write_file(self, name: str, data: bytes) -> None:
        if not distributed.main_process():
            return
        with clear_errors(str(self.folder), RESUME):
            write_file(self.path(name), data)
