"""Lets faults act on the simulated processes of a world: see ``fault_acts.Cluster``.

Nothing here waits. Each act that lasts returns the function that ends it, which the nemesis calls.
"""

from __future__ import annotations

import random
import signal
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, Final

from actors.core.senders import SenderKind, sender_of
from actors.protocol.weights import Chunk
from actors.protocol.work import Drain
from configs import fault_plan as fp
from configs.fault_plan import ChunkTarget
from supervisors.head.machine_process import PEER
from supervisors.nemesis.fault_acts import Heal, Hit
from supervisors.simulation.cluster.machine import SimulatedChild, SimulatedRole
from supervisors.simulation.cluster.main_process import MainProcess
from supervisors.simulation.cluster.world import World
from supervisors.tree.errors import FaultNotPossible
from transport.codec import decode_body, encode_body
from transport.envelope import decode_envelope
from transport.sim.network import Cut, Disturbance, Ends
from transport.transport import Frame, Lane

Victim = SimulatedChild | MainProcess

_CHUNK_TAG: Final = b"weights.chunk"
_POWER_LOSS: Final = 0.5
"""Probability that a machine loses power when its main process is killed."""


class SimulatedCluster:
    """Acts on the processes of one world, as a ``fault_acts.Cluster``."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._tamperings: list[Tampering] = []

    def later(self, work: Coroutine[Any, Any, None], name: str) -> object:
        return self._world.in_background(work, name)

    # ------------------------------------------------------------ who is hit

    async def victims(self, target: fp.Target, rng: random.Random) -> list[Victim]:
        found = self._named(target)
        if not found:
            raise FaultNotPossible(f"nothing that {target} names is running")
        if target.role is not None:
            return rng.sample(found, min(target.count, len(found)))
        return found if target.node is not None else [rng.choice(found)]

    def _named(self, target: fp.Target) -> list[Victim]:
        world = self._world
        if target.node is not None:
            return [world.mains[target.node]] if target.node in world.mains else []
        if target.role == "node":
            return [main for name, main in world.mains.items() if name != "head"]
        if target.role == "head":
            return [world.head] if world.head is not None else []
        children = [child for child in world.roles() if target.job in (None, child.job)]
        return [child for child in children if target.name == child.actor or target.role == child.role]

    async def _ends(self, target: fp.Target, rng: random.Random) -> tuple[list[str], list[tuple[Ends, Ends]]]:
        """The two ends of a message fault: names for people, and pairs of ends for the network."""
        if target.link is not None:
            one, other = target.link
            return [f"{one}-{other}"], [(self._end(one), self._end(other))]
        names: list[str] = []
        pairs: list[tuple[Ends, Ends]] = []
        for victim in await self.victims(target, rng):
            inside = _machine(victim.machine.name) if isinstance(victim, MainProcess) else victim.name.__eq__
            names.append(victim.name)
            pairs.append((inside, _not(inside)))
        return names, pairs

    def _end(self, end: str) -> Ends:
        """Match peers: ``head``, ``machine``, ``<node>``, ``<node>.<job>.<actor>``, ``head.service.<name>``."""
        if end == "head":
            return end.__eq__
        if end in self._world.machines:
            return _machine(end)
        if end in ("train_service", "rank"):
            return lambda peer: sender_of(peer).kind is SenderKind(end)
        if end == "node":
            return lambda peer: peer not in ("head", PEER) and "." not in peer
        return lambda peer: peer.rpartition(".")[2].partition("-")[0] == end or peer.endswith(f".{end}")

    # ------------------------------------------------------------ what is done to them

    async def send_signal(self, victim: Victim, number: signal.Signals) -> None:
        victim.send_signal(number)

    async def crash(self, victim: Victim, rng: random.Random) -> None:
        if isinstance(victim, MainProcess) and rng.random() < _POWER_LOSS:
            victim.lose_power()
        else:
            victim.send_signal(signal.SIGKILL)

    async def halt(self, victim: Victim, lasts_s: float | None) -> Heal:
        if victim.body.halted:
            raise FaultNotPossible(f"{victim} stands still already")
        self._world.services.hindered(victim.body.life)
        victim.send_signal(signal.SIGSTOP)
        return _heal(lambda: victim.body.alive and victim.send_signal(signal.SIGCONT), "continued")

    async def slow(self, victim: Victim, factor: float, lasts_s: float | None) -> Heal:
        if victim.body.life.slowness != 1.0:
            raise FaultNotPossible(f"{victim} is slowed down already")
        self._world.services.hindered(victim.body.life)
        victim.body.life.slowness = factor
        return _heal(lambda: setattr(victim.body.life, "slowness", 1.0), "at full speed")

    async def shift_clock(self, victim: Victim, jump_s: float, lasts_s: float | None) -> Heal:
        life = victim.body.life
        life.clock_error_s += jump_s
        return _heal(lambda: setattr(life, "clock_error_s", life.clock_error_s - jump_s), "set right")

    async def exhaust_memory(self, victim: Victim) -> None:
        victim.body.life.memory_strikes += 1

    async def give_notice(self, victim: Victim, notice_s: float) -> None:
        head = self._world.head
        if head is None or head.head is None or head.body.halted:
            return
        runs = [run for run in head.head.jobs.values() if not run.state.over and "rollout" in run.tree.supervisors]
        if isinstance(victim, MainProcess):
            node = victim.machine.name
            head.body.life.run(head.head.nodes.drain, node)
            for run in runs:
                head.body.life.start(run.tree.pool.drain_node(node), f"drain {node}")
        elif isinstance(victim, SimulatedRole) and victim.role == "rollout":
            for run in runs:
                running = run.tree.supervisors["rollout"].running(victim.actor)
                if run.job.name == victim.job and running is not None:
                    order = Drain(job=victim.job, deadline_s=notice_s, reason="preempted", notice=True)
                    head.body.life.run(head.head.system.ref(running.address).tell, order)

    async def disturb(self, fault: fp.Partition | fp.LinkFault, rng: random.Random) -> Hit:
        names, pairs = await self._ends(fault.target, rng)
        if isinstance(fault, fp.Partition):
            return Hit(names, [self._cut(one, other) for one, other in pairs])
        return Hit(names, [self._disturb(_disturbance(fault, one, other)) for one, other in pairs])

    def _cut(self, one: Ends, other: Ends) -> Heal:
        cut = Cut(one, other)
        self._world.network.cut(cut)
        return _heal(lambda: self._world.network.mend(cut), "mended")

    def _disturb(self, disturbance: Disturbance) -> Heal:
        self._world.network.disturb(disturbance)
        return _heal(lambda: self._world.network.calm(disturbance), "calm")

    async def spoil_chunk(self, fault: fp.Corrupt, rng: random.Random) -> Hit:
        chunk = fault.target.chunk
        assert chunk is not None, "the schema lets corrupt hit chunks only"
        job = self._one_job(fault.target, rng)
        if chunk.where == "served":
            tampering = Tampering(job, chunk, rng)
            self._tamperings.append(tampering)
            self._world.network.tamper = self._tampered

            def stop() -> None:
                self._tamperings.remove(tampering)
                self._world.network.tamper = self._tampered if self._tamperings else None

            return Hit([f"chunks of {job}"], [_heal(stop, "served as it is")])
        segment = self._segment(job, chunk.version)
        mend = flip_segment(segment, chunk.index, rng)
        return Hit([segment.name.partition("-v")[2]], [_heal(mend, "put back")])

    def _tampered(self, source: str, frames: list[Frame]) -> list[Frame]:
        for tampering in self._tamperings:
            frames = tampering(source, frames)
        return frames

    def _segment(self, job: str, version: int | None) -> Path:
        found = {int(path.name.rpartition("-v")[2]): path for path in self._world.segments(job)}
        segment = found.get(max(found, default=0) if version is None else version)
        if segment is None:
            raise FaultNotPossible(f"no segment of {job} lies there")
        return segment

    def _one_job(self, target: fp.Target, rng: random.Random) -> str:
        return rng.choice([job.name for job in self._world.jobs if target.job in (None, job.name)])

    async def fill_disk(self, fault: fp.DiskFull, rng: random.Random) -> Hit:
        if fault.target.role == "train_service":
            return self._fill_tiers(rng)
        file = self._world.machines["head"].journal_file(self._one_job(fault.target, rng))
        file.full = True
        room = _heal(lambda: setattr(file, "full", False), "the disk has room again")
        return Hit([f"journal of {file.job}"], [room])

    def _fill_tiers(self, rng: random.Random) -> Hit:
        full, tiers = self._world.services.full_tiers, rng.choice([["host"], ["disk"], ["host", "disk"]])
        full += tiers
        room = _heal(lambda: [full.remove(tier) for tier in tiers], "the tiers have room again")
        return Hit([f"{tier} tier" for tier in tiers], [room])


def _heal(act: Callable[[], object], said: str) -> Heal:
    """A function that ends a fault by ``act`` and returns ``said``."""

    async def act_and_say() -> str:
        act()
        return said

    return act_and_say


def _machine(name: str) -> Ends:
    """All processes of a machine; on the head's also the machine process."""
    more = PEER if name == "head" else name
    return lambda peer: peer in (name, more) or peer.startswith(f"{name}.")


