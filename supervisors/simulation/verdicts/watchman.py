"""Watches a simulated run from outside: is it over, is it too late, has it stopped advancing?

A run has stopped advancing when no ledger takes an event and no job changes its state while no fault is in force. Then
the report says who waits for whom (``actors/core/look.py``), what each job waits for, and where each task stands.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from actors.core.errors import AskError
from actors.protocol.jobs import JobReport, JobStatus
from configs.limits import DEFAULT_LIMITS
from supervisors.simulation.cluster.machine import SimulatedHead
from supervisors.simulation.cluster.world import World
from supervisors.simulation.verdicts.probes import Probes
from transport.sim.loop import waiting

_LOOK_S: Final = 0.25
_STALLS_MAX: Final = 20
_SHORTEST_S: Final = 5.0


class Watchman:
    """Watches one world until the run is over or given up. ``disturbed``: whether a fault lasts or is yet to come."""

    def __init__(self, world: World, disturbed: Callable[[], bool]) -> None:
        self._world = world
        self._disturbed = disturbed
        self.report = ""
        """Reason why the run was given up; empty if it was not."""

    async def watch(self) -> None:
        world = self._world
        loop, scenario = world.loop, world.scenario
        moved, moved_s = -1, 0.0
        calm_s, probes = 0.0, Probes(world)
        while not world.over:
            await asyncio.sleep(_LOOK_S)
            now_s = loop.time()
            disturbed = self._disturbed()
            for broken in probes.look(disturbed=disturbed):
                world.finding(broken)
            if disturbed:
                calm_s = now_s
            if world.movement != moved or disturbed:
                moved, moved_s = world.movement, now_s
            if now_s - moved_s >= scenario.stall_s:
                self.report = await self._who_waits(f"deadlock: nothing has moved for {scenario.stall_s:g} s")
            elif now_s - calm_s >= scenario.finish_within_s:
                self.report = await self._who_waits(f"no end: {scenario.finish_within_s:g} s after the last fault")
            if self.report:
                return

    async def _who_waits(self, what: str) -> str:
        world = self._world
        lines = [what]
        for body in sorted(world.bodies.values(), key=lambda body: body.name):
            state = " (halted)" if body.halted else ""
            stalls = [] if body.system is None else body.system.sight(_SHORTEST_S).stalls
            lines += [f"  {body.name}{state}: {stall}" for stall in stalls[:_STALLS_MAX]]
        lines += [f"  {line}" for line in await self._what_jobs_say()]
        lines.append("tasks that are not just waiting for a message:")
        lines += [line for line in waiting(world.loop).splitlines() if " at mailbox.py:" not in line]
        return "\n".join(lines)

    async def _what_jobs_say(self) -> list[str]:
        head: SimulatedHead | None = self._world.head
        if head is None or head.head is None:
            return ["there is no head"]
        said: list[str] = []
        for name, run in head.head.jobs.items():
            children = ", ".join(f"{child.name} {child.state}" for child in run.tree.children())
            said.append(f"job {name} is {run.state}; {children}")
            task = head.body.life.start(_status(head, name), f"ask job {name}")
            try:
                said.append(await task)
            except (AskError, TimeoutError) as error:
                said.append(f"job {name} does not say what it waits for: {error}")
        return said


async def _status(head: SimulatedHead, name: str) -> str:
    assert head.head is not None
    run = head.head.jobs[name]
    ref = head.head.system.ref(run.address("job"))
    async with asyncio.timeout(DEFAULT_LIMITS.control_timeout_s):
        report = await ref.ask(JobStatus(job=name), JobReport)
    return f"job {name} waits for {report.waiting_for or 'nothing that it knows of'}"
