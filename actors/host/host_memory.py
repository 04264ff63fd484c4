"""How a process uses its system's memory: freed memory is kept for a while, large columns are taken page by page.

By default glibc gives a thread's freed memory back to the system, which hands it out anew page by page, zeroed: for a
model of 5 million parameters that is 60 MB and 15,000 page faults in each training step; for 600 MB of weights that
come over the network, 40,000 faults. What is kept grows to the need of the largest step, so it is given back at times.

numpy asks for huge pages (2 MiB) for any array of 4 MiB or more. Rows that are mostly empty at first then take their
full size, zeroed at once: 2,048 rows of 32,768 tokens are 800 MB and two seconds, instead of 25 MB.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import sys
from typing import Any, Final

import numpy as np

_M_TRIM_THRESHOLD: Final = -1
_M_MMAP_THRESHOLD: Final = -3
_M_ARENA_MAX: Final = -8
_MMAP_FROM_BYTES: Final = 32 << 20
"""glibc's maximum: a larger block comes from the system and goes back to it in any case."""
_KEPT_BYTES: Final = (1 << 31) - 1
_HUGE_FROM_BYTES: Final = 1 << 22
"""numpy's threshold for huge pages."""


def zeros_by_page(shape: tuple[int, ...], dtype: type[np.generic]) -> np.ndarray[Any, Any]:
    """Make an array as ``np.zeros`` does, but take memory only for the small pages that are written."""
    size_bytes = math.prod(shape) * np.dtype(dtype).itemsize
    if size_bytes < _HUGE_FROM_BYTES or not hasattr(mmap, "MADV_NOHUGEPAGE"):
        return np.zeros(shape, dtype)
    pages = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    pages.madvise(mmap.MADV_NOHUGEPAGE)
    return np.frombuffer(pages, dtype).reshape(shape)


def keep_freed_memory(*, one_arena: bool) -> bool:
    """Keep freed memory in this process from now on; call this before the threads that compute are started.

    Returns whether all could be set.

    ``one_arena``: a thread can use what another has freed, but threads may have to wait for each other.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    settings = [(_M_MMAP_THRESHOLD, _MMAP_FROM_BYTES), (_M_TRIM_THRESHOLD, _KEPT_BYTES)]
    if one_arena:
        settings.append((_M_ARENA_MAX, 1))
    taken = [mallopt(setting, value) == 1 for setting, value in settings]
    return all(taken)


def give_back_freed_memory() -> bool:
    """Give whole pages of freed memory of all threads back to the system. False: there were none, or no glibc."""
    try:
        return bool(ctypes.CDLL(None).malloc_trim(0))
    except (OSError, AttributeError):
        return False


def give_back_pages(address: int, size_bytes: int) -> int:
    """Give whole pages of private memory in this range back to the system; returns the number of bytes.

    The pages then read as zeros, and take memory again when they are written. 0 where the system cannot do this.
    """
    first = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    length = (address + size_bytes) // mmap.PAGESIZE * mmap.PAGESIZE - first
    if length <= 0 or sys.platform != "linux":  # elsewhere the advice may be ignored, and the contents stay
        return 0
    advise = ctypes.CDLL(None, use_errno=True).madvise
    done = advise(ctypes.c_void_p(first), ctypes.c_size_t(length), ctypes.c_int(mmap.MADV_DONTNEED))
    return length if done == 0 else 0
