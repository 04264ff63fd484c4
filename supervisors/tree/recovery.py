"""Runs recoveries: rounds of stopping, waiting and starting, one at a time for children that share their fate.

    request ─▶ pending, joined with what waits there ─▶ round: stop ─ wait ─ start ─▶ the next round, if any is pending

Invariants
- Under one_for_all and rest_for_one all children are one failure domain; under one_for_one each group is one, and a
  child without a group is recovered at once, beside all others.
- A group is stopped and started all at once. A start under way is cancelled once another member of its group has ended:
  it may be waiting for that one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

from supervisors.tree.child_record import Child
from supervisors.tree.restart_budget import ExitCause


@dataclass
class Recovery:
    """Describes one round: the children to stop, the wait, and the children to start."""

    stop: list[str]
    start: list[str]
    delay_s: float
    failed: bool
    """Flag that an end that led to this round was held against the supervisor's budget."""
    cause: ExitCause | None
    """Cause of the end for which others are stopped and not started again; None: they are started again."""

    def __init__(
        self,
        stop: Sequence[str] = (),
        start: Sequence[str] = (),
        delay_s: float = 0.0,
        *,
        failed: bool = False,
        cause: ExitCause | None = None,
    ) -> None:
        self.stop, self.start, self.delay_s = list(stop), list(start), delay_s
        self.failed, self.cause = failed, cause

    def joined(self, other: Recovery) -> Recovery:
        return Recovery(
            self.stop + other.stop, self.start + other.start, max(self.delay_s, other.delay_s),
            failed=self.failed or other.failed, cause=other.cause or self.cause,
        )  # fmt: skip

    def part(self, names: Collection[str]) -> Recovery:
        """The part of this round that concerns ``names``."""
        stop, start = ([name for name in listed if name in names] for listed in (self.stop, self.start))
        return Recovery(stop, start, self.delay_s, failed=self.failed, cause=self.cause)


class Rounds:
    """Carries out the recoveries of one supervisor.

    Args:
        children: the supervisor's children, in their order.
        independent: whether children depend on each other only within groups.
        begin: starts a task under a name.
        stop: stops one child, and returns whether it was up. From the call on, an end of the child is not judged.
        start: starts one child.
        ended: is told of a child that was stopped for its group and is not started again, with the cause.
        now, sleep: the clock.
    """

    def __init__(
        self,
        children: dict[str, Child],
        *,
        independent: bool,
        begin: Callable[[Coroutine[Any, Any, None], str], object],
        stop: Callable[[Child], Awaitable[bool]],
        start: Callable[[Child], Coroutine[Any, Any, None]],
        ended: Callable[[Child, ExitCause], None],
        now: Callable[[], float],
        sleep: Callable[[float], Awaitable[None]],
    ) -> None:
        self._children, self._independent = children, independent
        self._begin, self._stop, self._start, self._ended = begin, stop, start, ended
        self._now, self._sleep = now, sleep
        self._pending: dict[str, Recovery] = {}
        """Failure domain → its next round. A domain is named as its group, or "" under strategies without groups."""
        self._running: set[str] = set()
        self._closed = False

    def close(self) -> None:
        """Begin no further round, nor the rest of one."""
        self._closed = True

    def has_failed(self, group: str) -> bool | None:
        """Whether the round that waits to begin for ``group`` was held against the budget; None: none waits."""
        pending = self._pending.get(group)
        return pending.failed if pending is not None else None

    def request(self, recovery: Recovery) -> None:
        """Carry out ``recovery``, each failure domain's part on its own."""
        if not self._independent:
            self._join("", recovery)
            return
        groups: dict[str, list[str]] = {}
        for name, child in self._children.items():
            groups.setdefault(child.spec.group, []).append(name)
        for group, names in groups.items():
            part = recovery.part(names)
            if group and (part.stop or part.start):
                for name in part.stop:
                    self._children[name].cut_start(self._now())
                self._join(group, part)
            elif part.stop or part.start:
                self._begin(self._alone(part), f"start {','.join(part.start)}")

    def _join(self, domain: str, recovery: Recovery) -> None:
        pending = self._pending.get(domain)
        self._pending[domain] = recovery if pending is None else pending.joined(recovery)
        if domain not in self._running:
            self._running.add(domain)
            self._begin(self._in_rounds(domain), f"recover {domain}")

    async def _alone(self, recovery: Recovery) -> None:
        await self._recover("", recovery)

    async def _in_rounds(self, domain: str) -> None:
        try:
            while domain in self._pending and not self._closed:
                left = await self._recover(domain, self._pending.pop(domain))
                if left and domain in self._pending:
                    self._pending[domain] = self._pending[domain].joined(Recovery(start=left))
        finally:
            self._running.discard(domain)

    async def _recover(self, domain: str, recovery: Recovery) -> list[str]:
        """Stop, wait, start. Returns the names that were not started because another end came in between."""
        stopped = [self._children[name] for name in self._in_order(recovery.stop)[::-1]]
        if self._independent:
            were_up = await asyncio.gather(*map(self._stop, stopped))
        else:
            were_up = [await self._stop(child) for child in stopped]
        for child, was_up in zip(stopped, were_up, strict=True):
            if child.spec.name not in recovery.start:
                child.settled.set()
                if was_up and recovery.cause is not None:  # a child that has ended by itself was reported already
                    self._ended(child, recovery.cause)
        if recovery.delay_s > 0:
            await self._sleep(recovery.delay_s)
        names = self._in_order(recovery.start)
        if self._independent:
            async with asyncio.TaskGroup() as starts:
                for name in names:
                    starts.create_task(self._start(self._children[name]))
            return []
        for index, name in enumerate(names):
            if domain in self._pending or self._closed:
                return names[index:]
            child = self._children.get(name)
            if child is not None:
                await self._start(child)
        return []

    def _in_order(self, names: Sequence[str]) -> list[str]:
        wanted = set(names)
        return [name for name in self._children if name in wanted]
