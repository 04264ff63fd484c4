"""The trainer's track of the trace: what the trainer did when, in wall-clock seconds, for people only."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from actors.core.context import Context
from actors.host.clock import time_of_day_s
from actors.protocol.metrics import Spans, TraceSpan
from transport.address import ActorAddress


class SpanRecorder:
    """Collects spans and sends them to the metrics actor once a step; some may be lost: a trace need not be complete.

    ``metrics``: gives that actor's present address.
    """

    def __init__(self, ctx: Context, *, job: str, track: str, metrics: Callable[[], ActorAddress]) -> None:
        self._ctx = ctx
        self._job = job
        self._track = track
        self._metrics = metrics
        self._spans: list[TraceSpan] = []

    @contextmanager
    def span(self, name: str, **args: float | str) -> Iterator[None]:
        """Record the block as one bar, also if it raises."""
        start_s = time_of_day_s()
        try:
            yield
        finally:
            if len(self._spans) < self._ctx.limits.trainer_spans:
                self._spans.append(TraceSpan(name=name, start_s=start_s, end_s=time_of_day_s(), args=args))

    def flush(self) -> None:
        if self._spans:
            self._ctx.ref(self._metrics()).tell(Spans(job=self._job, track=self._track, spans=self._spans))
            self._spans = []
