"""Timers of one transport: what it puts off, with all of it called off when it closes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Final

from transport.transport import Lane

_PROBES_S: Final = (0.0, 0.005, 0.02, 0.08, 0.3)
"""Delays after a disconnect at which to ask: libzmq reports it a little before it forgets the routing id."""


class Timers:
    """All calls to come of one transport."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._handles: set[asyncio.TimerHandle] = set()

    def later(self, delay_s: float, function: Callable[..., object], *args: Any) -> None:
        def run() -> None:
            self._handles.discard(handle)
            function(*args)

        handle = self._loop.call_later(delay_s, run)
        self._handles.add(handle)

    def cancel_all(self) -> None:
        for handle in self._handles:
            handle.cancel()
        self._handles.clear()


class Probes:
    """Probes say when the listener's links on a lane are asked whether their connections exist: ``ask`` does it.

    Once for all that happens meanwhile: a thousand that hang up together must not ask a thousand links each.
    """

    def __init__(self, timers: Timers, ask: Callable[[Lane], None]) -> None:
        self._timers = timers
        self._ask = ask
        self._to_come: dict[tuple[float, Lane], bool] = {}  # so long after an event; True: one more after it

    def after_disconnect(self, lane: Lane) -> None:
        for delay_s in _PROBES_S:
            self._order(delay_s, lane)

    def _order(self, delay_s: float, lane: Lane) -> None:
        ordered = (delay_s, lane) in self._to_come
        self._to_come[delay_s, lane] = ordered
        if not ordered:
            self._timers.later(delay_s, self._fire, delay_s, lane)

    def _fire(self, delay_s: float, lane: Lane) -> None:
        self._ask(lane)
        if self._to_come.pop((delay_s, lane)):
            self._order(delay_s, lane)
