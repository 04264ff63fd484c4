"""Keeps machines of a provider: as many as the job wants, and a new one for each that has ended.

    aim ─┬─ too few ──▶ the next name ─▶ provider.start ─▶ running ─┬─ taken ──▶ a new one at once
         │                   ▲                                      └─ failed, or taken at once ─┐
         │                   └───────────── after a pause, ever longer ──────────────────────────┘
         └─ too many ─▶ provider.notice, those without work first

Invariants
- No more machines are wanted than the aim says. One that was given notice counts no longer: its replacement can come
  at once.
- A name is used once, in this life of the run and in all others (``ownership.py``).
- One that was taken back at once counts as a failure: a cluster that always does so is not crowded.
- After a failure nothing is started until the pause is over, also if the aim rises; failures within a pause count once.
- Nothing is started after ``close``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection

from actors.core.context import named_rng
from configs.limits import Limits
from supervisors.providers.base import log
from supervisors.providers.provider import How, Provider
from supervisors.tree.errors import ProviderError
from supervisors.tree.restart_budget import Backoff, BackoffPolicy, ExitCause


class Keeper:
    """It keeps ``target`` machines from ``begin`` to ``close``. Create it on the running loop.

    Args:
        next_name: draws a name that no machine of this run has ever had.
        kind: what the machines are priced as.
        window_s: time in which one that is given back has to end: its notice, and what it takes to stop.
        tell: hears, for people, what happens and what the cluster says.
    """

    def __init__(
        self,
        provider: Provider,
        next_name: Callable[[], str],
        kind: str,
        *,
        target: int,
        window_s: float,
        limits: Limits,
        tell: Callable[[str], None],
    ) -> None:
        self._provider, self._next_name, self._kind = provider, next_name, kind
        self._target = target
        self._return_window_s = window_s
        self._tell = tell
        self._backoff = Backoff(
            BackoffPolicy(limits.machine_retry_s, limits.machine_retry_max_s, quiet_s=limits.restart_window_s)
        )
        self._short_s = limits.machine_retry_s
        self._rng = named_rng(0, "machines")
        self._loop = asyncio.get_running_loop()
        self._since_s: dict[str, float] = {}
        self._leaving: set[str] = set()
        self._words: dict[str, str] = {}
        self._pause: asyncio.TimerHandle | None = None
        self._open = False
        self.started = self.taken = self.failed = self.returned = 0
        provider.on_end, provider.on_news = self._ended, self._heard

    def begin(self) -> None:
        """From now on machines are kept."""
        self._open = True
        self._fill()

    def aim(self, target: int, keep: Collection[str] = ()) -> None:
        """From now on so many machines are wanted. ``keep``: those in use, which are given back last."""
        self._target = target
        staying = sorted(self._staying(), key=lambda node: node not in keep)
        for node in staying[target:]:
            self.returned += 1
            self._leaving.add(node)
            self._tell(f"{node} is given back")
            self._provider.notice(node, self._return_window_s)
        self._fill()

    async def close(self) -> None:
        """Start nothing any more, and give everything back. Idempotent."""
        self._open = False
        if self._pause is not None:
            self._pause.cancel()
        await self._provider.close()

    def _staying(self) -> list[str]:
        return [node for node in self._provider.running if node not in self._leaving]

    def _fill(self) -> None:
        while self._open and self._pause is None and len(self._staying()) < self._target:
            node = "a machine"
            try:
                node = self._next_name()
                self._provider.start(node, self._kind)
            except ProviderError as error:
                self._rest(node, str(error), lived_s=0.0)
                return
            self.started += 1
            self._since_s[node] = self._loop.time()

    def _heard(self, node: str, words: str) -> None:
        if self._words.get(node) != words:
            self._words[node] = words
            self._tell(f"{node}: {words}")

    def _ended(self, node: str, how: How) -> None:
        self._leaving.discard(node)
        words = self._words.pop(node, "")
        lived_s = self._loop.time() - self._since_s.pop(node, self._loop.time())
        if not self._open:
            return
        self.taken += how == "taken"
        if how == "taken" and lived_s >= self._short_s:
            self._tell(f"{node} was taken back by its cluster; another one is asked for")
        elif how in ("taken", "failed"):
            self._rest(node, words, lived_s)
        self._fill()

    def _rest(self, node: str, words: str, lived_s: float) -> None:
        """``node`` could not be had, or has ended by itself or at once: try again after a pause."""
        self.failed += 1
        log.warning("a machine has failed", node=node, why=words)
        if self._pause is not None:
            return
        pause_s = self._backoff.after(ExitCause.CRASHED, lived_s=lived_s, rng=self._rng)
        self._tell(f"{node} failed ({words or 'no reason is known'}); the next one is tried in {pause_s:.0f} s")
        self._pause = self._loop.call_later(pause_s, self._rested)

    def _rested(self) -> None:
        self._pause = None
        self._fill()
