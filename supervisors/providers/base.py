"""What all kinds of providers share: a list of nodes, so that each end is told once and each name is used once.

    start ─▶ begun ─▶ [runs] ─▶ [asked to end, with a timer after a notice; or given up] ─▶ ended ─▶ on_end(node, how)

Each kind of provider is a subclass. It says how a machine is made, told to go, and taken away: the abstract methods
below. The ``kind`` of a node is something else: which sort of machine it is.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import structlog

from configs.limits import Limits
from supervisors.providers.provider import How, OnEnd, OnNews, OnRuns
from supervisors.tree.errors import ProviderError

log = structlog.get_logger("headrace.provider")


@dataclass
class _Booked:
    kind: str
    runs: bool = False
    asked: How | None = None
    given_up: str = ""
    """Why it was given up; empty: it was not."""
    timer: asyncio.TimerHandle | None = None


class BookedProvider(ABC):
    """Knows the nodes of one kind of provider. ``on_end``, ``on_news`` and ``on_runs`` may be replaced at any time."""

    def __init__(self) -> None:
        self.on_end: OnEnd = lambda node, how: None
        self.on_news: OnNews = lambda node, words: None
        self.on_runs: OnRuns = lambda node: None
        self._nodes: dict[str, _Booked] = {}
        self._used: set[str] = set()
        self._closed = False
        self._changed = asyncio.Event()

    @property
    def running(self) -> Mapping[str, str]:
        return {name: node.kind for name, node in self._nodes.items()}

    def start(self, node: str, kind: str) -> None:
        if self._closed:
            raise ProviderError(f"{node} cannot be started: the provider is closed")
        if node in self._used:
            raise ProviderError(f"the name {node} has been used: give each life of a machine a name of its own")
        self._begin(node, kind)
        self._used.add(node)
        self._nodes[node] = _Booked(kind)

    def notice(self, node: str, window_s: float) -> None:
        booked = self._nodes.get(node)
        if booked is None or booked.asked == "kill":
            return
        booked.asked = "notice"
        self._tell_to_go(node)
        if booked.timer is not None:
            booked.timer.cancel()
        booked.timer = asyncio.get_running_loop().call_later(window_s, self._take_away, node)

    def kill(self, node: str) -> None:
        booked = self._nodes.get(node)
        if booked is not None:
            booked.asked = "kill"
            self._take_away(node)

    def give_up(self, node: str, why: str) -> None:
        booked = self._nodes.get(node)
        if booked is not None and booked.asked is None and not booked.given_up:
            booked.given_up = why
            self._drop(node)

    async def close(self) -> None:
        self._closed = True
        for node in list(self._nodes):
            self.notice(node, self._close_window_s)
        try:
            async with asyncio.timeout(2 * self._close_window_s):
                while self._nodes:
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            log.warning("machines do not end", nodes=sorted(self._nodes))

    def _up(self, node: str) -> None:
        """Note that ``node`` runs; a subclass may call this again and again."""
        booked = self._nodes[node]
        if not booked.runs:
            booked.runs = True
            self.on_runs(node)

    def _ended(self, node: str, how: How = "failed", words: str = "") -> None:
        """Note the end of ``node``, which the subclass has seen; called once for each node that began.

        Args:
            how: how it ended, if nobody here asked for its end.
            words: why it ended, as the cluster says it; told in that case only.
        """
        booked = self._nodes.pop(node)
        if booked.timer is not None:
            booked.timer.cancel()
        self._changed.set()
        if booked.given_up:
            how, words = "failed", "; ".join(filter(None, [booked.given_up, words]))
        if booked.asked is None and words:
            self.on_news(node, words)
        self.on_end(node, booked.asked or how)

    # ------------------------------------------------------------ what a subclass does

    _close_window_s: float

    @abstractmethod
    def _begin(self, node: str, kind: str) -> None:
        """Raises:
        ProviderError: the provider has no such machine.
        """

    @abstractmethod
    def _tell_to_go(self, node: str) -> None:
        """Tell ``node`` to end; it may take its time."""

    @abstractmethod
    def _take_away(self, node: str) -> None:
        """End ``node`` at once; harmless if it has gone."""

    def _drop(self, node: str) -> None:
        """End ``node``, which is given up; a subclass that can read the node's log adds its last lines to the news."""
        self._take_away(node)


def end_of_log(name: str, lines: Sequence[str], limits: Limits) -> str:
    """A phrase that quotes the end of a log; it is appended to the reason why the log's machine has ended."""
    said = " | ".join(line for line in map(str.strip, lines) if line)
    return f"; {name} ends: {said[-limits.machine_log_chars :]}" if said else f"; {name} says nothing"
