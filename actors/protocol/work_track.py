"""The track of a service in the trace: when it had something to do, for people only.

    work() … work() ─▶ one bar while anything is under way, else idle ─▶ every span_interval_s ─▶ metrics

A trainer that waits waits for somebody: rewards, environments and the gateway have a lane each, as workers have.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from actors.core.context import Context
from actors.core.ref import ActorRef
from actors.host.clock import time_of_day_s
from actors.protocol.metrics import Spans, TraceSpan


class WorkTrack:
    """Records whether a service works. ``name`` is the activity; ``metrics`` gives the actor that takes the spans."""

    def __init__(
        self,
        job: str,
        track: str,
        name: str,
        metrics: Callable[[], ActorRef],
        clock: Callable[[], float] = time_of_day_s,
    ) -> None:
        self._job, self._track, self._name = job, track, name
        self._metrics = metrics
        self._clock = clock
        self._under_way = 0
        self._most = 0
        self._since = clock()
        self._spans: list[TraceSpan] = []
        self._room = sys.maxsize
        """Number of spans kept until they are sent."""

    def start(self, ctx: Context) -> None:
        """Send what is recorded, again and again, while the actor of ``ctx`` lives."""
        self._room = ctx.limits.service_spans
        ctx.start_task(self._send(ctx.limits.span_interval_s), "send spans")

    async def _send(self, every_s: float) -> None:
        while True:
            await asyncio.sleep(every_s)
            if spans := self.take():
                self._metrics().tell(Spans(job=self._job, track=self._track, spans=spans))

    @contextmanager
    def work(self) -> Iterator[None]:
        """Record the block as work; several may be under way at once."""
        if not self._under_way:
            self._cut()
        self._under_way += 1
        self._most = max(self._most, self._under_way)
        try:
            yield
        finally:
            if self._under_way == 1:
                self._cut()
            self._under_way -= 1

    def take(self) -> list[TraceSpan]:
        """What has been recorded since the last call."""
        self._cut()
        spans, self._spans = self._spans, []
        return spans

    def _cut(self) -> None:
        """End the present bar, and begin another."""
        now, since = self._clock(), self._since
        self._since = now
        if now > since and len(self._spans) < self._room:
            name, args = (self._name, {"running": self._most}) if self._under_way else ("idle", {})
            self._spans.append(TraceSpan(name=name, start_s=since, end_s=now, args=dict(args)))
        self._most = self._under_way
