"""Timers of one transport: delayed calls, all of which are cancelled when it closes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Final

from transport.transport import Lane

_PROBES_S: Final = (0.0, 0.005, 0.02, 0.08, 0.3)
"""Delays after a disconnect at which to ask again, since libzmq reports it before it forgets the routing id."""


class Timers:
    """The timers hold all delayed calls of one transport."""

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
    """After a disconnect, a few probes of a lane find out which of the listener's connections are gone, by ``ask``.

    Disconnects that come together share their probes, so that a thousand of them do not probe a thousand links each.
    """

    def __init__(self, timers: Timers, ask: Callable[[Lane], None]) -> None:
        self._timers = timers
        self._ask = ask
        self._to_come: dict[tuple[float, Lane], bool] = {}  # probes not yet made; True: repeat once

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
