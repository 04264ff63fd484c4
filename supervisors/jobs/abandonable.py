"""Work before a run's first process that its operator need not wait for: a download or a full service may take hours.

run(work) ──▶ its result
              └─ abandon(), or interrupted ─▶ None
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class Abandonable:
    """One piece of work after another; once one was abandoned, the run is over."""

    def __init__(self) -> None:
        self._task: asyncio.Task[Any] | None = None
        self.abandoned = False

    async def run(self, work: Coroutine[Any, Any, T], interrupted: asyncio.Event) -> T | None:
        """What ``work`` returns; None if it was abandoned, by ``interrupted`` or by ``abandon``. Raises as it does."""
        task = self._task = asyncio.create_task(work, name="before the run")
        watcher = asyncio.create_task(self._abandon_when(interrupted), name="interrupted")
        try:
            return await task
        except asyncio.CancelledError:
            if not self.abandoned:
                raise
            return None
        finally:
            watcher.cancel()

    async def _abandon_when(self, interrupted: asyncio.Event) -> None:
        await interrupted.wait()
        self.abandon()

    def abandon(self) -> bool:
        """End it; False if there is nothing to end."""
        if self._task is None or not self._task.cancel():
            return False
        self.abandoned = True
        return True
