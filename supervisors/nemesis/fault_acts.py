"""Each kind of fault, done to the real processes of a run. An act returns what it has hit, for people.

Every act waits until somebody is there to be hit, and says FaultNotPossible when it cannot be done.
"""

from __future__ import annotations

import asyncio
import random
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Final

from actors.protocol.work import Drain
from actors.weights.segments import read_manifests
from configs import fault_plan as fp
from supervisors.faults.chunk_faults import mend_chunk, spoil_chunk
from supervisors.faults.fault_messages import ApplyFault, ClockOrder, LinkOrder, ProcessOrder, SignalChild, SlowChild
from supervisors.machine.machine import JOURNAL, LocalMachine
from supervisors.nemesis.fault_hand import Hand, log
from supervisors.nemesis.fault_targets import HEAD, Victim
from supervisors.tree.errors import FaultNotPossible
from transport.address import ActorAddress

Act = Callable[[Hand, Any, random.Random], Awaitable[list[str]]]


async def _kill(hand: Hand, fault: fp.Kill, rng: random.Random) -> list[str]:
    victims = await hand.victims(fault.target, rng)
    for victim in victims:
        await hand.signal(victim, signal.SIGKILL)
    return [str(victim) for victim in victims]


async def _hang(hand: Hand, fault: fp.Hang, rng: random.Random) -> list[str]:
    victims = await hand.victims(fault.target, rng)
    for victim in victims:
        await hand.signal(victim, signal.SIGSTOP, fault.heal_after_s)
        if fault.heal_after_s is not None and not victim.is_node:
            _continue_after(hand, victim, fault.heal_after_s)
    return [str(victim) for victim in victims]


def _continue_after(hand: Hand, victim: Victim, after_s: float) -> None:
    async def wait() -> None:
        await asyncio.sleep(after_s)
        try:
            await hand.order(victim.node_faults, SignalChild(pid=victim.pid, signal=signal.SIGCONT))
        except FaultNotPossible:
            return  # whoever owns it has ended it meanwhile, as it should
        hand.record("fault_healed", kind="hang", hit=str(victim))

    hand.later(wait(), f"continue {victim.name}")


async def _slow(hand: Hand, fault: fp.Slow, rng: random.Random) -> list[str]:
    victims = await hand.victims(fault.target, rng)
    for victim in victims:
        if victim.is_node:
            raise FaultNotPossible(f"{victim.name} hosts a node agent: nobody is there to slow it down")
        order = SlowChild(pid=victim.pid, factor=fault.factor, lasts_s=fault.heal_after_s)
        await hand.order(victim.node_faults, order)
    return [str(victim) for victim in victims]


async def _preempt(hand: Hand, fault: fp.Preempt, rng: random.Random) -> list[str]:
    victims = await hand.victims(fault.target, rng)
    for victim in victims:
        if fault.notice_s > 0:
            await _give_notice(hand, victim, fault.notice_s)
        _end_after(hand, victim, fault)
    return [str(victim) for victim in victims]


async def _give_notice(hand: Hand, victim: Victim, notice_s: float) -> None:
    """Those that can hand something over are told; to the others the signal is all they hear."""
    if victim.role == "node":
        hand.cluster.nodes.drain(victim.name)
        hand.later(_drain_node(hand, victim.name), f"drain {victim.name}")
    elif victim.role == "rollout":
        worker = ActorAddress(victim.name, victim.own_faults.peer, victim.own_faults.endpoint)
        drain = Drain(job=hand.run.job.name, deadline_s=notice_s, reason="preempted", notice=True)
        hand.cluster.system.ref(worker).tell(drain)


async def _drain_node(hand: Hand, node: str) -> None:
    moved = await hand.run.tree.drain_node(node)
    log.info("a node is drained before it is preempted", node=node, workers=moved)


def _end_after(hand: Hand, victim: Victim, fault: fp.Preempt) -> None:
    async def end() -> None:
        await asyncio.sleep(fault.notice_s)
        try:
            await hand.signal(victim, signal.SIGTERM)
            await asyncio.sleep(fault.grace_s)
            await hand.signal(victim, signal.SIGKILL)
        except FaultNotPossible as error:
            log.info("a preempted process is gone", victim=str(victim), why=str(error))

    hand.later(end(), f"preempt {victim.name}")


async def _clock(hand: Hand, fault: fp.Clock, rng: random.Random) -> list[str]:
    victims = await hand.victims(fault.target, rng)
    order = ClockOrder(jump_s=fault.jump_s, lasts_s=fault.heal_after_s)
    for victim in victims:
        await hand.order(victim.own_faults, ApplyFault(order=order))
    return [str(victim) for victim in victims]


