"""Limits how fast one process sends weights: each chunk waits for its place on a line of so many bytes a second.

Streams that send at the same time share the line. Idle time is not saved up, so that there are no bursts beyond the one
chunk that finds the line free.
"""

from __future__ import annotations

from actors.core.context import Context


class Pace:
    """Paces sending. ``bytes_per_s`` None: no limit. Callers pass the present time."""

    def __init__(self, bytes_per_s: float | None) -> None:
        self._bytes_per_s = bytes_per_s
        self._free_s = 0.0
        """Time at which all bytes counted so far have been sent."""

    async def wait_to_send(self, ctx: Context, size_bytes: int) -> None:
        """Return when ``size_bytes`` may be sent."""
        if (wait_s := self.wait_s(ctx.now(), size_bytes)) > 0:
            await ctx.sleep(wait_s)

    def wait_s(self, now_s: float, size_bytes: int) -> float:
        """Seconds until ``size_bytes`` more may be sent; they are counted as sent then."""
        if self._bytes_per_s is None:
            return 0.0
        begin_s = max(now_s, self._free_s)
        self._free_s = begin_s + size_bytes / self._bytes_per_s
        return begin_s - now_s
