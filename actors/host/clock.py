"""The time of day, for people and for joining the files of a run. Decisions use the event loop's clock instead."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable


def time_of_day_s() -> float:
    """Seconds since 1970; on a virtual-time loop, that loop's time, so that equal runs write equal files."""
    try:
        loop = asyncio.get_running_loop()
    except RuntimeError:
        return time.time()
    virtual: Callable[[], float] | None = getattr(loop, "time_of_day", None)
    return time.time() if virtual is None else virtual()