async def _messages(hand: Hand, fault: fp.Partition | fp.LinkFault, rng: random.Random) -> list[str]:
    """Both ends are told: each misbehaves in what it sends, and a partition is one at both.

    An end that an earlier fault has stopped hears nothing, and sends nothing either: the others suffice.
    """
    if fault.target.link is not None:
        one, other = await hand.ends(fault.target)
    else:
        one = await hand.victims(fault.target, rng)
        names = {victim.peer for victim in one}
        other = [victim for victim in hand.roster().running if victim.peer not in names]
    told = [(victim, other) for victim in one] + [(victim, one) for victim in other]
    # Those who hear of it first must not cut off those who have not: the head, which tells them, comes last.
    deaf: list[FaultNotPossible] = []
    for victim, others in sorted(told, key=lambda pair: pair[0].role == HEAD):
        try:
            await hand.order(victim.own_faults, ApplyFault(order=_link_order(fault, others)))
        except FaultNotPossible as error:
            deaf.append(error)
            log.warning("one end of a link did not take its fault", end=str(victim), why=str(error))
    if len(deaf) == len(told):
        raise deaf[0]
    return [f"{victim} ⇄ {', '.join(v.name for v in other)}" for victim in one]


async def _corrupt(hand: Hand, fault: fp.Corrupt, rng: random.Random) -> list[str]:
    chunk = fault.target.chunk
    assert chunk is not None, "the schema lets corrupt hit chunks only"
    if chunk.where == "served":
        return await _corrupt_served(hand, fault, chunk, rng)
    if chunk.version is None:  # in the first moments of a run none is published yet
        await hand.as_soon_as(lambda: read_manifests(hand.run.run_dir), fault.target)
    spoilt = spoil_chunk(hand.run.run_dir, chunk, rng)
    what = f"chunk {spoilt.index} of version {spoilt.version} in shared memory"
    if fault.heal_after_s is not None:
        hand.heal_after(fault.heal_after_s, lambda: mend_chunk(spoilt), kind="corrupt", hit=what)
    return [what]


async def _corrupt_served(hand: Hand, fault: fp.Corrupt, chunk: fp.ChunkTarget, rng: random.Random) -> list[str]:
    if chunk.index is not None or chunk.version is not None:
        raise FaultNotPossible("a served copy is spoilt whichever chunk it is: leave version and index out")
    [server] = await hand.victims(fp.Target(role="weights"), rng)
    order = LinkOrder(kind="corrupt", lane="bulk", lasts_s=fault.heal_after_s)
    await hand.order(server.own_faults, ApplyFault(order=order))
    return [f"every chunk that {server} streams"]


async def _disk_full(hand: Hand, fault: fp.DiskFull, rng: random.Random) -> list[str]:
    machine, path = hand.cluster.machine, hand.run.run_dir / JOURNAL
    if not isinstance(machine, LocalMachine):
        raise FaultNotPossible(f"the journal of a {type(machine).__name__} is not ours to fill")
    machine.full_disks.add(path)
    if fault.heal_after_s is not None:
        hand.heal_after(fault.heal_after_s, lambda: _empty(machine, path), kind="disk_full", hit=JOURNAL)
    return [JOURNAL]


def _empty(machine: LocalMachine, journal: Path) -> str:
    machine.full_disks.discard(journal)
    return "the disk has room again"


def _link_order(fault: fp.Partition | fp.LinkFault, others: list[Victim]) -> ProcessOrder:
    late = isinstance(fault, fp.Delay)
    return LinkOrder(
        kind=fault.kind,
        peers=tuple(sorted(victim.peer for victim in others)),
        lane=(fault.lane or "") if isinstance(fault, fp.LinkFault) else "",
        probability=fault.probability if isinstance(fault, fp.Drop | fp.Delay | fp.Duplicate) else 1.0,
        delay_ms=fault.delay_ms if late else 0.0,
        jitter_ms=fault.jitter_ms if late else 0.0,
        lasts_s=fault.heal_after_s,
    )


ACTS: Final[dict[type[fp.FaultBase], Act]] = {
    fp.Kill: _kill,
    fp.Hang: _hang,
    fp.Slow: _slow,
    fp.Partition: _messages,
    fp.Drop: _messages,
    fp.Delay: _messages,
    fp.Duplicate: _messages,
    fp.Corrupt: _corrupt,
    fp.Preempt: _preempt,
    fp.DiskFull: _disk_full,
    fp.Clock: _clock,
}
