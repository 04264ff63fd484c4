"""What each kind of fault does to a cluster: to the real processes of a run, or to simulated ones.

    fault ─▶ victims ─▶ crash, halt, slow, shift the clock, exhaust the memory, take away    each victim
          └▶ disturb its links, spoil a chunk of the weights, fill the journal's disk

``fault_schedule.py`` decides when a fault strikes a real run, ``simulation/faults/nemesis.py`` when it strikes a
simulated one.
"""

from __future__ import annotations

import asyncio
import random
import signal
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import structlog

from configs import fault_plan as fp
from supervisors.tree.errors import FaultNotPossible

log = structlog.get_logger("headrace.nemesis")

Heal = Callable[[], Awaitable[str]]
"""Callback that ends a fault, and says how that went, for people."""


@dataclass(frozen=True)
class Hit:
    """The victims of one strike, and how to end it."""

    names: list[str]
    """The names of what was hit, for people."""
    heals: Sequence[Heal] = ()
    """The callbacks that end the fault, as far as it does not end by itself."""


V = TypeVar("V")


class Cluster(Protocol[V]):
    """The cluster that faults are done to; its victims are of type ``V``, and ``str`` of one names it to people.

    Every method but ``later`` raises FaultNotPossible if it cannot be done. A fault that is given a length ends by
    itself, or its method returns what ends it.
    """

    async def victims(self, target: fp.Target, rng: random.Random) -> list[V]:
        """The victims that ``target`` (not a link or chunk) names; at least one."""
        ...

    async def crash(self, victim: V, rng: random.Random) -> None:
        """End ``victim`` without notice; ``rng`` may draw what else ends with it."""
        ...

    async def halt(self, victim: V, lasts_s: float | None) -> Heal | None:
        """Stop ``victim`` without ending it."""
        ...

    async def slow(self, victim: V, factor: float, lasts_s: float | None) -> Heal | None: ...
    async def shift_clock(self, victim: V, jump_s: float, lasts_s: float | None) -> Heal | None: ...

    async def exhaust_memory(self, victim: V) -> None:
        """Let the next micro-batch of ``victim`` find no memory."""
        ...

    async def give_notice(self, victim: V, notice_s: float) -> None:
        """Tell a victim that can hand its work over; any other one gets the signal only."""
        ...

    async def send_signal(self, victim: V, number: signal.Signals) -> None: ...

    async def disturb(self, fault: fp.Partition | fp.LinkFault, rng: random.Random) -> Hit:
        """Make links misbehave, or cut them."""
        ...

    async def spoil_chunk(self, fault: fp.Corrupt, rng: random.Random) -> Hit: ...
    async def fill_disk(self, fault: fp.DiskFull, rng: random.Random) -> Hit: ...

    def later(self, work: Coroutine[Any, Any, None], name: str) -> object:
        """Run ``work`` in the background."""
        ...


async def commit(cluster: Cluster[V], fault: fp.FaultBase, rng: random.Random) -> Hit:
    """Commit ``fault`` once, now.

    Raises:
        FaultNotPossible: nothing was hit; the text says why.
    """
    match fault:
        case fp.Partition() | fp.LinkFault():
            return await cluster.disturb(fault, rng)
        case fp.Corrupt():
            return await cluster.spoil_chunk(fault, rng)
        case fp.DiskFull():
            return await cluster.fill_disk(fault, rng)
        case _:
            return await _on_each_victim(cluster, fault, rng)


async def _on_each_victim(cluster: Cluster[V], fault: fp.FaultBase, rng: random.Random) -> Hit:
    """Hit each victim; one that cannot be hit does not spare the others."""
    names: list[str] = []
    heals: list[Heal] = []
    spared: list[FaultNotPossible] = []
    for victim in await cluster.victims(fault.target, rng):
        try:
            heal = await _on_victim(cluster, fault, victim, rng)
        except FaultNotPossible as error:
            log.warning("one of a fault's victims is spared", victim=str(victim), why=str(error))
            spared.append(error)
        else:
            names.append(str(victim))
            heals += [heal] if heal is not None else []
    if not names:
        raise spared[0]
    return Hit(names, heals)


async def _on_victim(cluster: Cluster[V], fault: fp.FaultBase, victim: V, rng: random.Random) -> Heal | None:
    match fault:
        case fp.Kill():
            await cluster.crash(victim, rng)
        case fp.Hang():
            return await cluster.halt(victim, fault.heal_after_s)
        case fp.Slow():
            return await cluster.slow(victim, fault.factor, fault.heal_after_s)
        case fp.Clock():
            return await cluster.shift_clock(victim, fault.jump_s, fault.heal_after_s)
        case fp.OutOfMemory():
            await cluster.exhaust_memory(victim)
        case fp.Preempt():
            cluster.later(_take_away(cluster, victim, fault), f"preempt {victim}")
        case _:
            raise AssertionError(f"{fault.kind} hits no process")
    return None


async def _take_away(cluster: Cluster[V], victim: V, fault: fp.Preempt) -> None:
    try:
        if fault.notice_s > 0:
            await cluster.give_notice(victim, fault.notice_s)
            await asyncio.sleep(fault.notice_s)
        await cluster.send_signal(victim, signal.SIGTERM)
        await asyncio.sleep(fault.grace_s)
        await cluster.send_signal(victim, signal.SIGKILL)
    except FaultNotPossible as error:
        log.info("a preempted process is gone", victim=str(victim), why=str(error))
