"""The worker's track of the trace: what it did when, in wall-clock seconds, for people only."""

from __future__ import annotations

from collections.abc import Callable

from actors.host.clock import time_of_day_s
from actors.protocol.metrics import Span

Args = dict[str, float | int | str]


class ActivityLog:
    """Notes one activity at a time (idle, asleep, generate); equal neighbours become one span.

    ``about`` says of an activity that has just ended what is worth telling of it.
    """

    def __init__(self, about: Callable[[str], Args], clock: Callable[[], float] = time_of_day_s) -> None:
        self._about = about
        self._clock = clock
        self._name = ""
        self._since = 0.0
        self._spans: list[Span] = []

    def begin(self, name: str) -> None:
        """The worker does ``name`` from now on."""
        if name != self._name:
            self._cut(self._clock())
            self._name = name

    def _cut(self, now: float) -> None:
        if self._name and now > self._since:
            self._spans.append(Span(name=self._name, start_s=self._since, end_s=now, args=self._about(self._name)))
        self._since = now

    def add(self, name: str, seconds: float) -> None:
        """``name`` ran beside the activity and has ended now."""
        now = self._clock()
        self._spans.append(Span(name=name, start_s=now - seconds, end_s=now))

    def take(self) -> list[Span]:
        """All spans until now; what goes on is cut in two."""
        self._cut(self._clock())
        spans, self._spans = self._spans, []
        return spans
