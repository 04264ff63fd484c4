"""Questions and their answers: who waits for what until when.

    ask ──open──▶ Waiter ◀──settle── reply, error, refusal, down, deadline: whichever comes first

Invariants
- A waiter ends exactly once and leaves the table then; an answer that finds no waiter is dropped.
- Deadlines belong to this table, never to a socket. One timer of the loop serves them all: it stays set when its
  question is answered, so most questions neither set nor cancel a timer. (``call_later`` and ``cancel`` for each
  question would leave a cancelled handle of each in the loop's heap, until asyncio sweeps it.)
"""

from __future__ import annotations

import asyncio
import heapq
import math
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

from actors.core.errors import AskError, DeadlineExceeded, NotSent, RefusalReason, Refused, SentNoReply
from actors.core.message import Message
from transport.address import ActorAddress, PeerId

_SLACK: Final = 64
"""Number of deadlines of ended questions that may stay in the heap whatever is open."""


class Waiter:
    """Represents an ask, or the consuming end of a stream, that has not ended."""

    __slots__ = ("asker", "deadline_at", "future", "question", "reply_kind", "request_id", "sent", "since", "target")

    def __init__(
        self, request_id: int, asker: str, target: ActorAddress, question: str, reply_kind: type[Message], since: float
    ) -> None:
        self.request_id = request_id
        self.asker = asker
        """The asking actor's name; empty for code outside of actors."""
        self.target = target
        self.question = question
        self.reply_kind = reply_kind
        self.since = since
        self.sent = False
        """Whether the frames have been handed to a live link, so that the target may have seen them."""
        self.future: asyncio.Future[Any] | None = None
        self.deadline_at = math.inf
        """Loop time at which ``Requests`` lets it fail; a stream's consumer keeps its own deadlines instead."""

    @property
    def is_stream(self) -> bool:
        """Whether items are awaited, not one reply."""
        return False

    def settle(self, reply: Message) -> None:
        if self.future is not None and not self.future.done():
            self.future.set_result(reply)

    def fail(self, error: AskError) -> None:
        if self.future is not None and not self.future.done():
            self.future.set_exception(error)

    def lost(self, why: str, gone: str) -> AskError:
        """The error with which this question fails when the link to the target is lost."""
        text = f"{self.question} to {self.target}: {why}"
        kind = SentNoReply if self.sent else NotSent
        return kind(text, target=self.target, question=self.question)


class OverdueAsk(NamedTuple):
    """Describes an ask that has not ended at its deadline, which breaks a promise of this table."""

    request_id: int
    asker: str
    target: ActorAddress
    question: str
    overdue_s: float


class AskCounts(NamedTuple):
    """Counts what a process has asked so far: ``opened`` is ``ended + open``; streams count too."""

    opened: int
    ended: int
    open: int
    overdue: tuple[OverdueAsk, ...]


class Requests:
    """Holds the open questions of one process."""

    def __init__(self, bound: int) -> None:
        self._bound = bound
        self._open: dict[int, Waiter] = {}
        self._deadlines: list[tuple[float, int]] = []
        """Heap, with ended questions among the open ones; they are swept out when they are more than half of it."""
        self._timer: asyncio.TimerHandle | None = None
        self._rings_at = math.inf
        self._opened = 0
        self._ended = 0

    def __len__(self) -> int:
        return len(self._open)

    def __iter__(self) -> Iterator[Waiter]:
        return iter(list(self._open.values()))

    def open(self, waiter: Waiter) -> None:
        """Add a waiter.

        Raises:
            Refused: this process has ``limits.pending_asks`` open questions already.
        """
        if len(self._open) >= self._bound:
            detail = f"{self._bound} questions are open in this process; limits.pending_asks bounds them"
            raise Refused(RefusalReason.TOO_MANY_ASKS, detail, target=waiter.target, question=waiter.question)
        self._open[waiter.request_id] = waiter
        self._opened += 1

    def arm(self, waiter: Waiter, deadline_at: float) -> None:
        """Let the waiter fail with DeadlineExceeded at loop time ``deadline_at``."""
        waiter.deadline_at = deadline_at
        if len(self._deadlines) > 2 * len(self._open) + _SLACK:
            self._deadlines = [(w.deadline_at, w.request_id) for w in self._open.values() if w.deadline_at < math.inf]
            heapq.heapify(self._deadlines)
        else:
            heapq.heappush(self._deadlines, (deadline_at, waiter.request_id))
        if deadline_at < self._rings_at:
            self._ring_at(deadline_at)

    def _ring_at(self, deadline_at: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._rings_at = deadline_at
        self._timer = asyncio.get_running_loop().call_at(deadline_at, self._ring)

    def _ring(self) -> None:
        self._timer = None
        self._rings_at = math.inf
        now = asyncio.get_running_loop().time()
        while self._deadlines:
            deadline_at, request_id = self._deadlines[0]
            waiter = self._open.get(request_id)
            if waiter is not None and deadline_at > now:
                self._ring_at(deadline_at)
                return
            heapq.heappop(self._deadlines)
            if waiter is not None and waiter.deadline_at <= now:
                self._expire(waiter, now)

    def _expire(self, waiter: Waiter, now: float) -> None:
        text = f"{waiter.question} to {waiter.target}: no answer within {now - waiter.since:.3g} s"
        self.close(waiter)
        waiter.fail(DeadlineExceeded(text, target=waiter.target, question=waiter.question))

    def get(self, request_id: int) -> Waiter | None:
        """The waiter of that id, if it still waits."""
        return self._open.get(request_id)

    def take(self, request_id: int) -> Waiter | None:
        """The waiter of that id, removed; None if the answer comes too late."""
        waiter = self._open.pop(request_id, None)
        self._ended += waiter is not None
        return waiter

    def close(self, waiter: Waiter) -> None:
        """Remove a waiter. Idempotent."""
        self._ended += self._open.pop(waiter.request_id, None) is not None

    def mark_sent(self, peer: PeerId) -> None:
        """Note that what was queued for ``peer`` has been handed to its link."""
        for waiter in self._open.values():
            if waiter.target.peer == peer:
                waiter.sent = True

    def fail_peer(self, peer: PeerId, why: str, gone: str) -> None:
        """End every question to ``peer`` now."""
        for waiter in [w for w in self._open.values() if w.target.peer == peer]:
            self.close(waiter)
            waiter.fail(waiter.lost(why, gone))

    def fail_all(self, why: str, gone: str) -> None:
        """End every question of this process now."""
        for peer in dict.fromkeys(waiter.target.peer for waiter in self._open.values()):
            self.fail_peer(peer, why, gone)
        if self._timer is not None:
            self._timer.cancel()
        self._timer, self._rings_at = None, math.inf

    def counts(self, now: float) -> AskCounts:
        """Opened, ended, open, and those that should have ended before loop time ``now``."""
        overdue = [
            OverdueAsk(waiter.request_id, waiter.asker, waiter.target, waiter.question, now - waiter.deadline_at)
            for waiter in self._open.values()
            if waiter.deadline_at < now
        ]
        return AskCounts(self._opened, self._ended, len(self._open), tuple(overdue))
