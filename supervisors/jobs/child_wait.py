"""Waiting for a process that prepares something, with a deadline and a look at it now and then."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from supervisors.machine.process import ChildProcess, ProcessExit


async def child_ended(
    child: ChildProcess, timeout_s: float, look: Callable[[], None] | None = None, every_s: float | None = None
) -> ProcessExit:
    """Wait for a child, and call ``look`` every ``every_s`` meanwhile; whatever is raised here ends the child.

    Raises:
        TimeoutError: it still runs after ``timeout_s``.
    """
    loop = asyncio.get_running_loop()
    until_s = loop.time() + timeout_s
    try:
        while True:
            left_s = until_s - loop.time()
            try:
                return await child.wait(left_s if every_s is None else min(every_s, left_s))
            except TimeoutError:
                if loop.time() >= until_s:
                    raise
            if look is not None:
                look()
    finally:
        child.kill()
        await child.gone()
