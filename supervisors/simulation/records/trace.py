"""Hashes everything that happens in a simulated run, and shows it as lines to people who ask.

Equal seeds give equal hashes. The hash covers, with their virtual time: every message at its delivery, byte for byte;
every event of a ledger as it is written; starts and ends of processes; faults. Only the path of their files differs
between two equal runs; so it is removed before hashing.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable
from typing import Any, Final

import xxhash

from transport.envelope import decode_envelope
from transport.transport import Frame, Lane

_TIME: Final = struct.Struct("<dB")


class Trace:
    """Keeps the hash of one run. ``hide``: path of its files, removed before hashing; ``show`` is given each line."""

    def __init__(self, hide: str, show: Callable[[str], None] | None = None) -> None:
        self._hash = xxhash.xxh3_128()
        self._hide = hide.encode()
        self._show = show
        self.loop: asyncio.AbstractEventLoop
        self._awaited: list[tuple[bytes, asyncio.Future[tuple[str, str]]]] = []
        self.events = 0
        self.ledger_events = 0
        self.closed = False
        """Flag that the run is over: notes no longer count."""

    @property
    def hash(self) -> str:
        """Hash of all that has been noted so far, in hex."""
        return self._hash.hexdigest()

    def message(self, source: str, target: str, lane: Lane, frames: list[Frame]) -> None:
        """Note a message that was delivered."""
        update = self._hash.update
        self.events += 1
        if self._awaited:
            self._look_for(source, target, frames)
        update(_TIME.pack(self.loop.time(), lane))
        update(f"{source}>{target}".encode())
        for frame in frames:
            update(self._plain(frame) if type(frame) is bytes else frame)

    def next_message(self, tag: str) -> asyncio.Future[tuple[str, str]]:
        """A future of the source and target of the next message with ``tag``; set before its receiver gets it."""
        future: asyncio.Future[tuple[str, str]] = self.loop.create_future()
        self._awaited.append((tag.encode(), future))
        return future

    def _look_for(self, source: str, target: str, frames: list[Frame]) -> None:
        head = bytes(frames[0])
        for awaited in list(self._awaited):
            tag, future = awaited
            if future.done():
                self._awaited.remove(awaited)
            elif tag in head and decode_envelope(head).tag.encode() == tag:
                future.set_result((source, target))
                self._awaited.remove(awaited)

    def _plain(self, data: bytes) -> bytes:
        return data.replace(self._hide, b"")

    def ledger(self, job: str, kind: str, body: bytes) -> None:
        """Note an event of a job's ledger that was written."""
        self.events += 1
        self.ledger_events += 1
        self._hash.update(_TIME.pack(self.loop.time(), 8))
        self._hash.update(job.encode())
        self._hash.update(self._plain(body))
        if self._show is not None:
            self._line("ledger", job=job, event=kind, bytes=len(body))

    def note(self, what: str, **fields: Any) -> None:
        """Note anything else; ``fields`` are plain values."""
        if self.closed:
            return
        self.events += 1
        self._hash.update(_TIME.pack(self.loop.time(), 9))
        self._hash.update(self._plain(f"{what} {fields}".encode()))
        if self._show is not None:
            self._line(what, **fields)

    def say(self, what: str, **fields: Any) -> None:
        """Show a line that is not hashed."""
        if self._show is not None and not self.closed:
            self._line(what, **fields)

    def _line(self, what: str, **fields: Any) -> None:
        assert self._show is not None
        shown = " ".join(f"{name}={value}" for name, value in fields.items())
        self._show(f"{self.loop.time():10.4f}  {what:<20} {shown}")
