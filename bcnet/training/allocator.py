"""glibc's memory allocator, told to keep what it has: a training step asks for the same sizes again and again.

By default glibc maps every large block anew and gives it back when freed, so each step pays for page faults.
"""

from __future__ import annotations

import ctypes
import sys

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_LARGEST = 2**31 - 1


def tune_allocator() -> bool:
    """Keep freed memory in this process, whatever its size; returns whether that was possible (Linux with glibc).

    The peak stays the same, but memory is not given back to the system before the process ends.
    """
    if not sys.platform.startswith("linux"):
        return False
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "gnu_get_libc_version") or not hasattr(libc, "mallopt"):
        return False
    # Both are needed: setting one alone switches off glibc's own adjustment of the other.
    return bool(libc.mallopt(_MMAP_THRESHOLD, _LARGEST)) and bool(libc.mallopt(_TRIM_THRESHOLD, _LARGEST))
