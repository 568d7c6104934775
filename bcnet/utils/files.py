"""Files that are there as a whole or not at all, also after a power cut, and what can go wrong in writing them.

The content goes to another name in the same folder, is flushed to the disk and renamed; then the folder is flushed.
"""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from bcnet.errors import BcnetError

if TYPE_CHECKING:
    from torch import Tensor

UNFINISHED = ".writing-"
"""How the names of unfinished files and folders begin; a killed process may leave one."""


def write_file(path: Path, data: bytes) -> None:
    """Write or replace a file; its folder is made where it is missing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{UNFINISHED}{os.getpid()}-{path.name}")
    try:
        _flushed(temporary, data)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    _flush_folder(path.parent)


def write_folder(path: Path, contents: Mapping[str, bytes]) -> None:
    """Write a folder of files that appears as a whole; it must not be there yet."""
    temporary = path.with_name(f"{UNFINISHED}{path.name}")
    try:
        temporary.mkdir(parents=True)
        for name, data in contents.items():
            _flushed(temporary / name, data)
        _flush_folder(temporary)
        os.replace(temporary, path)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    _flush_folder(path.parent)


@contextmanager
def clear_errors(what: str, again: str = "try again") -> Iterator[None]:
    """What the file system refuses while ``what`` is written, as one sentence."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise BcnetError(f"no space is left for {what}: free some and {again}") from error
        if error.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
            raise BcnetError(f"cannot write {what} ({reason}): choose a folder you may write to") from error
        raise BcnetError(f"cannot write {what} ({reason}): mend that and {again}") from error


def tensor_bytes(tensors: Mapping[str, Tensor]) -> bytes:
    """A safetensors file of contiguous copies on the CPU: it takes no two tensors that share memory."""
    import torch
    from safetensors.torch import save

    return save({name: torch.empty(t.shape, dtype=t.dtype).copy_(t.detach()) for name, t in tensors.items()})


def checksum(data: bytes) -> str:
    """The SHA-256 of a file's content, in hex."""
    return hashlib.sha256(data).hexdigest()


def _flushed(path: Path, data: bytes) -> None:
    with open(path, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _flush_folder(folder: Path) -> None:
    """Make the names in a folder durable; Windows has no such call and needs none."""
    if os.name == "nt":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
