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

    def __init__(self, about: Callable[[str], Args] = lambda _: {}, clock: Callable[[], float] = time_of_day_s) -> None:
        self._about = about
        self._clock = clock
        self._name = ""
        self._since = 0.0
        self._version = -1
        self._spans: list[Span] = []

    def begin(self, name: str) -> None:
        """The worker does ``name`` from now on."""
        if name != self._name:
            self._cut(self._clock())
            self._name = name

    def _cut(self, now: float) -> None:
        if self._name and now > self._since:
            span = self._span(self._name, self._since, now)
            span.args.update(self._about(self._name))
            self._spans.append(span)
        self._since = now

    def _span(self, name: str, start_s: float, end_s: float) -> Span:
        args: Args = {"version": self._version} if self._version >= 0 else {}
        return Span(name=name, start_s=start_s, end_s=end_s, args=args)

    def serve(self, version: int) -> None:
        """From now on the engine has the weights of ``version``, those that step number ``version`` begins with."""
        self._cut(self._clock())
        self._version = version

    def add(self, name: str, seconds: float) -> None:
        """``name`` ran beside the activity and has ended now."""
        now = self._clock()
        self._spans.append(self._span(name, now - seconds, now))

    def take(self) -> list[Span]:
        """All spans until now; what goes on is cut in two."""
        self._cut(self._clock())
        spans, self._spans = self._spans, []
        return spans
