"""Applies faults to a simulated world: the same vocabulary as on real processes (``configs/fault_plan.py``).

    each fault:  wait for its trigger ─▶ strike(s) ─ heal_after_s ─▶ healed

What is hit is chosen when the fault strikes, among what lives then. A strike that finds nothing to hit is noted and
forgotten.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from actors.protocol.work import Drain
from configs import fault_plan as fp
from configs.limits import DEFAULT_LIMITS
from supervisors.head.machine_process import PEER
from supervisors.simulation.children import SimulatedRole
from supervisors.simulation.chunks import Tampering, flip_segment
from supervisors.simulation.main_process import MainProcess
from supervisors.simulation.plan import DrawnFault
from transport.sim.network import Cut, Disturbance, Ends
from transport.transport import Lane

if TYPE_CHECKING:
    from supervisors.simulation.children import SimulatedChild
    from supervisors.simulation.world import World

_POWER_LOSS: Final = 0.5
"""How often the end of a machine's main process is the end of its power."""

Heal = Callable[[], None]


class Nemesis:
    """One per world. ``active`` counts faults that are yet to come or in force."""

    def __init__(self, world: World, planned: Sequence[fp.FaultBase], drawn: Sequence[DrawnFault]) -> None:
        """Args:
        planned: their time counts from when all processes are ready.
        drawn: theirs counts from the start.
        """
        self._world = world
        self._planned = planned
        self._drawn = drawn
        self._in_force = 0
        self._pending = len(planned) + len(drawn)

    @property
    def active(self) -> bool:
        return self._in_force > 0 or self._pending > 0

    def start(self) -> None:
        """Begin to wait for the triggers."""
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
            self._strike(fault, number, rng)
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
                self._strike(fault, number, rng)
        finally:
            self._pending -= 1

    def _committed(self, fault: fp.FaultBase) -> int:
        committed = self._world.committed
        return committed.get(fault.target.job, 0) if fault.target.job else max(committed.values(), default=0)

    def _strike(self, fault: fp.FaultBase, number: int, rng: random.Random) -> None:
        world = self._world
        heals = _STRIKES[type(fault)](world, fault, rng)
        text = f"{world.loop.time():.3f} s: {fault.kind} {fault.target}"
        if heals is None:
            world.trace.note("fault", number=number, kind=fault.kind, target=str(fault.target), hit="nothing")
            return
        hits, heal = heals
        world.struck.append(f"{text}: {', '.join(hits)}")
        world.trace.note("fault", number=number, kind=fault.kind, target=str(fault.target), hit=", ".join(hits))
        after_s: float | None = getattr(fault, "heal_after_s", None)
        if isinstance(fault, fp.Preempt):
            after_s = fault.notice_s + fault.grace_s
        if after_s is not None and heal is not None:
            self._in_force += 1
            world.in_background(self._heal(number, after_s, heal), f"heal {number}")

    async def _heal(self, number: int, after_s: float, heal: Heal) -> None:
        await asyncio.sleep(after_s)
        heal()
        self._in_force -= 1
        self._world.trace.note("healed", number=number)


Struck = tuple[list[str], Heal | None] | None
"""Who was hit, and how to heal it."""
Victim = "SimulatedChild | MainProcess"


# ------------------------------------------------------------ who is meant


def _victims(world: World, target: fp.Target, rng: random.Random) -> list[SimulatedChild | MainProcess]:
    if target.role is not None:
        found: list[SimulatedChild | MainProcess]
        if target.role == "node":
            found = [main for name, main in world.mains.items() if name != "head"]
        elif target.role == "head":
            found = [world.head] if world.head is not None else []
        else:
            found = [child for child in world.roles() if child.role == target.role and _of_job(child, target)]
        return rng.sample(found, min(target.count, len(found)))
    if target.node is not None:
        main = world.mains.get(target.node)
        return [main] if main is not None else []
    children = [child for child in world.roles() if child.actor == target.name and _of_job(child, target)]
    return [rng.choice(children)] if children else []


def _at_an_end(world: World, fault: fp.FaultBase, ends: tuple[str, str], rng: random.Random) -> fp.FaultBase:
    """``fault`` against a role process at one of the two ends; as it is if there is none."""
    found = [child for child in world.roles() if child.name in ends and child.role in type(fault).ROLES]
    if not found:
        return fault
    child = rng.choice(found)
    return fault.model_copy(update={"target": fp.Target(name=child.actor, job=child.job)})


