"""Looks into every process of a head at once: who waits for whom, and what found no receiver.

    Operations ─▶ StallReport ─┬─ head: looked into directly                      ┐
                               ├─ role processes: Look to their process reporters ├─▶ rows, oldest first
                               ├─ machines: Look to their node agents             │
                               └─ jobs: their schedulers, looked at directly      ┘

Invariants
- A process that does not answer within ``limits.look_timeout_s`` gets a row of its own, which says that it is silent.
- All processes are asked at the same time, so one that hangs costs no more than that timeout.
- A scheduler is read, not asked, though it is an actor: one that hangs in a handler takes no further message, and what
  its job waits for is then just what an operator wants to know. Nothing else in supervisors reads an actor so, but the
  probes of simulations.
- Other processes answer on the lane for signals: on the lane for messages an answer would wait behind thousands of
  tokens.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from actors.core.errors import AskError
from actors.core.look import Look, Sight, Stall
from actors.scheduler.scheduler import Scheduler
from supervisors.head.view import HeadView
from transport.address import ActorAddress
from transport.transport import Lane

Row = dict[str, Any]


@dataclass(frozen=True)
class Silent:
    """A process that has not answered."""

    process: str
    waited_s: float
    why: str

    @property
    def row(self) -> Row:
        return _row(self.process, Stall("head", self.process, "silent", self.why, self.waited_s))


class StallReport:
    """Finds who waits for whom, in all processes of one head."""

    def __init__(self, head: HeadView) -> None:
        self._head = head

    async def stalls(self, longer_than_s: float) -> list[Row]:
        """Every wait longer than ``longer_than_s``, of actors and of jobs, and silent processes; oldest first."""
        seen = await self._sights(longer_than_s)
        rows = [_row(sight.process, stall) for sight in seen if isinstance(sight, Sight) for stall in sight.stalls]
        rows += [sight.row for sight in seen if isinstance(sight, Silent)]
        rows += self._jobs(longer_than_s)
        return sorted(rows, key=lambda row: -float(row["since_s"]))

    async def dead_letters(self) -> dict[str, list[Row]]:
        """Counts by process and reason, the largest first; and the newest dead letters."""
        seen = [sight for sight in await self._sights(0.0) if isinstance(sight, Sight)]
        counts: list[Row] = [
            {"process": sight.process, "reason": reason, "messages": messages}
            for sight in seen
            for reason, messages in sight.dead_letter_counts.items()
        ]
        newest: list[Row] = [
            {
                "process": sight.process,
                "reason": letter.reason,
                "tag": letter.tag,
                "source": letter.source,
                "target": letter.target,
                "ago_s": round(letter.ago_s, 3),
            }
            for sight in seen
            for letter in sight.dead_letters
        ]
        return {
            "counts": sorted(counts, key=lambda row: -int(row["messages"])),
            "newest": sorted(newest, key=lambda row: float(row["ago_s"])),
        }

    async def _sights(self, longer_than_s: float) -> list[Sight | Silent]:
        own = self._head.system.sight(longer_than_s)
        return [own, *await asyncio.gather(*(self._ask(at, longer_than_s) for at in self._windows()))]

    def _windows(self) -> Iterator[ActorAddress]:
        """Addresses of the actors that answer ``Look`` for the other processes."""
        own = self._head.system.peer
        for node in self._head.nodes.present:
            if node.agent.peer != own:
                yield node.agent
        for service in self._head.services.all:
            if (running := service.running) is not None:
                yield ActorAddress("reporter", running.address.peer, running.address.endpoint)
        for run in self._head.jobs.values():
            for supervisor in run.tree.supervisors.values():
                for info in supervisor.snapshot():
                    running = supervisor.running(info.name)
                    if running is not None and running.address.peer != own:
                        yield ActorAddress("reporter", running.address.peer, running.address.endpoint)

    async def _ask(self, window: ActorAddress, longer_than_s: float) -> Sight | Silent:
        timeout_s, loop = self._head.limits.look_timeout_s, asyncio.get_running_loop()
        began_s = loop.time()
        try:
            look = Look(longer_than_s=longer_than_s)
            return await self._head.system.ref(window).ask(look, Sight, timeout_s, lane=Lane.SIGNAL)
        except AskError as error:
            return Silent(window.peer.name, loop.time() - began_s, f"gives no answer: {type(error).__name__}")

    def _jobs(self, longer_than_s: float) -> Iterator[Row]:
        own = self._head.system
        for run in self._head.jobs.values():
            scheduler = own.hosted(f"scheduler.{run.job.name}")
            progress = scheduler.progress_now() if isinstance(scheduler, Scheduler) and not run.state.over else None
            if progress is not None and progress.waiting_for and progress.quiet_s >= longer_than_s:
                waiter, since_s = f"job.{run.job.name}", progress.quiet_s
                yield _row(own.peer.name, Stall(waiter, progress.waiting_for, "job", "nothing has moved", since_s))
            machine, waits_s = run.tree.pool.trainer_waits()
            if machine and waits_s >= longer_than_s:
                yield _row(own.peer.name, Stall("trainer", machine, "node", "it starts then", waits_s))


def _row(process: str, stall: Stall) -> Row:
    return {
        "process": process,
        "waiter": stall.waiter or "outside of actors",
        "waits_for": stall.waits_for,
        "kind": stall.kind,
        "what": stall.what,
        "since_s": round(stall.since_s, 3),
    }
