"""The folder of a run: results that are written whole or not at all, and a lock that keeps others out.

A result is a JSON file, with a safetensors file beside it if it has weights. Both are written under another name,
flushed to the disk and renamed; the JSON comes last, so whatever it mentions exists. Under ``integrity`` it keeps the
digests of itself, of its tensors, of the results in the folder of its name, of files it refers to, and of the recipe it
was made by: what was changed afterwards is never used (:class:`DamagedResult`).
"""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Self

from torch import Tensor

from bcnet.errors import BcnetError
from bcnet.run.lock import FolderLock
from bcnet.run.recipe import Recipe
from bcnet.run.schema import SCHEMAS, fault
from bcnet.search.store import TRIALS, TrialStore
from bcnet.search.trial import Trial
from bcnet.training import distributed
from bcnet.utils.files import (
    UNFINISHED,
    clear_errors,
    digest,
    digest_file,
    parse_json,
    read_regular,
    tensor_bytes,
    usable,
    write_file,
)

FORMAT_VERSION = 2
LARGEST_RESULT = 2**26  # bytes of JSON; the latency table of a large network has about 10^6
BEGUN = ("lock", "recipe.yaml")
"""What a run that was killed at its start may leave, besides unfinished files."""
DOUBT = "search/doubt"
"""Whether scores tell configurations apart, and what a search ranks by because of it."""


class DamagedResult(BcnetError):
    """A result is not what was written (``cause``): resuming the run repeats its stage and those after it."""

    def __init__(self, cause: str):
        super().__init__(f"{cause}: resume the run to have it made again")
        self.cause = cause