def _of_job(child: SimulatedRole, target: fp.Target) -> bool:
    return target.job in (None, child.job)


def _peer_of(victim: SimulatedChild | MainProcess) -> str:
    return victim.body.name


def _ends(world: World, target: fp.Target, rng: random.Random) -> tuple[list[str], list[tuple[Ends, Ends]]]:
    """What a fault of messages lies between, for people and for the network."""
    if target.link is not None:
        one, other = target.link
        return [f"{one}-{other}"], [(_end(world, one), _end(world, other))]
    names: list[str] = []
    pairs: list[tuple[Ends, Ends]] = []
    for victim in _victims(world, target, rng):
        name = _peer_of(victim)
        inside = _machine(victim.machine.name) if isinstance(victim, MainProcess) else name.__eq__
        names.append(name)
        pairs.append((inside, _not(inside)))
    return names, pairs


def _end(world: World, end: str) -> Ends:
    """Peers are called ``head``, ``machine``, ``<node>``, ``<node>.<job>.<actor>``."""
    if end == "head":
        return end.__eq__
    if end in world.machines:
        return _machine(end)
    if end == "node":
        return lambda peer: peer not in ("head", PEER) and "." not in peer
    return lambda peer: peer.rpartition(".")[2].partition("-")[0] == end or peer.endswith(f".{end}")


def _machine(name: str) -> Ends:
    """All processes of a machine; that of the head has one more."""
    more = PEER if name == "head" else name
    return lambda peer: peer in (name, more) or peer.startswith(f"{name}.")


def _not(ends: Ends) -> Ends:
    return lambda peer: not ends(peer)


# ------------------------------------------------------------ what happens to them


def _kill(world: World, fault: fp.FaultBase, rng: random.Random) -> Struck:
    victims = _victims(world, fault.target, rng)
    for victim in victims:
        if not isinstance(victim, MainProcess):
            victim.send_signal(signal.SIGKILL)
        elif rng.random() < _POWER_LOSS:
            victim.lose_power()
        else:
            victim.kill()
    return _names(victims), None


def _hang(world: World, fault: fp.FaultBase, rng: random.Random) -> Struck:
    victims = [victim for victim in _victims(world, fault.target, rng) if not victim.body.halted]
    for victim in victims:
        if isinstance(victim, MainProcess):
            victim.body.halt()
        else:
            victim.send_signal(signal.SIGSTOP)

    def heal() -> None:
        for victim in victims:
            if not victim.body.alive:
                continue
            if isinstance(victim, MainProcess):
                victim.body.go_on()
            else:
                victim.send_signal(signal.SIGCONT)

    return _names(victims), heal


def _slow(world: World, fault: fp.FaultBase, rng: random.Random) -> Struck:
    """As on real nodes: what is slowed down already is left alone."""
    assert isinstance(fault, fp.Slow)
    victims = [victim for victim in _victims(world, fault.target, rng) if victim.body.life.slowness == 1.0]
    for victim in victims:
        victim.body.life.slowness *= fault.factor

    def heal() -> None:
        for victim in victims:
            victim.body.life.slowness = 1.0

    return (_names(victims), heal) if victims else None


def _partition(world: World, fault: fp.FaultBase, rng: random.Random) -> Struck:
    names, pairs = _ends(world, fault.target, rng)
    cuts = [Cut(one, other) for one, other in pairs]
    for cut in cuts:
        world.network.cut(cut)

    def heal() -> None:
        for cut in cuts:
            world.network.mend(cut)

    return (names, heal) if names else None


def _disturb(world: World, fault: fp.FaultBase, rng: random.Random) -> Struck:
    assert isinstance(fault, fp.Drop | fp.Delay | fp.Duplicate)
    names, pairs = _ends(world, fault.target, rng)
    lane = None if fault.lane is None else Lane[fault.lane.upper()]
    delay = fault if isinstance(fault, fp.Delay) else None
    disturbances = [
        Disturbance(
            one,
            other,
            lane,
            loss=fault.probability if isinstance(fault, fp.Drop) else 0.0,
            duplicate=fault.probability if isinstance(fault, fp.Duplicate) else 0.0,
            delay_s=delay.delay_ms / 1000 if delay else 0.0,
            delay_jitter_s=delay.jitter_ms / 1000 if delay else 0.0,
            delay_probability=delay.probability if delay else 1.0,
        )
        for one, other in pairs
    ]
    for disturbance in disturbances:
        world.network.disturb(disturbance)

    def heal() -> None:
        for disturbance in disturbances:
            world.network.calm(disturbance)

    return (names, heal) if names else None


