"""Checkpoints that survive a crash at any moment: tensors as safetensors, state as JSON, never pickle.

A checkpoint is a folder ``checkpoint-000012`` of three files: ``tensors.safetensors``, ``state.json`` and
``manifest.json`` with the size and checksum of both. It is written under another name, flushed to the disk and then
renamed, so that it is written whole or not at all; the one before it is kept as well.

``pack`` turns a tree of dicts, lists, numbers and tensors (a model's or an optimizer's
``state_dict``) into the two things ``save`` takes, and ``unpack`` turns what ``load`` gives back into the same tree.
"""

from __future__ import annotations

import json
import re
import shutil
import warnings
from collections.abc import Iterable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load as read_tensors
from torch import Tensor

from bcnet.errors import BcnetError
from bcnet.utils.files import UNFINISHED, clear_errors, digest, identity, read_regular, tensor_bytes, write_folder

FORMAT_VERSION = 1
KEPT = 2

_TENSORS, _STATE, _MANIFEST = "tensors.safetensors", "state.json", "manifest.json"
_NAME = re.compile(r"checkpoint-(\d{6,12})")


class _Damaged(Exception):
    """Why one checkpoint cannot be read."""


class NoCheckpoint(BcnetError):
    """There are checkpoints, but none of them can be read (``cause``)."""

    def __init__(self, cause: str):
        super().__init__(f"{cause}; remove the folder to start anew")
        self.cause = cause


def prepare(folder: str | Path) -> tuple[int, int] | None:
    """Create ``folder`` if it is missing, and return what identifies it."""
    with _clear_errors(folder):
        Path(folder).mkdir(parents=True, exist_ok=True)
    return identity(folder)


def save(
    folder: str | Path, tensors: dict[str, Tensor], state: dict[str, Any], place: tuple[int, int] | None = None
) -> Path:
    """Write a checkpoint into ``folder`` and return its path; of older ones the newest is kept.

    ``state`` must already be JSON: strings as keys, no tuples (:func:`pack` sees to that). With ``place``, which
    :func:`prepare` returned, a folder that was removed or replaced meanwhile is not written to.
    """
    folder = Path(folder)
    if place is not None and identity(folder) != place:
        raise BcnetError(f"{folder} was removed or replaced during the training: begin it anew")
    contents = {_TENSORS: tensor_bytes(tensors), _STATE: _to_json(state)}
    files = {name: {"bytes": len(data), "sha256": digest(data)} for name, data in contents.items()}
    contents[_MANIFEST] = _to_json({"format": "bcnet.checkpoint", "version": FORMAT_VERSION, "files": files})
    with _clear_errors(folder):
        _remove(folder.glob(f"{UNFINISHED}*"))
        path = folder / f"checkpoint-{_newest(folder) + 1:06d}"
        write_folder(path, contents)
    _remove(_checkpoints(folder)[KEPT:])
    return path