class RunFolder:
    """Results by name: ``trace`` is RUN/trace.json, ``retrain/found`` is RUN/retrain/found.json and so on."""

    def __init__(self, folder: str | Path):
        self.folder = usable(Path(folder))
        self._lock = FolderLock(self.folder)

    @classmethod
    def create(cls, folder: str | Path, recipe: Recipe, facts: dict[str, Any]) -> Self:
        """A new run; ``facts`` go into run.json, and so does the recipe's text."""
        run = cls(folder)
        if run.done("run"):
            raise BcnetError(f"{run.folder} holds a run already: resume it with --resume, or choose another folder")
        with run._clear_errors():
            found = [path.name for path in run.folder.iterdir()] if run.folder.is_dir() else []
        if any(name not in BEGUN and not name.startswith(UNFINISHED) for name in found):
            raise BcnetError(f"{run.folder} holds other files: choose an empty folder")
        run.begin(recipe.to_yaml(), facts)
        return run

    def begin(self, recipe: str, facts: Mapping[str, Any]) -> None:
        """Write recipe.yaml and run.json."""
        self.write_file("recipe.yaml", recipe.encode())
        self.write("run", {**facts, "recipe": recipe})

    @classmethod
    def open(cls, folder: str | Path) -> Self:
        """A run that was created before."""
        run = cls(folder)
        if not run.done("run") and not run.path("recipe.yaml").is_file():
            raise BcnetError(f"{run.folder} is not the folder of a run: it has neither run.json nor recipe.yaml")
        return run

    @property
    def recipe(self) -> Recipe:
        try:
            return Recipe.from_yaml(self.recipe_text)
        except BcnetError as error:
            raise BcnetError(
                f"neither run.json nor recipe.yaml of {self.folder} can be read ({error}): "
                "begin the run anew in another folder"
            ) from None

    @property
    def recipe_text(self) -> str:
        """The recipe that the run began with; the copy in run.json counts, so recipe.yaml may be lost."""
        begun = self.glance("run")
        return begun["recipe"] if begun is not None else Recipe.read_text(self.path("recipe.yaml"))

    def path(self, *parts: str) -> Path:
        return self.folder.joinpath(*parts)

    def done(self, name: str) -> bool:
        return self.path(f"{name}.json").is_file()

    def read(self, name: str) -> dict[str, Any]:
        """The result called ``name``, checked against its digest and its schema."""
        content = self._whole(name)
        del content["integrity"]
        return content

    def glance(self, name: str) -> dict[str, Any] | None:
        """The result called ``name``, None where it is missing or damaged."""
        try:
            return self.read(name) if self.done(name) else None
        except DamagedResult:
            return None

    def check(self, name: str) -> None:
        """Raise a :class:`DamagedResult` where a result, its tensors, parts or files are not what was written."""
        written = self._whole(name)["integrity"]
        if "tensors" in written:
            self._check_file(f"{name}.safetensors", written["tensors"]["sha256"])
        for file, expected in written.get("files", {}).items():
            self._check_file(file, expected)
        for part, expected in written.get("parts", {}).items():
            if not self.done(f"{name}/{part}"):
                raise self._damaged(f"{name}/{part}.json", "it is missing")
            self.check(f"{name}/{part}")
            if self._whole(f"{name}/{part}")["integrity"]["sha256"] != expected:
                raise self._damaged(f"{name}/{part}.json")

    def write(
        self,
        name: str,
        result: Mapping[str, Any],
        tensors: Mapping[str, Tensor] | None = None,
        files: Iterable[str] = (),
    ) -> None:
        """Keep a result; ``files`` are those it refers to, by their paths within the folder.

        Of several processes, the first one writes once all have got here, so that none finds a result that it is still
        about to make, and the others wait until it is written.
        """
        distributed.wait()
        if distributed.main_process():
            self._lock.check()
            integrity: dict[str, Any] = {}
            if name != "run":
                integrity["recipe"] = digest(self.recipe_text.encode())
            if tensors is not None:
                data = tensor_bytes(tensors)
                self.write_file(f"{name}.safetensors", data)
                integrity["tensors"] = {"bytes": len(data), "sha256": digest(data)}
            with self._clear_errors():
                integrity["files"] = {file: digest_file(self.path(file)) for file in files}
            parts = {part: self._whole(f"{name}/{part}") for part in self.parts(name)}
            integrity["parts"] = {part: content["integrity"]["sha256"] for part, content in parts.items()}
            content = {"version": FORMAT_VERSION, **result, "integrity": integrity}
            plain = json.loads(json.dumps(content, default=lambda value: value.tolist()))
            plain["integrity"]["sha256"] = _digest_of(plain)
            self.write_file(f"{name}.json", json.dumps(plain, indent=1).encode())
        distributed.wait()

    def tensors(self, name: str) -> dict[str, Tensor]:
        """The tensors that were written with a result, on the CPU."""
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        written = self._whole(name)["integrity"].get("tensors")
        file = f"{name}.safetensors"
        if written is None:
            raise self._damaged(file)
        self._check_file(file, written["sha256"])
        try:
            return load_file(self.path(file))
        except (OSError, SafetensorError):
            raise self._damaged(file) from None

    def trials(self) -> list[Trial]:
        """The trials of the search so far."""
        with TrialStore(self.path(TRIALS), read_only=True) as store:
            return store.trials()

    @property
    def ranked_by(self) -> str:
        """What the search ranks by, also where it has not ended; of a ``loss``, scores are the negation."""
        known = self.glance("search") or self.glance(DOUBT) or {}
        return str(known.get("ranked_by") or self.recipe.rank_by)

    def parts(self, name: str) -> list[str]:
        """The results in the folder of a result's name, such as the networks of ``retrain``."""
        return sorted(path.stem for path in self.path(name).glob("*.json")) if f"{name}/" in SCHEMAS else []

    def discard(self, name: str) -> None:
        """Forget a result, but not its parts."""
        distributed.wait()  # until no process reads it any longer
        if not distributed.main_process():
            return
        for suffix in (".json", ".safetensors"):
            self.path(name + suffix).unlink(missing_ok=True)

    def remove(self, name: str) -> None:
        """Forget a result with all its parts."""
        self.discard(name)
        if not distributed.main_process():
            return
        shutil.rmtree(self.path(name), ignore_errors=True)
        with contextlib.suppress(OSError):  # the folder it was in, if that is empty now
            self.path(name).parent.rmdir()

    def abandon(self) -> None:
        """Remove what is left of a run that could not begin, so that its folder can be used for the next attempt."""
        if not distributed.main_process():
            return
        for name in ("run.json", "recipe.yaml", "latency.json", "lock"):
            self.path(name).unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            self.folder.rmdir()

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Keep other processes out; the lock ends with this process, however it ends. It may be taken again within.

        Of several processes that work together, the first one holds it for all.
        """
        distributed.decide(self._acquire)
        try:
            yield
        finally:
            if distributed.main_process():
                self._lock.release()

    def _acquire(self) -> None:
        with self._clear_errors():
            self._lock.acquire()

    def write_file(self, name: str, data: bytes) -> None:
        """Write a file of the folder, whole or not at all; of several processes, only the first one does."""
        if not distributed.main_process():
            return
        with self._clear_errors():
            self._lock.check()
            write_file(self.path(name), data)

    def _whole(self, name: str) -> dict[str, Any]:
        """The content of a result's JSON."""
        path = self.path(f"{name}.json")
        try:
            data = parse_json(read_regular(path, LARGEST_RESULT))
        except FileNotFoundError:
            raise BcnetError(f"{self.folder} has no {name}.json yet: resume the run to have it made") from None
        except (OSError, ValueError, RecursionError):
            raise self._damaged(f"{name}.json") from None
        if not isinstance(data, dict):
            raise self._damaged(f"{name}.json")
        integrity, version = data.get("integrity"), data.get("version")
        as_written = isinstance(integrity, dict) and integrity.get("sha256") == _digest_of(data)
        if (version == FORMAT_VERSION - 1 and integrity is None) or (as_written and version != FORMAT_VERSION):
            raise BcnetError(
                f"{path} has format version {version!r:.20}, but this bcnet reads {FORMAT_VERSION}: "
                "use the bcnet that made it, or begin anew in another folder"
            )
        wrong = fault(name, data) if as_written else "it was changed after it was written"
        if wrong is None and name != "run" and data["integrity"].get("recipe") != digest(self.recipe_text.encode()):
            wrong = "it was made by another recipe"
        if wrong is not None:
            raise self._damaged(f"{name}.json", wrong)
        return data

    def _check_file(self, name: str, expected: str) -> None:
        try:
            found = digest_file(self.path(name))
        except OSError:
            found = None
        if found != expected:
            raise self._damaged(name, "it is missing" if found is None else "it was changed after it was written")

    def _damaged(self, name: str, reason: str = "it cannot be read") -> DamagedResult:
        return DamagedResult(f"{self.path(name)} is damaged ({reason})")

    def _clear_errors(self) -> contextlib.AbstractContextManager[None]:
        return clear_errors(str(self.folder), "resume, what is there is kept")


def _digest_of(content: dict[str, Any]) -> str:
    """The digest of a result, without the digest itself, whatever the order and layout of its JSON."""
    integrity = {key: value for key, value in content["integrity"].items() if key != "sha256"}
    return digest(json.dumps({**content, "integrity": integrity}, sort_keys=True).encode())
