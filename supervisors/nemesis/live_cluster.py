"""The real processes of a run, and what a fault may do to them: who runs now, and orders to those who can inject it.

    fault ─▶ roster of what runs now ─▶ victims ─▶ ┬ signals          NodeFaults beside the victim's node agent
                                                   ├ links, clock     the victim itself, and who is at the other end
                                                   ├ weight chunks    the segment in shared memory, or its streams
                                                   └ the journal      this process

A fault waits until its victim runs, which may be in the middle of a restart.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar

from actors.core.errors import AskError, RemoteError
from actors.core.message import Message
from actors.protocol.metrics import Event, Flush, Flushed
from actors.protocol.work import Drain
from actors.weights.segments import read_manifests
from configs import fault_plan as fp
from configs.run_files import JOURNAL
from supervisors.faults.chunk_faults import mend_all, mend_chunk, spoil_chunk
from supervisors.faults.fault_messages import (
    ApplyFault,
    ClockOrder,
    FaultApplied,
    LinkOrder,
    MemoryOrder,
    SignalChild,
    SignalNode,
    SlowChild,
)
from supervisors.machine.machine import LocalMachine, Machine
from supervisors.nemesis.fault_acts import Heal, Hit, log
from supervisors.nemesis.fault_targets import HEAD, Roster, Victim, beside
from supervisors.tree.errors import FaultNotPossible
from transport.address import ActorAddress

if TYPE_CHECKING:
    from actors.core.system import ActorSystem
    from supervisors.jobs.job_run import JobRun
    from supervisors.machine.membership.nodes import Nodes

T = TypeVar("T")

_POLL_S: Final = 0.05


class Serving(Protocol):
    """The part of a head that is needed here."""

    @property
    def system(self) -> ActorSystem: ...
    @property
    def nodes(self) -> Nodes: ...
    @property
    def machine(self) -> Machine: ...
    @property
    def jobs(self) -> Mapping[str, JobRun]: ...


class LiveCluster:
    """The processes of one run, as a ``fault_acts.Cluster``."""

    def __init__(self, head: Serving, run: JobRun) -> None:
        self._head = head
        self._run = run
        self._limits = run.job.limits
        self._later: set[asyncio.Task[None]] = set()
        mend_all(run.run_dir)  # a head that was killed may have left spoilt chunks

    @property
    def job(self) -> str:
        return self._run.job.name

    def record(self, name: str, **fields: float | str) -> None:
        """Write an event into events.jsonl and the log."""
        log.warning(name, **fields)
        metrics = self._head.system.ref(self._run.address("metrics"))
        metrics.tell(Event(job=self.job, name=name, fields=dict(fields)))

    async def flush(self) -> None:
        """Wait until what has been recorded is in the file."""
        try:
            await self._head.system.ref(self._run.address("metrics")).ask(
                Flush(job=self.job), Flushed, timeout_s=self._limits.fault_order_timeout_s
            )
        except AskError as error:
            log.warning("the record of a fault may be missing", why=str(error))

    def later(self, work: Coroutine[Any, Any, None], name: str) -> None:
        """Do ``work`` in the background; it is cancelled when the run ends."""
        task = asyncio.create_task(work, name=name)
        self._later.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._later.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("background work of a fault failed", task=task.get_name(), error=repr(error))

    def stop(self) -> None:
        """The run is over: cancel the work in the background, and let the journal's disk have room again."""
        for task in self._later:
            task.cancel()
        if isinstance(self._head.machine, LocalMachine):
            self._head.machine.full_disks.discard(self._run.run_dir / JOURNAL)

    # ------------------------------------------------------------ who is hit

    def roster(self) -> Roster:
        """Every process that runs now."""
        head = self._head.system.address(HEAD)
        agents = {node.name: node.agent for node in self._head.nodes.present}
        local = beside(head)
        running = [Victim(HEAD, HEAD, HEAD, os.getpid(), head.peer.name, local, local)]
        for node in self._head.nodes.present:
            if not node.local:
                there = beside(node.agent)
                running.append(Victim(node.name, "node", node.name, 0, node.agent.peer.name, there, there))
        known: set[str] = set()
        for supervisor in self._run.tree.supervisors.values():
            for info in supervisor.snapshot():
                child = supervisor.running(info.name)
                if child is not None and child.agent is None:
                    continue  # an actor of the head's own process
                known.add(info.name)
                if child is not None and child.node in agents:
                    own = ActorAddress("reporter", child.address.peer, child.address.endpoint)
                    node_faults = beside(agents[child.node])
                    running.append(
                        Victim(info.name, info.role, child.node, child.pid, child.address.peer.name, node_faults, own)
                    )
        return Roster(running, frozenset(known))

    async def victims(self, target: fp.Target, rng: random.Random) -> list[Victim]:
        """Those that the target names, as soon as one of them runs: it may be in the middle of a restart."""
        return await self.as_soon_as(lambda: self.roster().victims(target, rng), target)

    async def ends(self, target: fp.Target) -> tuple[list[Victim], list[Victim]]:
        """Those at both ends of a link, as soon as somebody runs at each."""
        link = target.link
        assert link is not None, "asked for links only"

        def look() -> tuple[list[Victim], list[Victim]] | None:
            one, other = self.roster().ends(link)
            return (one, other) if one and other else None

        return await self.as_soon_as(look, target)

    async def as_soon_as(self, look: Callable[[], T | None], target: fp.Target) -> T:
        """Call ``look`` until it returns something, and return that; ``target`` is for the error message.

        Raises:
            FaultNotPossible: it returned nothing within ``limits.fault_target_wait_s``.
        """
        wait_s = self._limits.fault_target_wait_s
        try:
            async with asyncio.timeout(wait_s):
                while not (found := look()):  # noqa: ASYNC110 - no message announces a start
                    await asyncio.sleep(_POLL_S)
        except TimeoutError as error:
            raise FaultNotPossible(f"nothing that {target} names has been running for {wait_s:g} s") from error
        return found

    # ------------------------------------------------------------ what is done to them

    async def order(self, to: ActorAddress, message: Message) -> None:
        """Send ``message`` to the actor that is to inject the fault, and wait until it has.

        Raises:
            FaultNotPossible: it refuses, or does not answer.
        """
        try:
            await self._head.system.ref(to).ask(message, FaultApplied, self._limits.fault_order_timeout_s)
        except RemoteError as error:
            raise FaultNotPossible(error.detail or str(error)) from error
        except AskError as error:
            raise FaultNotPossible(f"{to.name} of {to.peer.name} does not answer: {error}") from error

    async def send_signal(self, victim: Victim, number: signal.Signals, continue_after_s: float | None = None) -> None:
        """Send a signal. ``continue_after_s``: a node that stops itself arranges beforehand to be continued."""
        if victim.is_node:
            await self.order(victim.node_faults, SignalNode(signal=number, continue_after_s=continue_after_s))
        else:
            await self.order(victim.node_faults, SignalChild(pid=victim.pid, signal=number))

    async def crash(self, victim: Victim, rng: random.Random) -> None:
        await self.send_signal(victim, signal.SIGKILL)

    async def halt(self, victim: Victim, lasts_s: float | None) -> Heal | None:
        await self.send_signal(victim, signal.SIGSTOP, lasts_s)

        async def go_on() -> str:
            try:
                await self.send_signal(victim, signal.SIGCONT)
            except FaultNotPossible:
                return "its owner had ended it by then"
            return "continued"

        return None if victim.is_node else go_on

    async def slow(self, victim: Victim, factor: float, lasts_s: float | None) -> None:
        if victim.is_node:
            raise FaultNotPossible(f"{victim.name} hosts a node agent: nobody is there to slow it down")
        await self.order(victim.node_faults, SlowChild(pid=victim.pid, factor=factor, lasts_s=lasts_s))

    async def shift_clock(self, victim: Victim, jump_s: float, lasts_s: float | None) -> None:
        await self.order(victim.own_faults, ApplyFault(order=ClockOrder(jump_s=jump_s, lasts_s=lasts_s)))

    async def exhaust_memory(self, victim: Victim) -> None:
        await self.order(victim.own_faults, ApplyFault(order=MemoryOrder()))

    async def give_notice(self, victim: Victim, notice_s: float) -> None:
        if victim.role == "node":
            self._head.nodes.drain(victim.name)
            self.later(self._drain_node(victim.name), f"drain {victim.name}")
        elif victim.role == "rollout":
            worker = ActorAddress(victim.name, victim.own_faults.peer, victim.own_faults.endpoint)
            self._head.system.ref(worker).tell(
                Drain(job=self.job, deadline_s=notice_s, reason="preempted", notice=True)
            )

    async def _drain_node(self, node: str) -> None:
        running = [run for run in list(self._head.jobs.values()) if not run.state.over]
        moved = sum([await run.tree.pool.drain_node(node) for run in running])
        log.info("a node is drained before it is preempted", node=node, workers=moved)

    async def disturb(self, fault: fp.Partition | fp.LinkFault, rng: random.Random) -> Hit:
        """Tell both ends of a link, since each can only spoil what it sends itself.

        An end that an earlier fault has stopped hears nothing, and sends nothing either: the other ends suffice.
        """
        if fault.target.link is not None:
            one, other = await self.ends(fault.target)
        else:
            one = await self.victims(fault.target, rng)
            names = {victim.peer for victim in one}
            other = [victim for victim in self.roster().running if victim.peer not in names]
        told = [(victim, other) for victim in one] + [(victim, one) for victim in other]
        # Those who hear of it first must not cut off those who have not: the head, which tells them, comes last.
        unreached: list[FaultNotPossible] = []
        for victim, others in sorted(told, key=lambda pair: pair[0].role == HEAD):
            try:
                await self.order(victim.own_faults, ApplyFault(order=_link_order(fault, others)))
            except FaultNotPossible as error:
                unreached.append(error)
                log.warning("one end of a link did not take its fault", end=str(victim), why=str(error))
        if len(unreached) == len(told):
            raise unreached[0]
        return Hit([f"{victim} ⇄ {', '.join(v.name for v in other)}" for victim in one])

    async def spoil_chunk(self, fault: fp.Corrupt, rng: random.Random) -> Hit:
        chunk = fault.target.chunk
        assert chunk is not None, "the schema lets corrupt hit chunks only"
        if chunk.where == "served":
            if chunk.index is not None or chunk.version is not None:
                raise FaultNotPossible("a served copy is spoilt whichever chunk it is: leave version and index out")
            [server] = await self.victims(fp.Target(role="weights"), rng)
            order = LinkOrder(kind="corrupt", lane="bulk", lasts_s=fault.heal_after_s)
            await self.order(server.own_faults, ApplyFault(order=order))
            return Hit([f"every chunk that {server} streams"])
        if chunk.version is None:  # in the first moments of a run none is published yet
            await self.as_soon_as(lambda: read_manifests(self._run.run_dir), fault.target)
        spoilt = spoil_chunk(self._run.run_dir, chunk, rng)

        async def mend() -> str:
            return mend_chunk(spoilt)

        return Hit([f"chunk {spoilt.index} of version {spoilt.version} in shared memory"], [mend])

    async def fill_disk(self, fault: fp.DiskFull, rng: random.Random) -> Hit:
        machine, path = self._head.machine, self._run.run_dir / JOURNAL
        if fault.target.role != "scheduler":
            raise FaultNotPossible("the tiers of a training service are filled in simulations only")
        if not isinstance(machine, LocalMachine):
            raise FaultNotPossible(f"the journal of a {type(machine).__name__} cannot be filled")
        machine.full_disks.add(path)

        async def empty() -> str:
            machine.full_disks.discard(path)
            return "the disk has room again"

        return Hit([JOURNAL], [empty])


def _link_order(fault: fp.Partition | fp.LinkFault, others: Sequence[Victim]) -> LinkOrder:
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
