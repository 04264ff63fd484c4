"""Applies faults to a simulated world: the same acts as on real processes (``supervisors/nemesis/fault_acts.py``).

    each fault:  wait for its trigger ─▶ strike(s) ─ heal_after_s ─▶ healed

The target is chosen when the fault strikes, among what lives then. A strike without a target is noted and forgotten.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Sequence

from configs import fault_plan as fp
from configs.limits import DEFAULT_LIMITS
from supervisors.nemesis.fault_acts import Heal, commit
from supervisors.simulation.cluster.world import World
from supervisors.simulation.faults.plan import DrawnFault
from supervisors.simulation.faults.simulated_cluster import SimulatedCluster
from supervisors.tree.errors import FaultNotPossible


class Nemesis:
    """Injects faults into one world. It is ``active`` while faults are yet to come, or in force."""

    def __init__(self, world: World, planned: Sequence[fp.FaultBase], drawn: Sequence[DrawnFault]) -> None:
        """Args:
        planned: faults whose time counts from when all processes are ready.
        drawn: faults whose time counts from the start.
        """
        self._world = world
        self._cluster = SimulatedCluster(world)
        self._planned = planned
        self._drawn = drawn
        self._in_force = 0
        self._pending = len(planned) + len(drawn)

    @property
    def active(self) -> bool:
        return self._in_force > 0 or self._pending > 0

    def start(self) -> None:
        """Begin to wait for the triggers of all faults."""
        for number, fault in enumerate(self._planned):
            self._world.in_background(self._follow(fault, number), f"fault {number}")
        for number, drawn in enumerate(self._drawn, len(self._planned)):
            self._world.in_background(self._follow_drawn(drawn, number), f"fault {number}")

    async def _follow_drawn(self, drawn: DrawnFault, number: int) -> None:
        world, fault = self._world, drawn.fault
        rng = world.rng(f"fault {number}")
        try:
            await asyncio.sleep(fault.delay_after_trigger_s)
            if drawn.tag:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(DEFAULT_LIMITS.fault_moment_s):
                        ends = await world.trace.next_message(drawn.tag)
                    await asyncio.sleep(drawn.after_s)
                    if drawn.hits_an_end:
                        fault = _at_an_end(world, fault, ends, rng)
            await self._strike(fault, number, rng)
        finally:
            self._pending -= 1

    async def _follow(self, fault: fp.FaultBase, number: int) -> None:
        world = self._world
        rng = world.rng(f"fault {number}")
        try:
            await world.until(world.is_ready)
            await world.until(lambda: fault.after_step is None or self._committed(fault) >= fault.after_step)
            await asyncio.sleep(fault.delay_after_trigger_s)
            for strike in range(fault.times):
                if strike:
                    await asyncio.sleep(fault.every_s or 0.0)
                await self._strike(fault, number, rng)
        finally:
            self._pending -= 1

    def _committed(self, fault: fp.FaultBase) -> int:
        committed = self._world.committed
        return committed.get(fault.target.job, 0) if fault.target.job else max(committed.values(), default=0)

    async def _strike(self, fault: fp.FaultBase, number: int, rng: random.Random) -> None:
        """Strike once, which takes no time, since nothing in the simulated cluster waits."""
        world = self._world
        try:
            hit = await commit(self._cluster, fault, rng)
        except FaultNotPossible:
            world.trace.note("fault", number=number, kind=fault.kind, target=str(fault.target), hit="nothing")
            return
        names = ", ".join(hit.names)
        world.struck.append(f"{world.loop.time():.3f} s: {fault.kind} {fault.target}: {names}")
        world.trace.note("fault", number=number, kind=fault.kind, target=str(fault.target), hit=names)
        lasts_s: float | None = getattr(fault, "heal_after_s", None)
        if isinstance(fault, fp.Preempt):
            lasts_s = fault.notice_s + fault.grace_s
        if lasts_s is not None:
            self._in_force += 1
            world.in_background(self._heal(number, lasts_s, hit.heals), f"heal {number}")

    async def _heal(self, number: int, after_s: float, heals: Sequence[Heal]) -> None:
        await asyncio.sleep(after_s)
        for heal in heals:
            await heal()
        self._in_force -= 1
        self._world.trace.note("healed", number=number)


def _at_an_end(world: World, fault: fp.FaultBase, ends: tuple[str, str], rng: random.Random) -> fp.FaultBase:
    """``fault`` aimed at a role process at one of the two ends; unchanged if there is none."""
    found = [child for child in world.roles() if child.name in ends and child.role in type(fault).ROLES]
    if not found:
        return fault
    child = rng.choice(found)
    return fault.model_copy(update={"target": fp.Target(name=child.actor, job=child.job)})
