"""The trainer's track of the trace: what it did when, in wall-clock seconds, for people only."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from actors.core.context import Context
from actors.host.clock import time_of_day_s
from actors.protocol.metrics import Span, Spans
from transport.address import ActorAddress


class SpanRecorder:
    """Collects spans and tells them to the metrics actor once a step; a trace is no ledger, so some may be lost.

    ``metrics`` says where that is now.
    """

    def __init__(self, ctx: Context, *, job: str, track: str, metrics: Callable[[], ActorAddress]) -> None:
        self._ctx = ctx
        self._job = job
        self._track = track
        self._metrics = metrics
        self._spans: list[Span] = []

    @contextmanager
    def span(self, name: str, **args: float | str) -> Iterator[None]:
        """Record the block as one bar, also if it raises."""
        start_s = time_of_day_s()
        try:
            yield
        finally:
            if len(self._spans) < self._ctx.limits.trainer_spans:
                self._spans.append(Span(name=name, start_s=start_s, end_s=time_of_day_s(), args=args))

    def flush(self) -> None:
        """Send what was collected."""
        if self._spans:
            self._ctx.ref(self._metrics()).tell(Spans(job=self._job, track=self._track, spans=self._spans))
            self._spans = []
