"""Replays a spot trace on a provider: machines come, are given notice, and are taken away when the trace says so.

    trace ─▶ offered ──(below the target)──▶ provider.start ─▶ running ──notice, kill──▶ gone
                ▲                                                 │
                └─────── below the target again: the next offered ┘

Invariants
- There are never more machines than the target; those offered beyond it wait, and may be gone before they are wanted.
  When the target falls, the youngest are given back, with notice; such a machine does not come back.
- A machine that was given notice no longer counts, so its replacement can come at once; it is never started afterwards.
- Equal traces and targets give equal orders; time is the running loop's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection

from configs.limits import DEFAULT_LIMITS
from configs.provider_schema import SpotConfig
from supervisors.providers.base import log
from supervisors.providers.provider import How, Provider
from supervisors.providers.trace_files import read_trace
from supervisors.providers.traces import Trace, TraceEvent
from supervisors.tree.errors import ProviderError


def planned(spot: SpotConfig) -> Trace:
    """The trace that ``spot`` names, at its speed and with its notices.

    Raises:
        ConfigError: the file cannot be read or is malformed.
    """
    assert spot.trace is not None, "the checks of the job file ask for a trace"
    trace = read_trace(spot.trace).faster(spot.speed)
    return trace.with_notice(spot.notice_s) if spot.notice_s else trace


class Replay:
    """Plays ``trace`` once, from the call of ``run``.

    Args:
        target: most machines wanted; None: all that are offered.
        return_window_s: how long a machine that is given back may take to leave cleanly.
        on_event: callback that is told each order to the provider: node, what, kind.
    """

    def __init__(
        self,
        trace: Trace,
        provider: Provider,
        *,
        target: int | None = None,
        on_event: Callable[[TraceEvent], None] | None = None,
        return_window_s: float = DEFAULT_LIMITS.stop_timeout_s,
    ) -> None:
        self._trace = trace
        self._provider = provider
        self._target = target
        self._return_window_s = return_window_s
        self._on_event = on_event or (lambda event: None)
        self._offered: dict[str, str] = {}
        self._leaving: set[str] = set()
        self._ends_s = {event.node: event.at_s for event in trace.events if event.what == "kill"}
        self.started = self.noticed = self.killed = self.failed = self.returned = 0
        provider.on_end = self._ended

    async def run(self) -> None:
        """Play the trace to its end. Machines that run then go on running."""
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        for event in self._trace.events:
            await asyncio.sleep(max(0.0, began_s + event.at_s - loop.time()))
            self._follow(event)

    def aim(self, target: int, keep: Collection[str] = ()) -> None:
        """Set another target: start more of the offered machines, or give back those beyond it.

        ``keep``: machines in use, which are given back last.
        """
        self._target = target
        staying = [node for node in self._provider.running if node not in self._leaving]
        staying.sort(key=lambda node: node not in keep)
        for node in staying[target:]:
            self.returned += 1
            self._leaving.add(node)
            self._on_event(TraceEvent(0.0, node, "notice", self._provider.running[node]))
            self._provider.notice(node, self._return_window_s)
        self._fill(0.0)

    def counts(self) -> dict[str, int]:
        """Counts of what has been done so far."""
        names = ("started", "noticed", "killed", "failed", "returned")
        return {name: getattr(self, name) for name in names}

    def _follow(self, event: TraceEvent) -> None:
        node = event.node
        if event.what == "up":
            self._offered[node] = event.kind
        elif self._offered.pop(node, None) is not None:
            return  # nobody had wanted it
        elif node in self._provider.running and event.what == "notice":
            if node in self._leaving:
                return  # it has been given back
            self.noticed += 1
            self._leaving.add(node)
            self._on_event(event)
            self._provider.notice(node, self._ends_s.get(node, self._trace.length_s) - event.at_s)
        elif node in self._provider.running:
            self.killed += node not in self._leaving
            self._on_event(event)
            self._provider.kill(node)
        self._fill(event.at_s)

    def _fill(self, at_s: float) -> None:
        """Start offered machines up to the target, longest offered first; if one cannot be started, try the next.

        The loop ends: each turn takes one machine off the offers, and none comes back.
        """
        while self._wanted():
            node = next(iter(self._offered))
            kind = self._offered.pop(node)
            try:
                self._provider.start(node, kind)
            except ProviderError as error:
                self.failed += 1
                log.warning("a machine of the trace was not started", node=node, why=str(error))
                continue
            self.started += 1
            self._on_event(TraceEvent(at_s, node, "up", kind))

    def _wanted(self) -> int:
        """Number of machines to start now, of those that are offered."""
        available = len(self._offered)
        if self._target is None:
            return available
        staying = sum(node not in self._leaving for node in self._provider.running)
        return max(0, min(available, self._target - staying))  # the target may be exceeded already

    def _ended(self, node: str, how: How) -> None:
        self._leaving.discard(node)
        if how == "failed":  # after notice or kill, the caller fills the place
            self.failed += 1
            log.warning("a machine has ended although the trace still has it", node=node)
            self._fill(0.0)
