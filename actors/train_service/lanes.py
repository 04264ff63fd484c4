"""A service's trace: a lane a job, in which it waits, its state is moved, and it has its bursts. For people only.

    turns ─ add ─▶ spans of each job ─ once every limits.span_interval_s ─▶ the service's metrics ─▶ trace.json

Invariants
- Nobody waits for it. Spans that find no place, or no metrics, are lost.
- A service with nothing to do tells nothing.
"""

from __future__ import annotations

from typing import Final

from actors.core.context import Context
from actors.core.errors import AskError
from actors.core.leader import Leader
from actors.host.clock import time_of_day_s
from actors.protocol.metrics import Span, Spans
from transport.address import ActorAddress

_SHORTEST_S: Final = 0.001
"""Shortest span that is told: a call within a burst waits for no one, and takes less until it is let through."""


class Lanes:
    """It collects spans. ``service``: the name under which the trace is kept; ``metrics``: who keeps it."""

    def __init__(self, ctx: Context, service: str, metrics: ActorAddress) -> None:
        self._ctx = ctx
        self._service = service
        self._metrics = Leader(ctx, metrics)
        self._spans: dict[str, list[Span]] = {}
        self._telling = False

    def add(self, job: str, name: str, start_s: float, end_s: float, **args: float | str) -> None:
        """``job`` was doing that, by the actor's clock, until now or a moment ago."""
        spans = self._spans.setdefault(job, [])
        if end_s - start_s < _SHORTEST_S or len(spans) >= self._ctx.limits.service_spans:
            return
        shift_s = time_of_day_s() - self._ctx.now()
        spans.append(Span(name=name, start_s=start_s + shift_s, end_s=end_s + shift_s, args=args))
        if not self._telling:
            self._telling = True
            self._ctx.start_task(self._tell_soon(), "tell the trace")

    async def _tell_soon(self) -> None:
        """A head that was started again has its metrics elsewhere; until they are found spans are kept, to a bound."""
        while True:
            await self._ctx.sleep(self._ctx.limits.span_interval_s)
            try:
                await self._metrics.find()
            except AskError:
                continue
            self._telling = False
            self.flush()
            return

    def flush(self) -> None:
        """Tell what was collected."""
        metrics = self._ctx.ref(self._metrics.address)
        for job, spans in self._spans.items():
            if spans:
                metrics.tell(Spans(job=self._service, track=job, spans=spans))
        self._spans = {}
