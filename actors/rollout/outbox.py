"""Keeps what the worker says in order and in bounds while the link to the scheduler is full or down, or it is behind.

    send ─▶ waiting ─▶ link ─▶ scheduler's mailbox ─▶ ledger
                ▲                                        │
                └────────── ReportsTaken ─────────────────┘   at most ``reports_under_way`` between the two

Invariants
- What is said leaves in the order in which it was said; nothing overtakes a report that waits.
- Beyond ``outbox_messages`` it is full, and a full outbox stops the generation: nothing is thrown away to make room.
- What only goes on waits until ``report_interval_s`` after the report before it: a message of five engine steps
  costs no more than that of one. All else, a sample's end above all, leaves at once and takes with it what waits.
- A scheduler's mailbox holds few reports of each worker, however fast the workers and slow the scheduler. What comes
  meanwhile waits, and engine steps that went on with the same samples leave as one report: who is behind catches up.
- Credit only smooths. Whoever hears nothing of its reports for ``report_patience_s`` sends on.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable

import msgspec

from actors.core.message import Message
from actors.core.ref import ActorRef
from actors.protocol.tokens import TokenReport
from actors.rollout.merging import going_on, merged
from configs.limits import Limits
from transport.transport import SendOutcome


class Outbox:
    """Queues messages in front of one ref, bounded. ``now``: seconds of a monotonic clock."""

    def __init__(self, target: ActorRef, limits: Limits, now: Callable[[], float]) -> None:
        self._target = target
        self._limits = limits
        self._now = now
        self._waiting: deque[Message] = deque()
        self._under_way: deque[int] = deque()
        """Sequence numbers of reports that have left and that the scheduler has not taken."""
        self._heard_s = 0.0
        """Time at which a report left or was taken last."""
        self._left_s = -math.inf
        """Time at which a report left last."""
        self._urgent = False
        """Something waits that somebody else waits for."""
        self._last = False
        self.held_back = False
        """True while the scheduler has not confirmed that it knows us: everything waits."""

    @property
    def full(self) -> bool:
        return len(self._waiting) >= self._limits.outbox_messages

    def __len__(self) -> int:
        return len(self._waiting)

    def meet(self, target: ActorRef) -> None:
        """Tell ``ref`` from now on: the next life of the scheduler takes its predecessor's place."""
        self._target = target
        self._under_way.clear()
        self.held_back = False

    def send(self, message: Message, *, last: bool = False) -> None:
        """Send ``message`` behind all that waits, now if possible; the ``last`` one waits for nobody's credit."""
        self._waiting.append(message)
        self._urgent |= not isinstance(message, TokenReport) or bool(message.rows["finished"].any())
        self._last |= last
        self.flush()

    def taken(self, sequence: int) -> None:
        """The scheduler has entered, or ignored, all reports up to this one."""
        while self._under_way and self._under_way[0] <= sequence:
            self._under_way.popleft()
        self._heard_s = self._now()
        self.flush()

    def flush(self) -> None:
        """Send what waits, if it is time to, until the link or the credit says no."""
        due = self._urgent or self.full or self._now() - self._left_s >= self._limits.report_interval_s
        while self._waiting and not self.held_back:
            first = self._waiting[0]
            if not isinstance(first, TokenReport):
                if self._target.tell(first) is not SendOutcome.QUEUED:
                    return
                self._waiting.popleft()
            elif not due or not self._has_credit() or not self._send_report(first):
                return
        self._urgent = self._urgent and bool(self._waiting)

    def _has_credit(self) -> bool:
        if len(self._under_way) < self._limits.reports_under_way or self._last:
            return True
        if self._now() - self._heard_s < self._limits.report_patience_s:
            return False
        self._under_way.clear()
        return True

    def _send_report(self, first: TokenReport) -> bool:
        """Whether the link has taken the first of what waits, with what goes on from it."""
        steps = going_on(self._waiting, self._limits.merged_tokens) if len(self._waiting) > 1 else [first]
        report = merged(steps)
        if len(self._under_way) == self._limits.reports_under_way // 2:
            report = msgspec.structs.replace(report, confirm=True)
        if self._target.tell(report) is not SendOutcome.QUEUED:
            return False
        for _ in steps:
            self._waiting.popleft()
        self._under_way.append(report.sequence)
        self._heard_s = self._left_s = self._now()
        return True

    def waiting(self, kind: type[Message]) -> int:
        """How many messages of ``kind`` have not been sent."""
        return sum(isinstance(message, kind) for message in self._waiting)

    def retain(self, kind: type[Message]) -> None:
        """Forget all that waits but messages of ``kind``: nobody would read the rest."""
        self._waiting = deque(message for message in self._waiting if isinstance(message, kind))
