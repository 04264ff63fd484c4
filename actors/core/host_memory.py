"""Memory that a process frees stays with it, for soon it takes as much again.

By default glibc gives a thread's freed memory back to the system, which hands it out anew page by page, zeroed: on a
model of 5 million parameters that is 60 MB and 15,000 page faults in each training step; of 600 MB of weights that come
over the network, 40,000.
"""

from __future__ import annotations

import ctypes
from typing import Final

_M_TRIM_THRESHOLD: Final = -1
_M_MMAP_THRESHOLD: Final = -3
_M_ARENA_MAX: Final = -8
_MMAP_FROM_BYTES: Final = 32 << 20
"""glibc's maximum: what is larger comes from the system and goes back to it in any case."""
_KEPT_BYTES: Final = (1 << 31) - 1


def keep_freed_memory(*, one_arena: bool) -> bool:
    """From now on, in the whole process. Before the threads that compute are there. False: not all could be set.

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
