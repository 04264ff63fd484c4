"""Event streams with credit: a slow watcher is told that it lags and never slows anybody else.

    backend.watch() ─▶ offer ─▶ [ queue, bounded ] ─ credit > 0 ─▶ socket
                                  full: oldest out, counted ─▶ {kind: "lagged", missed: n} comes next

Invariants
- A queue holds at most ``control_event_queue`` events; memory of a watch is bounded.
- An event is never lost silently: a gap is preceded by exactly one ``lagged`` with its size.
- Each event costs one credit; ``lagged`` and ``alive`` cost none. Without credit nothing but ``alive`` is sent.
- ``alive`` goes out when nothing else has for ``control_alive_s``, so both sides learn that the other is gone.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any

from actors.control.protocol import event_frame
from actors.control.verbs import RequestId
from transport.transport import SendOutcome

Send = Callable[[bytes], SendOutcome]


class WatchStream:
    """Serves one open watch. Does no I/O: it is told what happened and calls ``send``."""

    def __init__(self, request_id: RequestId, send: Send, *, credit: int, queue_max: int) -> None:
        self.request_id = request_id
        self.sent = 0
        self.missed = 0
        self.gone = False
        """Whether the client cannot be reached any more; the owner ends the watch."""
        self._send = send
        self._credit = credit
        self._queue: deque[bytes] = deque(maxlen=queue_max)
        self._gap = 0
        self._quiet = True
        self._changed = asyncio.Event()

    def offer(self, event: dict[str, Any]) -> None:
        """Queue an event and send what credit allows. Raises TypeError if it is no plain map."""
        frame = event_frame(self.request_id, event)
        if len(self._queue) == self._queue.maxlen:
            self._gap += 1
            self.missed += 1
        self._queue.append(frame)
        self.flush()

    def grant(self, events: int, *, credit_max: int) -> int:
        """Add credit and send the events that it allows; returns the credit left."""
        self._credit = min(self._credit + events, credit_max)
        self.flush()
        return self._credit

    def flush(self) -> None:
        """Send while there is credit, events, and room in the socket."""
        self._changed.set()
        while self._queue and self._credit > 0 and not self.gone:
            if self._gap:
                if not self._deliver(event_frame(self.request_id, {"kind": "lagged", "missed": self._gap})):
                    return
                self._gap = 0
            if not self._deliver(self._queue[0]):
                return
            self._queue.popleft()
            self._credit -= 1
            self.sent += 1

    def tick(self) -> None:
        """Called every ``control_alive_s``: retry events that the socket had no room for, or else send ``alive``."""
        self.flush()
        if self._quiet and not self.gone:
            self._deliver(event_frame(self.request_id, {"kind": "alive"}))
        self._quiet = True

    @property
    def waiting(self) -> int:
        """Number of events that wait for credit."""
        return len(self._queue)

    async def changed(self) -> None:
        """Wait for the next flush or tick. The owner's ticker bounds the wait."""
        self._changed.clear()
        await self._changed.wait()

    def _deliver(self, frame: bytes) -> bool:
        outcome = self._send(frame)
        self.gone = self.gone or outcome is SendOutcome.NO_LINK
        if outcome is SendOutcome.QUEUED:
            self._quiet = False
        return outcome is SendOutcome.QUEUED
