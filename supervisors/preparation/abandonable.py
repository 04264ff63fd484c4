"""Work before a run's first process that can be interrupted, since a download or a busy service may take hours.

run(work) ──▶ its result
              └─ abandon() or ``interrupted`` ─▶ None
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class Abandonable:
    """Pieces of work run here one after another, each until it ends or is abandoned."""

    def __init__(self) -> None:
        self._task: asyncio.Task[Any] | None = None
        self.abandoned = False

    async def run(self, work: Coroutine[Any, Any, T], interrupted: asyncio.Event) -> T | None:
        """Return or raise what ``work`` does; None if it was abandoned, by ``interrupted`` or by ``abandon``."""
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
        """Cancel the work; False if none is running."""
        if self._task is None or not self._task.cancel():
            return False
        self.abandoned = True
        return True
