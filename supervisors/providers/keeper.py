"""Keeps machines of a provider: as many as the job wants, and a new one for each that has ended.

    aim ─┬─ too few ──▶ the next name ─▶ provider.start ─▶ runs ─▶ joins ─┬─ taken ──▶ a new one at once
         │                   ▲                               │            └─ failed, or taken at once ─┐
         │                   │                               └─ the head does not have it ─▶ given up ─┤
         │                   └───────────── after a pause, ever longer ────────────────────────────────┘
         └─ too many ─▶ provider.notice, those without work first

Invariants
- No more machines are wanted than the target. A machine that was given notice no longer counts, so its replacement can
  come at once.
- A name is used once, in this life of the run and in all others (``ownership.py``).
- A machine that was taken back at once, or before it had joined, counts as a failure, so that a cluster that always
  does so is not flooded with requests.
- A machine that runs but has been absent from the head for ``limits.machine_join_s`` is given up. While the head is
  unreachable, the machines that it last reported count as present.
- After a failure nothing is started until the pause is over, even if the target rises; failures in a pause count once.
- Nothing is started after ``close``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from dataclasses import dataclass

from actors.core.context import named_rng
from actors.policies.pool import keeping
from actors.policies.pool.keeping import KeepingView
from configs.limits import Limits
from supervisors.providers.base import log
from supervisors.providers.provider import ClusterProvider, How
from supervisors.tree.errors import ProviderError
from supervisors.tree.restart_budget import Backoff, BackoffPolicy, ExitCause


@dataclass
class _Machine:
    """A machine that was asked for and has not ended."""

    runs: bool = False
    joined_s: float | None = None
    """Loop time at which the machine joined the head; None: it has not."""
    absent: asyncio.TimerHandle | None = None
    """Timer that gives the machine up; set while it runs and is absent from the head."""


class Keeper:
    """Keeps ``target`` machines from ``begin`` to ``close``. Create it on the running loop.

    Args:
        next_name: draws a name that no machine of this run has ever had.
        kind: price kind of the machines.
        window_s: time in which a machine that is given back has to end: its notice plus the time to stop.
        tell: receives messages for people: what happens and what the cluster says.
    """

    def __init__(
        self,
        provider: ClusterProvider,
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
        self._short_s, self._join_s = limits.machine_retry_s, limits.machine_join_s
        self._rng = named_rng(0, "machines")
        self._loop = asyncio.get_running_loop()
        self._machines: dict[str, _Machine] = {}
        self._present: frozenset[str] = frozenset()
        self._leaving: set[str] = set()
        self._words: dict[str, str] = {}
        self._pause: asyncio.TimerHandle | None = None
        self._open = False
        self.started = self.taken = self.failed = self.returned = 0
        provider.on_end, provider.on_news, provider.on_runs = self._ended, self._heard, self._runs

    def begin(self) -> None:
        """Start keeping machines."""
        self._open = True
        self._fill()

    def aim(self, target: int, keep: Collection[str] = ()) -> None:
        """Set the number of machines wanted. ``keep``: machines in use, which are given back last."""
        self._target = target
        for node in keeping.decide(KeepingView(self._staying(), target, keep)).give_back:
            self.returned += 1
            self._leaving.add(node)
            self._tell(f"{node} is given back")
            self._provider.notice(node, self._return_window_s)
        self._fill()

    def joined(self, nodes: Collection[str]) -> None:
        """Note that exactly these machines are joined to the head now."""
        self._present = frozenset(nodes)
        for node in self._machines:
            self._miss(node)

    async def close(self) -> None:
        """Start no more machines, and give all back. Idempotent."""
        self._open = False
        if self._pause is not None:
            self._pause.cancel()
        await self._provider.close()

    def _staying(self) -> list[str]:
        return [node for node in self._provider.running if node not in self._leaving]

    def _fill(self) -> None:
        while self._open and self._pause is None and keeping.decide(KeepingView(self._staying(), self._target)).ask_for:
            node = "a machine"
            try:
                node = self._next_name()
                self._provider.start(node, self._kind)
            except ProviderError as error:
                self._rest(node, str(error), lived_s=0.0)
                return
            self.started += 1
            self._machines[node] = _Machine()

    def _heard(self, node: str, words: str) -> None:
        if self._words.get(node) != words:
            self._words[node] = words
            self._tell(f"{node}: {words}")

    def _runs(self, node: str) -> None:
        self._machines[node].runs = True
        self._miss(node)

    def _miss(self, node: str) -> None:
        """Start the timer that gives ``node`` up if it runs and is absent from the head; stop it if it has joined."""
        machine = self._machines[node]
        if node in self._present:
            machine.joined_s = self._loop.time() if machine.joined_s is None else machine.joined_s
            if machine.absent is not None:
                machine.absent.cancel()
                machine.absent = None
        elif machine.runs and machine.absent is None:
            machine.absent = self._loop.call_later(self._join_s, self._give_up, node)

    def _give_up(self, node: str) -> None:
        why = f"has run for {self._join_s:g} s and not joined the head"
        if self._machines[node].joined_s is not None:
            why = f"runs, and the head has missed it for {self._join_s:g} s"
        self._provider.give_up(node, f"it {why}")

    def _ended(self, node: str, how: How) -> None:
        self._leaving.discard(node)
        machine = self._machines.pop(node)
        if machine.absent is not None:
            machine.absent.cancel()
        words = self._words.pop(node, "")
        lived_s = self._loop.time() - machine.joined_s if machine.joined_s is not None else 0.0
        if not self._open:
            return
        self.taken += how == "taken"
        if how == "taken" and lived_s >= self._short_s:
            self._tell(f"{node} was taken back by its cluster; another one is asked for")
        elif how in ("taken", "failed"):
            self._rest(node, words, lived_s)
        self._fill()

    def _rest(self, node: str, words: str, lived_s: float) -> None:
        """``node`` could not be started, failed, or was taken back at once: try again after a pause."""
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