def load(folder: str | Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors (on the CPU) and state of the newest intact checkpoint; damaged ones cause a warning."""
    folder = Path(folder)
    paths = _checkpoints(folder)
    if not paths:
        raise BcnetError(f"there is no checkpoint in {folder}: nothing was saved there yet, or the folder is another")
    problems = []
    for path in paths:
        try:
            found = _read(path)
        except _Damaged as problem:
            problems.append(f"{path.name} {problem}")
            continue
        if problems:
            warnings.warn(f"in {folder} {', '.join(problems)}; {path.name} was loaded instead", stacklevel=2)
        return found
    raise NoCheckpoint(f"no checkpoint in {folder} can be read: {', '.join(problems)}")


def exists(folder: str | Path) -> bool:
    """Whether ``folder`` holds a checkpoint, damaged or not."""
    return bool(_checkpoints(Path(folder)))


def _clear_errors(folder: str | Path) -> AbstractContextManager[None]:
    return clear_errors(f"a checkpoint in {folder}", "resume, the checkpoint before it is kept")


def _read(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    manifest = _from_json(_bytes(path / _MANIFEST), _MANIFEST)
    if manifest.get("format") != "bcnet.checkpoint" or manifest.get("version") != FORMAT_VERSION:
        raise _Damaged(f"has format version {manifest.get('version')!r:.20}, not {FORMAT_VERSION}")
    contents = {}
    for name in (_TENSORS, _STATE):
        data = _bytes(path / name)
        try:
            whole = manifest["files"][name] == {"bytes": len(data), "sha256": digest(data)}
        except (KeyError, TypeError):
            whole = False
        if not whole:
            raise _Damaged(f"is damaged ({name} does not match its checksum)")
        contents[name] = data
    try:
        tensors = read_tensors(contents[_TENSORS])
    except Exception:  # a malicious file can fail in any way
        raise _Damaged(f"is damaged ({_TENSORS} is not a safetensors file)") from None
    return tensors, _from_json(contents[_STATE], _STATE)


def _bytes(path: Path) -> bytes:
    try:
        return read_regular(path)
    except OSError as error:
        raise _Damaged(f"is damaged ({path.name}: {error.strerror})") from None


def _from_json(data: bytes, name: str) -> dict[str, Any]:
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        raise _Damaged(f"is damaged ({name} is not JSON)") from None
    if not isinstance(value, dict):
        raise _Damaged(f"is damaged ({name} is not a JSON object)")
    return value


def _to_json(value: dict[str, Any]) -> bytes:
    try:
        return json.dumps(value).encode()
    except (TypeError, ValueError) as error:
        raise BcnetError(f"the state of a checkpoint must be JSON ({error}): pack it first") from None


def _checkpoints(folder: Path) -> list[Path]:
    """Checkpoints of ``folder``, newest first."""
    if not folder.is_dir():
        return []
    found = [path for path in folder.iterdir() if _NAME.fullmatch(path.name) and path.is_dir()]
    return sorted(found, key=lambda path: int(path.name.split("-")[1]), reverse=True)


def _newest(folder: Path) -> int:
    paths = _checkpoints(folder)
    return int(paths[0].name.split("-")[1]) if paths else 0


def _remove(paths: Iterable[Path]) -> None:
    for path in paths:
        shutil.rmtree(path, ignore_errors=True)


def pack(tree: dict[str, Any]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """A tree of dicts, lists, tuples, strings, numbers, None, tensors and arrays as (tensors, JSON state)."""
    tensors: dict[str, Tensor] = {}
    return tensors, {"tree": _pack(tree, "", tensors)}


def unpack(tensors: dict[str, Tensor], state: dict[str, Any]) -> dict[str, Any]:
    """The tree that :func:`pack` was given."""
    try:
        tree = _unpack(state["tree"], tensors)
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError):
        tree = None
    if not isinstance(tree, dict):
        raise BcnetError("this checkpoint's state was not written by this version of bcnet")
    return tree


def _pack(value: Any, place: str, tensors: dict[str, Tensor]) -> Any:
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (Tensor, np.ndarray)):
        # Numbered, because "a.b" may be one key or two.
        name = f"{len(tensors)}:{place}"
        tensors[name] = value if isinstance(value, Tensor) else torch.from_numpy(np.array(value))
        return {"$tensor" if isinstance(value, Tensor) else "$array": name}
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, (list, tuple)):
        items = [_pack(item, f"{place}.{i}", tensors) for i, item in enumerate(value)]
        return items if isinstance(value, list) else {"$tuple": items}
    if isinstance(value, dict):
        if not all(isinstance(key, (str, int)) for key in value):
            raise BcnetError(f"a checkpoint cannot hold the keys of {place.lstrip('.') or 'its state'}")
        # As pairs, because JSON would turn the parameter numbers of an optimizer into strings.
        return {"$dict": [[key, _pack(item, f"{place}.{key}", tensors)] for key, item in value.items()]}
    raise BcnetError(f"a checkpoint cannot hold {place.lstrip('.')}, a {type(value).__name__}")


def _unpack(value: Any, tensors: dict[str, Tensor]) -> Any:
    if isinstance(value, list):
        return [_unpack(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == "$dict":
        return {key: _unpack(item, tensors) for key, item in content}
    if kind == "$tuple":
        return tuple(_unpack(item, tensors) for item in content)
    if kind not in ("$tensor", "$array"):
        raise ValueError(kind)
    return tensors[content] if kind == "$tensor" else tensors[content].numpy()
