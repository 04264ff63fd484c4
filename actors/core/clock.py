"""The time of day, for people and for joining the files of a run. What is decided is decided by the loop's clock."""

from __future__ import annotations

import asyncio
import time


def time_of_day_s() -> float:
    """Seconds since 1970; on a virtual-time loop, that loop's own seconds, so that equal runs write equal files."""
    try:
        loop = asyncio.get_running_loop()
    except RuntimeError:
        return time.time()
    return loop.time() if getattr(loop, "virtual_time", False) else time.time()
