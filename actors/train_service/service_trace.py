"""A service's trace: a lane for each job, with its waits, moves of its state, and bursts. For people only.

    slices ─ add ─▶ spans of each job ─ once every limits.span_interval_s ─▶ the service's metrics ─▶ trace.json

Invariants
- Nothing waits for the trace. Spans beyond the bound, or without metrics to take them, are lost.
- An idle service sends nothing.
"""

from __future__ import annotations

from typing import Final

from actors.core.context import Context
from actors.core.errors import AskError
from actors.core.leader import Leader
from actors.host.clock import time_of_day_s
from actors.protocol.metrics import Spans, TraceSpan
from transport.address import ActorAddress

_SHORTEST_S: Final = 0.001
"""Shortest span that is recorded: a call within a burst is let through at once, in less time than this."""


class ServiceTrace:
    """Collects spans. ``service``: the name under which the trace is kept; ``metrics``: the actor that keeps it."""

    def __init__(self, ctx: Context, service: str, metrics: ActorAddress) -> None:
        self._ctx = ctx
        self._service = service
        self._metrics = Leader(ctx, metrics)
        self._spans: dict[str, list[TraceSpan]] = {}
        self._telling = False

    def add(self, job: str, name: str, start_s: float, end_s: float, **args: float | str) -> None:
        """Record that ``job`` did ``name``, by the actor's clock, until now or a moment ago."""
        spans = self._spans.setdefault(job, [])
        if end_s - start_s < _SHORTEST_S or len(spans) >= self._ctx.limits.service_spans:
            return
        shift_s = time_of_day_s() - self._ctx.now()
        spans.append(TraceSpan(name=name, start_s=start_s + shift_s, end_s=end_s + shift_s, args=args))
        if not self._telling:
            self._telling = True
            self._ctx.start_task(self._tell_soon(), "tell the trace")

    async def _tell_soon(self) -> None:
        """Send spans once metrics are found, which a restarted head has elsewhere; until then some are kept."""
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
        metrics = self._ctx.ref(self._metrics.address)
        for job, spans in self._spans.items():
            if spans:
                metrics.tell(Spans(job=self._service, track=job, spans=spans))
        self._spans = {}