def _not(ends: Ends) -> Ends:
    return lambda peer: not ends(peer)


def _disturbance(fault: fp.LinkFault, one: Ends, other: Ends) -> Disturbance:
    delay = fault if isinstance(fault, fp.Delay) else None
    return Disturbance(
        one,
        other,
        None if fault.lane is None else Lane[fault.lane.upper()],
        loss=fault.probability if isinstance(fault, fp.Drop) else 0.0,
        duplicate=fault.probability if isinstance(fault, fp.Duplicate) else 0.0,
        delay_s=delay.delay_ms / 1000 if delay else 0.0,
        delay_jitter_s=delay.jitter_ms / 1000 if delay else 0.0,
        delay_probability=delay.probability if delay else 1.0,
    )


def flip_segment(segment: Path, index: int | None, rng: random.Random) -> Callable[[], None]:
    """Replace ``segment`` by a copy with one bit wrong; returns a function that mends it, if it still exists.

    Processes that have mapped and verified it keep the right bytes.
    """
    right = segment.read_bytes()
    place = rng.randrange(len(right))
    wrong = bytearray(right)
    wrong[place] ^= 1 << rng.randrange(8)
    _replace(segment, bytes(wrong))

    def mend() -> None:
        if segment.exists():
            _replace(segment, right)

    return mend


def _replace(segment: Path, data: bytes) -> None:
    copy = segment.with_name(segment.name + ".copy")
    copy.write_bytes(data)
    copy.rename(segment)


class Tampering:
    """Flips a bit of each delivered chunk of ``job`` that ``target`` names."""

    def __init__(self, job: str, target: ChunkTarget, rng: random.Random) -> None:
        self._job = job
        self._target = target
        self._rng = rng

    def __call__(self, source: str, frames: list[Frame]) -> list[Frame]:
        """``frames``, with a bit flipped if they are such a chunk."""
        if _CHUNK_TAG not in bytes(frames[0]) or f".{self._job}." not in source:
            return frames
        if decode_envelope(frames[0]).tag != _CHUNK_TAG.decode():
            return frames
        chunk = decode_body(Chunk, frames[1:])
        target = self._target
        if target.version not in (None, chunk.policy_version) or target.index not in (None, chunk.index):
            return frames
        data = chunk.data.copy()
        data[self._rng.randrange(len(data))] ^= 1 << self._rng.randrange(8)
        return [frames[0], *encode_body(Chunk(policy_version=chunk.policy_version, index=chunk.index, data=data))]
