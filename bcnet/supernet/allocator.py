"""glibc's allocator, tuned for training on a CPU.

By default glibc gives large blocks back to the system and asks for them again every step, and the page faults
cost more than the arithmetic (a factor of 2 and more on small networks). Two settings keep the memory.
"""

from __future__ import annotations

import ctypes
import platform
from functools import cache

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_LARGEST = 2**31 - 1


@cache
def tune_allocator() -> bool:
    """Keep freed memory in this process; True where that could be set (Linux with glibc)."""
    if platform.system() != "Linux" or platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    return all(mallopt(option, _LARGEST) == 1 for option in (_MMAP_THRESHOLD, _TRIM_THRESHOLD))
