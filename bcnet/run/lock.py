"""One process at a time in a folder.

The folder itself is locked, not a file in it, so that removing a file does not let a second process in; the file
``lock`` only tells others who is at work (and is the lock where a file system cannot lock folders). The lock ends with
the process, however that ends.
"""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from types import ModuleType

from bcnet.errors import BcnetError
from bcnet.utils.files import identity, read_regular


class FolderLock:
    """The lock of ``folder``; its holder may acquire it again, and must release it as often."""

    def __init__(self, folder: Path):
        self.folder = folder
        self._depth = 0
        self._descriptors: list[int] = []
        self._place: tuple[int, int] | None = None

    def acquire(self) -> None:
        """Take the lock, or say who has it; the folder is created if it is missing."""
        if self._depth == 0:
            self._take()
        self._depth += 1

    def release(self) -> None:
        self._depth -= 1
        if self._depth == 0:
            self._release_all()

    def check(self) -> None:
        """Raise a :class:`BcnetError` where the folder is no longer the one that was locked."""
        if self._place is not None and identity(self.folder) != self._place:
            raise BcnetError(f"{self.folder} was removed or replaced while this run worked in it: begin the run anew")

    def _take(self) -> None:
        try:
            import fcntl
        except ImportError:  # Windows
            warnings.warn("this system has no file locks: start one process per run folder only", stacklevel=5)
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        try:
            self._lock_both(fcntl)
            self.check()
        except BaseException as error:
            self._release_all()
            if isinstance(error, BlockingIOError):
                way_out = "wait until it ends, or choose another folder"
                raise BcnetError(f"process {self._holder()} is working in {self.folder}: {way_out}") from None
            raise

    def _lock_both(self, fcntl: ModuleType) -> None:
        place = self._opened(self.folder, os.O_RDONLY)
        self._place = os.fstat(place).st_dev, os.fstat(place).st_ino
        try:
            fcntl.flock(place, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise
        except OSError:  # some network file systems lock files only
            pass
        file = self._opened(self.folder / "lock", os.O_RDWR | os.O_CREAT)
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.ftruncate(file, 0)
        os.write(file, f"{os.getpid()}\n".encode())

    def _opened(self, path: Path, flags: int) -> int:
        self._descriptors.append(os.open(path, flags, 0o644))
        return self._descriptors[-1]

    def _release_all(self) -> None:
        self._place = None
        while self._descriptors:
            os.close(self._descriptors.pop())

    def _holder(self) -> str:
        try:
            return read_regular(self.folder / "lock", 100).decode("ascii", "replace").strip() or "unknown"
        except OSError:
            return "unknown"
