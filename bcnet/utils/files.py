"""Files that may come from strangers, and files that must be there as a whole or not at all.

Reading looks before it leaps: a pipe would hang, a device never ends, and a large file fills the memory, so only
regular files up to a stated size are opened. These refusals are ``OSError`` with a ``strerror`` fit for a sentence.

What is written is there as a whole or not at all, also after a power cut: the content goes to another name in the same
folder, is flushed to the disk and renamed; then the folder is flushed.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from bcnet.errors import BcnetError

if TYPE_CHECKING:
    from torch import Tensor

UNFINISHED = ".writing-"
"""How the names of unfinished files and folders begin; a killed process may leave one."""
CHUNK = 2**20


def open_regular(path: str | os.PathLike[str], most: int | None = None) -> BinaryIO:
    """A regular file of at most ``most`` bytes, opened for reading; a link to one will do."""
    try:
        # Without O_NONBLOCK, opening a pipe waits for a writer that may never come.
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    except ValueError as error:  # a NUL in its name
        raise OSError(errno.EINVAL, str(error)) from None
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise OSError(errno.EINVAL, "Not a regular file")
        if most is not None and found.st_size > most:
            raise OSError(errno.EFBIG, f"{found.st_size:,} bytes, where at most {most:,} are read")
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def read_regular(path: str | os.PathLike[str], most: int | None = None) -> bytes:
    """The content of a regular file of at most ``most`` bytes."""
    with open_regular(path, most) as file:
        size = os.fstat(file.fileno()).st_size
        return file.read(size)  # no more than that, even where it grows meanwhile


def parse_json(data: bytes) -> Any:
    """Parsed JSON; a :class:`ValueError` where it is not JSON, or holds strings that cannot be encoded."""
    found = json.loads(data)
    if b"\\ud" in data.lower():  # half a surrogate pair is not a character
        json.dumps(found, ensure_ascii=False).encode()
    return found


def full_path(path: str) -> Path:
    """``path`` made absolute, with ``~`` or ``~NAME`` replaced by the home folder."""
    try:
        return Path(path).expanduser().resolve()
    except (RuntimeError, ValueError, OSError) as error:  # no such user, a NUL, a loop of links
        raise BcnetError(f"{path!r:.80} is not a path: {str(error).rstrip('.')}") from None


def user_cache() -> Path:
    """Where bcnet caches what it can make again: in ``$XDG_CACHE_HOME``, or else in ``~/.cache``."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path(os.path.expanduser("~")) / ".cache") / "bcnet"


def usable(path: Path) -> Path:
    """``path`` itself, or a :class:`BcnetError` where no file can have such a name."""
    try:
        os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        pass
    except (OSError, ValueError) as error:
        raise BcnetError(f"cannot use {str(path)!r:.80}: {getattr(error, 'strerror', None) or error}") from None
    return path


def digest(data: bytes) -> str:
    """The SHA-256 of ``data``, in hex."""
    return hashlib.sha256(data).hexdigest()


def digest_file(path: str | os.PathLike[str]) -> str:
    """The SHA-256 of a regular file, read piece by piece."""
    found = hashlib.sha256()
    with open_regular(path) as file:
        while piece := file.read(CHUNK):
            found.update(piece)
    return found.hexdigest()


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


def identity(folder: str | os.PathLike[str]) -> tuple[int, int] | None:
    """What identifies a folder whatever its name: device and inode; None where there is no such folder."""
    try:
        found = os.stat(folder)
    except OSError:
        return None
    return found.st_dev, found.st_ino


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
    """Turn what the file system refuses while ``what`` is written into one sentence."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        if error.errno == errno.EISDIR:
            place = error.filename2 or error.filename
            raise BcnetError(f"cannot write {what}: {place} is a folder, so move it away and {again}") from error
        if error.errno in (errno.EEXIST, errno.ENOTDIR):
            obstacle = "a file is where a folder should be"
            raise BcnetError(f"cannot write {what}: {obstacle}, so move it away or choose another folder") from error
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise BcnetError(f"no space is left for {what}: free some and {again}") from error
        if error.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
            raise BcnetError(f"cannot write {what} ({reason}): choose a folder you may write to") from error
        raise BcnetError(f"cannot write {what} ({reason}): fix that and {again}") from error


def tensor_bytes(tensors: Mapping[str, Tensor]) -> bytes:
    """A safetensors file of contiguous copies on the CPU, since the format refuses tensors that share memory."""
    import torch
    from safetensors.torch import save

    return save({name: torch.empty(t.shape, dtype=t.dtype).copy_(t.detach()) for name, t in tensors.items()})


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