def _corrupt(world: World, fault: fp.FaultBase, rng: random.Random) -> Struck:
    chunk = fault.target.chunk
    assert chunk is not None
    jobs = [job.name for job in world.jobs if fault.target.job in (None, job.name)]
    job = rng.choice(jobs)
    if chunk.where == "served":
        tampering = Tampering(job, chunk, rng)
        world.tamper(tampering)
        return [f"chunks of {job}"], lambda: world.tamper(tampering, stop=True)
    segment = _segment(world, job, chunk.version)
    if segment is None:
        return None
    return [segment.name.partition("-v")[2]], flip_segment(segment, chunk.index, rng)


def _segment(world: World, job: str, version: int | None) -> Path | None:
    found = {int(path.name.rpartition("-v")[2]): path for path in world.segments(job)}
    return found.get(max(found) if version is None else version) if found else None


def _preempt(world: World, fault: fp.FaultBase, rng: random.Random) -> Struck:
    assert isinstance(fault, fp.Preempt)
    victims = _victims(world, fault.target, rng)
    for victim in victims:
        world.in_background(_take_away(world, victim, fault), f"preempt {_peer_of(victim)}")
    return (_names(victims), lambda: None) if victims else None


async def _take_away(world: World, victim: SimulatedChild | MainProcess, fault: fp.Preempt) -> None:
    """The notice, SIGTERM, SIGKILL."""
    if fault.notice_s > 0:
        _give_notice(world, victim, fault.notice_s)
        await asyncio.sleep(fault.notice_s)
    if isinstance(victim, MainProcess):
        victim.terminate()
    else:
        victim.send_signal(signal.SIGTERM)
    await asyncio.sleep(fault.grace_s)
    if victim.body.alive:
        victim.kill()


def _give_notice(world: World, victim: SimulatedChild | MainProcess, deadline_s: float) -> None:
    head = world.head
    if head is None or head.head is None or head.body.halted:
        return
    runs = [run for run in head.head.jobs.values() if not run.state.over]
    if isinstance(victim, MainProcess):
        name = victim.machine.name
        head.head.nodes.drain(name)
        for run in runs:
            if "rollout" in run.tree.supervisors:
                head.body.life.start(run.tree.drain_node(name), f"drain {name}")
    elif isinstance(victim, SimulatedRole) and victim.role == "rollout":
        for run in runs:
            running = (
                run.tree.supervisors["rollout"].running(victim.actor) if "rollout" in run.tree.supervisors else None
            )
            if run.job.name == victim.job and running is not None:
                order = Drain(job=victim.job, deadline_s=deadline_s, reason="preempted", notice=True)
                head.body.life.run(head.head.system.ref(running.address).tell, order)


def _disk_full(world: World, fault: fp.FaultBase, rng: random.Random) -> Struck:
    jobs = [job.name for job in world.jobs if fault.target.job in (None, job.name)]
    files = [world.machines["head"].journal_file(rng.choice(jobs))]
    for file in files:
        file.full = True

    def heal() -> None:
        for file in files:
            file.full = False

    return [f"journal of {file.job}" for file in files], heal


def _clock(world: World, fault: fp.FaultBase, rng: random.Random) -> Struck:
    assert isinstance(fault, fp.Clock)
    victims = _victims(world, fault.target, rng)
    for victim in victims:
        victim.body.life.clock_error_s += fault.jump_s

    def heal() -> None:
        for victim in victims:
            victim.body.life.clock_error_s -= fault.jump_s

    return _names(victims), heal


def _names(victims: list[SimulatedChild | MainProcess]) -> list[str]:
    return [_peer_of(victim) for victim in victims]


_STRIKES: Final[dict[type[fp.FaultBase], Callable[[World, fp.FaultBase, random.Random], Struck]]] = {
    fp.Kill: _kill,
    fp.Hang: _hang,
    fp.Slow: _slow,
    fp.Partition: _partition,
    fp.Drop: _disturb,
    fp.Delay: _disturb,
    fp.Duplicate: _disturb,
    fp.Corrupt: _corrupt,
    fp.Preempt: _preempt,
    fp.DiskFull: _disk_full,
    fp.Clock: _clock,
}
