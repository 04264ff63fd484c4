"""The nemesis of a run: commits faults on its real processes, and records each in events.jsonl.

    Fault ─▶ roster of what runs now ─▶ victims ─▶ ┬ signals          NodeFaults beside the victim's node agent
                                                   ├ links, clock     the victim itself, and who is at the other end
                                                   ├ weight chunks    the segment in shared memory, or its streams
                                                   └ the journal      this process
    each strike ─▶ fault_injected | fault_failed (why) ─▶ after its time ─▶ fault_healed

Invariants
- Every strike is recorded before the next one, as injected or as failed; a fault on the head before it takes effect.
- Only processes of this run are hit: a process id is checked against its parent by who sends the signal.
- What heals does so by itself, also when the nemesis or the head are gone; a finished run leaves nothing behind.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, Final, Protocol

import structlog

from actors.core.errors import AskError, RemoteError
from actors.core.message import Message
from actors.metrics.messages import Event, Flush, Flushed
from actors.rollout.messages import Drain
from configs import fault_plan as fp
from supervisors.chunk_faults import mend_chunk, spoil_chunk
from supervisors.errors import FaultNotPossible
from supervisors.fault_messages import (
    ApplyFault,
    ClockOrder,
    FaultApplied,
    LinkOrder,
    ProcessOrder,
    SignalChild,
    SignalNode,
    SlowChild,
)
from supervisors.fault_targets import HEAD, Roster, Victim, beside
from supervisors.machine import JOURNAL, LocalMachine, Machine
from transport.address import ActorAddress
from transport.errors import HeadraceError

if TYPE_CHECKING:
    from actors.core.system import ActorSystem
    from supervisors.job_run import JobRun
    from supervisors.nodes import Nodes

log = structlog.get_logger("headrace.nemesis")

_POLL_S: Final = 0.05
_HEAL_THEMSELVES: Final = (fp.Slow, fp.Partition, fp.LinkFault, fp.Clock)
"""By the clock of whoever commits them."""


class Cluster(Protocol):
    """What the nemesis needs of the head."""

    @property
    def system(self) -> ActorSystem: ...
    @property
    def nodes(self) -> Nodes: ...
    @property
    def machine(self) -> Machine: ...


class Nemesis:
    """Of one run."""

    def __init__(self, cluster: Cluster, run: JobRun) -> None:
        self._cluster = cluster
        self._run = run
        self._limits = run.job.limits
        self._healing: set[asyncio.Task[None]] = set()
        self._commit: dict[type, Callable[[Any, random.Random], Awaitable[list[str]]]] = {
            fp.Kill: self._kill,
            fp.Hang: self._hang,
            fp.Slow: self._slow,
            fp.Partition: self._messages,
            fp.Drop: self._messages,
            fp.Delay: self._messages,
            fp.Duplicate: self._messages,
            fp.Corrupt: self._corrupt,
            fp.Preempt: self._preempt,
            fp.DiskFull: self._disk_full,
            fp.Clock: self._clock,
        }

    async def strike(self, fault: fp.FaultBase, rng: random.Random, number: int = 0) -> list[str]:
        """Commit ``fault`` once, now; returns what was hit, for people.

        Raises:
            FaultNotPossible: it cannot be done to this run; the text says why. It is recorded as failed.
        """
        fields: dict[str, float | int | str] = {"fault": number, "kind": fault.kind, "target": str(fault.target)}
        heal_after_s = getattr(fault, "heal_after_s", None)
        if heal_after_s is not None:
            fields["heal_after_s"] = heal_after_s
        try:
            if fault.target.job not in (None, self._run.job.name):
                raise FaultNotPossible(f"this run is of job {self._run.job.name!r}, not {fault.target.job!r}")
            hit = await self._commit[type(fault)](fault, rng)
        except (HeadraceError, TimeoutError) as error:
            self.record("fault_failed", **fields, why=str(error))
            if isinstance(error, FaultNotPossible):
                raise
            raise FaultNotPossible(f"{fault.kind} on {fault.target}: {error}") from error
        self.record("fault_injected", **fields, hit=", ".join(hit))
        if heal_after_s is not None and isinstance(fault, _HEAL_THEMSELVES):
            self._heal_after(heal_after_s, lambda: None, fault=number, kind=fault.kind, hit=", ".join(hit))
        return hit

    def stop(self) -> None:
        """Nothing more is healed by us: the run is over."""
        for task in self._healing:
            task.cancel()
        if isinstance(self._cluster.machine, LocalMachine):
            self._cluster.machine.full_disks.discard(self._run.run_dir / JOURNAL)

    def record(self, name: str, **fields: float | str) -> None:
        """Into events.jsonl and the log."""
        log.warning(name, **fields)
        metrics = self._cluster.system.ref(self._run.address("metrics"))
        metrics.tell(Event(job=self._run.job.name, name=name, fields=dict(fields)))

    async def _flush(self) -> None:
        """Before this process itself is hit: what has been recorded is in the file."""
        try:
            await self._cluster.system.ref(self._run.address("metrics")).ask(
                Flush(job=self._run.job.name), Flushed, timeout_s=self._limits.fault_order_timeout_s
            )
        except AskError as error:
            log.warning("the record of a fault may be missing", why=str(error))

    def _heal_after(self, after_s: float, heal: Callable[[], object], **fields: float | str) -> None:
        async def wait() -> None:
            await asyncio.sleep(after_s)
            if heal() is not False:
                self.record("fault_healed", **fields)

        task = asyncio.create_task(wait(), name=f"heal {fields}")
        self._healing.add(task)
        task.add_done_callback(self._healing.discard)

    # ------------------------------------------------------------ who is there

    def roster(self) -> Roster:
        """Everybody who runs now."""
        head = self._cluster.system.address(HEAD)
        agents = {node.name: node.agent for node in self._cluster.nodes.present}
        local = beside(head)
        running = [Victim(HEAD, HEAD, HEAD, os.getpid(), head.peer.name, local, local)]
        for node in self._cluster.nodes.present:
            if not node.local:
                there = beside(node.agent)
                running.append(Victim(node.name, "node", node.name, 0, node.agent.peer.name, there, there))
        known: set[str] = set()
        for supervisor in self._run.supervisors.values():
            for info in supervisor.snapshot():
                child = supervisor.running(info.name)
                if child is not None and child.agent is None:
                    continue  # an actor of the head's own process
                known.add(info.name)
                if child is not None and child.node in agents:
                    own = ActorAddress("envoy", child.address.peer, child.address.endpoint)
                    node_faults = beside(agents[child.node])
                    running.append(
                        Victim(info.name, info.role, child.node, child.pid, child.address.peer.name, node_faults, own)
                    )
        return Roster(running, frozenset(known))

    async def _victims(self, target: fp.Target, rng: random.Random) -> list[Victim]:
        """Those that the target names, as soon as one of them runs: it may be in the middle of a restart."""
        try:
            async with asyncio.timeout(self._limits.fault_target_wait_s):
                while not (found := self.roster().victims(target, rng)):  # noqa: ASYNC110 - nobody tells of a start
                    await asyncio.sleep(_POLL_S)
        except TimeoutError as error:
            waited = f"{self._limits.fault_target_wait_s:g} s"
            raise FaultNotPossible(f"nothing that {target} names has been running for {waited}") from error
        return found

    async def _order(self, to: ActorAddress, message: Message) -> None:
        try:
            await self._cluster.system.ref(to).ask(message, FaultApplied, self._limits.fault_order_timeout_s)
        except RemoteError as error:
            raise FaultNotPossible(error.detail or str(error)) from error
        except AskError as error:
            raise FaultNotPossible(f"{to.name} of {to.peer.name} does not answer: {error}") from error

    # ------------------------------------------------------------ processes

    async def _signal(self, victim: Victim, number: signal.Signals, continue_after_s: float | None = None) -> None:
        if victim.is_node:
            if victim.role == HEAD:
                await self._flush()
            await self._order(victim.node_faults, SignalNode(signal=number, continue_after_s=continue_after_s))
        else:
            await self._order(victim.node_faults, SignalChild(pid=victim.pid, signal=number))

    async def _kill(self, fault: fp.Kill, rng: random.Random) -> list[str]:
        victims = await self._victims(fault.target, rng)
        for victim in victims:
            self._announce(victim, fault)
            await self._signal(victim, signal.SIGKILL)
        return [str(victim) for victim in victims]

    async def _hang(self, fault: fp.Hang, rng: random.Random) -> list[str]:
        victims = await self._victims(fault.target, rng)
        for victim in victims:
            self._announce(victim, fault)
            await self._signal(victim, signal.SIGSTOP, fault.heal_after_s)
            if fault.heal_after_s is not None and not victim.is_node:
                self._continue_after(victim, fault.heal_after_s)
        return [str(victim) for victim in victims]

    def _announce(self, victim: Victim, fault: fp.FaultBase) -> None:
        """What is done to the head is written down before: afterwards nobody is there to do so."""
        if victim.role == HEAD:
            self.record("fault_announced", kind=fault.kind, target=str(fault.target), hit=str(victim))

    def _continue_after(self, victim: Victim, after_s: float) -> None:
        async def wait() -> None:
            await asyncio.sleep(after_s)
            try:
                await self._order(victim.node_faults, SignalChild(pid=victim.pid, signal=signal.SIGCONT))
            except FaultNotPossible:
                return  # whoever owns it has ended it meanwhile, as it should
            self.record("fault_healed", kind="hang", hit=str(victim))

        task = asyncio.create_task(wait(), name=f"continue {victim.name}")
        self._healing.add(task)
        task.add_done_callback(self._healing.discard)

    async def _slow(self, fault: fp.Slow, rng: random.Random) -> list[str]:
        victims = await self._victims(fault.target, rng)
        for victim in victims:
            if victim.is_node:
                raise FaultNotPossible(f"{victim.name} hosts a node agent: nobody is there to slow it down")
            order = SlowChild(pid=victim.pid, factor=fault.factor, lasts_s=fault.heal_after_s)
            await self._order(victim.node_faults, order)
        return [str(victim) for victim in victims]

    async def _preempt(self, fault: fp.Preempt, rng: random.Random) -> list[str]:
        victims = await self._victims(fault.target, rng)
        for victim in victims:
            if fault.notice_s > 0:
                await self._give_notice(victim, fault.notice_s)
            self._end_after(victim, fault)
        return [str(victim) for victim in victims]

    async def _give_notice(self, victim: Victim, notice_s: float) -> None:
        """Those that can hand something over are told; to the others the signal is all they hear."""
        if victim.role == "node":
            self._cluster.nodes.drain(victim.name)
            task = asyncio.create_task(self._drain_node(victim.name), name=f"drain {victim.name}")
            self._healing.add(task)
            task.add_done_callback(self._healing.discard)
        elif victim.role == "rollout":
            worker = ActorAddress(victim.name, victim.own_faults.peer, victim.own_faults.endpoint)
            drain = Drain(job=self._run.job.name, deadline_s=notice_s, reason="preempted")
            self._cluster.system.ref(worker).tell(drain)

    async def _drain_node(self, node: str) -> None:
        await self._run.drain_node(node)

    def _end_after(self, victim: Victim, fault: fp.Preempt) -> None:
        async def end() -> None:
            await asyncio.sleep(fault.notice_s)
            try:
                await self._signal(victim, signal.SIGTERM)
                await asyncio.sleep(fault.grace_s)
                await self._signal(victim, signal.SIGKILL)
            except FaultNotPossible as error:
                log.info("a preempted process is gone", victim=str(victim), why=str(error))

        task = asyncio.create_task(end(), name=f"preempt {victim.name}")
        self._healing.add(task)
        task.add_done_callback(self._healing.discard)

    async def _clock(self, fault: fp.Clock, rng: random.Random) -> list[str]:
        victims = await self._victims(fault.target, rng)
        order = ClockOrder(jump_s=fault.jump_s, lasts_s=fault.heal_after_s)
        for victim in victims:
            await self._order(victim.own_faults, ApplyFault(order=order))
        return [str(victim) for victim in victims]

    # ------------------------------------------------------------ messages

    async def _messages(self, fault: fp.Partition | fp.LinkFault, rng: random.Random) -> list[str]:
        """Both ends are told: each misbehaves in what it sends, and a partition is one at both."""
        if fault.target.link is not None:
            one, other = self.roster().ends(fault.target.link)
        else:
            one = await self._victims(fault.target, rng)
            names = {victim.peer for victim in one}
            other = [victim for victim in self.roster().running if victim.peer not in names]
        if not one or not other:
            raise FaultNotPossible(f"nobody is there at one end of {fault.target}")
        told = [(victim, other) for victim in one] + [(victim, one) for victim in other]
        # Those who hear of it first must not cut off those who have not: the head, which tells them, comes last.
        for victim, others in sorted(told, key=lambda pair: pair[0].role == HEAD):
            await self._order(victim.own_faults, ApplyFault(order=_link_order(fault, others)))
        return [f"{victim} ⇄ {', '.join(v.name for v in other)}" for victim in one]

    # ------------------------------------------------------------ what lies somewhere

    async def _corrupt(self, fault: fp.Corrupt, rng: random.Random) -> list[str]:
        chunk = fault.target.chunk
        assert chunk is not None, "the schema lets corrupt hit chunks only"
        if chunk.where == "served":
            return await self._corrupt_served(fault, chunk, rng)
        spoilt = spoil_chunk(self._run.run_dir, chunk, rng)
        what = f"chunk {spoilt.index} of version {spoilt.version} in shared memory"
        if fault.heal_after_s is not None:
            self._heal_after(fault.heal_after_s, lambda: mend_chunk(spoilt), kind="corrupt", hit=what)
        return [what]

    async def _corrupt_served(self, fault: fp.Corrupt, chunk: fp.ChunkTarget, rng: random.Random) -> list[str]:
        if chunk.index is not None or chunk.version is not None:
            raise FaultNotPossible("a served copy is spoilt whichever chunk it is: leave version and index out")
        [server] = await self._victims(fp.Target(role="weights"), rng)
        order = LinkOrder(kind="corrupt", lane="bulk", lasts_s=fault.heal_after_s)
        await self._order(server.own_faults, ApplyFault(order=order))
        return [f"every chunk that {server} streams"]

    async def _disk_full(self, fault: fp.DiskFull, rng: random.Random) -> list[str]:
        machine, path = self._cluster.machine, self._run.run_dir / JOURNAL
        if not isinstance(machine, LocalMachine):
            raise FaultNotPossible(f"the journal of a {type(machine).__name__} is not ours to fill")
        machine.full_disks.add(path)
        if fault.heal_after_s is not None:
            full = machine.full_disks
            self._heal_after(fault.heal_after_s, lambda: full.discard(path), kind="disk_full", hit=JOURNAL)
        return [JOURNAL]


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
