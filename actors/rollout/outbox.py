"""Keeps a worker's messages ordered and bounded while the link to the scheduler is full or down, or it is slow.

    send ─▶ waiting ─▶ link ─▶ scheduler's mailbox ─▶ ledger
                ▲                                        │
                └────────── ReportsTaken ─────────────────┘   at most ``reports_under_way`` between the two

Invariants
- Messages leave in the order in which they were sent; nothing overtakes a report that waits.
- With ``outbox_messages`` it is full, and a full outbox stops the generation: nothing is thrown away to make room.
- A report in which no sample ends waits until ``report_interval_s`` after the one before it: a message of five engine
  steps costs no more than one of a single step. Any other message leaves at once, together with all that wait.
- A scheduler's mailbox holds few reports of each worker, however fast the workers and slow the scheduler. Meanwhile
  further reports wait, and those of the same samples are merged: so a slow scheduler catches up.
- This credit smooths the flow, but guarantees nothing: a worker whose reports are not confirmed for
  ``report_patience_s`` sends further ones.

Engine steps of the same samples become one report, since messages and rows cost a collector more than tokens:

    step 7: a b c      one row a sample,        a: 7 8 9
    step 8: a b c  ─▶  its tokens together  ─▶  b: 7 8 9
    step 9: a b c                               c: 7 8 9
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from itertools import islice
from typing import cast

import msgspec
import numpy as np

from actors.core.message import Message
from actors.core.ref import ActorRef
from actors.protocol.tokens import ROW, TOKEN, FinishReason, TokenReport
from configs.limits import Limits
from transport.transport import SendOutcome


class Outbox:
    """Queues messages to one actor, bounded. ``now``: seconds of a monotonic clock."""

    def __init__(self, target: ActorRef, limits: Limits, now: Callable[[], float]) -> None:
        self._target = target
        self._limits = limits
        self._now = now
        self._waiting: deque[Message] = deque()
        self._under_way: deque[int] = deque()
        """Sequence numbers of reports that have left and that the scheduler has not confirmed."""
        self._heard_s = 0.0
        """Time at which a report last left or was confirmed."""
        self._left_s = -math.inf
        """Time at which a report last left."""
        self._urgent = False
        """Whether a message waits that the scheduler needs at once: with a sample's end, or other than a report."""
        self._last = False
        self.held_back = False
        """Whether all messages wait, since no scheduler has registered us yet."""

    @property
    def full(self) -> bool:
        return len(self._waiting) >= self._limits.outbox_messages

    def __len__(self) -> int:
        return len(self._waiting)

    def meet(self, target: ActorRef) -> None:
        """Send to ``target``, which may be a new life of the scheduler, from now on."""
        self._target = target
        self._under_way.clear()
        self.held_back = False

    def send(self, message: Message, *, last: bool = False) -> None:
        """Send ``message`` after all that wait, now if possible; once the ``last`` is sent, none waits for credit."""
        self._waiting.append(message)
        self._urgent |= not isinstance(message, TokenReport) or bool(message.rows["finished"].any())
        self._last |= last
        self.flush()

    def taken(self, sequence: int) -> None:
        """Note that the scheduler has entered, or ignored, all reports up to number ``sequence``."""
        while self._under_way and self._under_way[0] <= sequence:
            self._under_way.popleft()
        self._heard_s = self._now()
        self.flush()

    def flush(self) -> None:
        """Send the messages that wait, as far as they are due and the link and the credit allow."""
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
        """Send the ``first`` waiting report, merged with those that continue it; returns whether the link took it."""
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
        """Number of messages of ``kind`` that have not been sent."""
        return sum(isinstance(message, kind) for message in self._waiting)

    def retain(self, kind: type[Message]) -> None:
        """Drop all waiting messages but those of ``kind``: nobody would read the rest."""
        self._waiting = deque(message for message in self._waiting if isinstance(message, kind))


def going_on(waiting: Sequence[Message], tokens_max: int) -> list[TokenReport]:
    """The first of ``waiting``, a report, with all reports that continue it, up to about ``tokens_max`` tokens.

    A report continues the one before if it has the same rows, each from where the former ends, and none had ended. All
    rows of such a report have equally many tokens, so that the mean latency of a step's samples stays right.
    """
    alike = _alike(waiting, tokens_max)
    if len(alike) == 1:
        return alike
    rows = np.frombuffer(b"".join([report.row_bytes for report in alike]), ROW).reshape(len(alike), -1)
    counts = rows["count"][:, :1]
    behind = rows["offset"][0] + np.cumsum(counts, axis=0) - counts
    goes_on = (rows["count"] == counts) & (rows["offset"] == behind) & (rows["assignment"] == rows["assignment"][0])
    goes_on &= counts > 0  # an end without a token keeps its row
    goes_on[1:] &= (rows["finished"] == FinishReason.RUNNING)[:-1]
    breaks = np.flatnonzero(~goes_on.all(axis=1))
    return alike[: max(1, int(breaks[0]))] if len(breaks) else alike


def merged(steps: Sequence[TokenReport]) -> TokenReport:
    """Merge reports that continue each other; the ``step_s`` of the result is the sum of theirs."""
    if len(steps) == 1:
        return steps[0]
    rows, newest = steps[0].rows.copy(), steps[-1]
    parts = [np.frombuffer(step.token_bytes, TOKEN).reshape(len(rows), -1) for step in steps]
    tokens = np.concatenate(parts, axis=1)
    routes = [np.frombuffer(step.route_bytes, np.uint8).reshape(len(rows), -1) for step in steps]
    rows["count"], rows["finished"] = tokens.shape[1], newest.finished
    return msgspec.structs.replace(
        newest,
        row_bytes=rows.tobytes(),
        token_bytes=tokens.tobytes(),
        route_bytes=np.concatenate(routes, axis=1).tobytes(),
        stats=msgspec.structs.replace(newest.stats, step_s=sum(step.stats.step_s for step in steps)),
    )


def _alike(waiting: Sequence[Message], tokens_max: int) -> list[TokenReport]:
    """The leading reports of ``waiting`` that have the same version, term, number of rows and size of routes."""
    first = cast("TokenReport", waiting[0])
    kind, alike, tokens = _kind(first), [first], first.weight
    for message in islice(waiting, 1, None):
        if not isinstance(message, TokenReport) or _kind(message) != kind:
            break
        tokens += message.weight
        if tokens > tokens_max:
            break
        alike.append(message)
    return alike


def _kind(report: TokenReport) -> tuple[int, int, int, int]:
    tokens = len(report.token_bytes) // TOKEN.itemsize
    return report.term, report.policy_version, len(report.row_bytes), len(report.route_bytes) // max(1, tokens)
