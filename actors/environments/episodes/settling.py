"""Values that user code returns, be it ``def`` or ``async def``."""

from __future__ import annotations

import asyncio
import inspect
from typing import Any

_loop: asyncio.AbstractEventLoop | None = None
"""The loop of this process's coroutines: one, so that what one of them has opened is of use to the next."""


def settled(value: Any) -> Any:
    """``value``, or what it comes to if it is to be awaited."""
    global _loop
    if not inspect.isawaitable(value):
        return value
    _loop = _loop or asyncio.new_event_loop()
    return _loop.run_until_complete(_awaited(value))


async def _awaited(value: Any) -> Any:
    return await value
