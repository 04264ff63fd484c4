"""What a process asks of its system's memory: freed memory stays for a while, large columns are had a page at a time.

By default glibc gives a thread's freed memory back to the system, which hands it out anew page by page, zeroed: on a
model of 5 million parameters that is 60 MB and 15,000 page faults in each training step; of 600 MB of weights that come
over the network, 40,000. What stays is what the largest step of all has needed, so now and then it is given back.

numpy asks for huge pages (2 MiB) for whatever has 4 MiB or more. Rows of which a little is written at first then cost
all that they may ever hold, zeroed at once: 2,048 rows of 32,768 tokens are 800 MB and two seconds, instead of 25 MB.
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
"""glibc's maximum: what is larger comes from the system and goes back to it in any case."""
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
    """Keep freed memory in this process from now on; call it before the threads that compute are there.

    Returns whether all could be set.

    ``one_arena``: what one thread frees another one takes; they may have to wait for each other.
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
    """Whole pages of freed memory return to the system, of all threads. False: there was none, or no glibc."""
    try:
        return bool(ctypes.CDLL(None).malloc_trim(0))
    except (OSError, AttributeError):
        return False


def give_back_pages(address: int, size_bytes: int) -> int:
    """Give whole pages of private memory in this range back to the system; how many bytes that were.

    They read as zeros and are had again when they are written. 0 where the system cannot do this.
    """
    first = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    length = (address + size_bytes) // mmap.PAGESIZE * mmap.PAGESIZE - first
    if length <= 0 or sys.platform != "linux":  # elsewhere the advice may be ignored, and the contents stay
        return 0
    advise = ctypes.CDLL(None, use_errno=True).madvise
    done = advise(ctypes.c_void_p(first), ctypes.c_size_t(length), ctypes.c_int(mmap.MADV_DONTNEED))
    return length if done == 0 else 0
