"""What a nemesis works with: who runs now, orders to those who can commit a fault, its record, and what heals later.

A Hand belongs to one run. Its acts are in ``fault_acts.py``; when they strike, ``nemesis.py`` and a plan decide.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar

import structlog

from actors.core.errors import AskError, RemoteError
from actors.core.message import Message
from actors.protocol.metrics import Event, Flush, Flushed
from configs.fault_plan import Target
from supervisors.faults.fault_messages import FaultApplied, SignalChild, SignalNode
from supervisors.machine.machine import Machine
from supervisors.nemesis.fault_targets import HEAD, Roster, Victim, beside
from supervisors.tree.errors import FaultNotPossible
from transport.address import ActorAddress

if TYPE_CHECKING:
    from actors.core.system import ActorSystem
    from supervisors.jobs.job_run import JobRun
    from supervisors.machine.nodes import Nodes

T = TypeVar("T")
log = structlog.get_logger("headrace.nemesis")

_POLL_S: Final = 0.05


class Cluster(Protocol):
    """What the nemesis needs of the head."""

    @property
    def system(self) -> ActorSystem: ...
    @property
    def nodes(self) -> Nodes: ...
    @property
    def machine(self) -> Machine: ...


class Hand:
    """See the module's docstring."""

    def __init__(self, cluster: Cluster, run: JobRun) -> None:
        self.cluster = cluster
        self.run = run
        self._limits = run.job.limits
        self._later: set[asyncio.Task[None]] = set()

    def record(self, name: str, **fields: float | str) -> None:
        """Into events.jsonl and the log."""
        log.warning(name, **fields)
        metrics = self.cluster.system.ref(self.run.address("metrics"))
        metrics.tell(Event(job=self.run.job.name, name=name, fields=dict(fields)))

    async def flush(self) -> None:
        """Wait until what has been recorded is in the file."""
        try:
            await self.cluster.system.ref(self.run.address("metrics")).ask(
                Flush(job=self.run.job.name), Flushed, timeout_s=self._limits.fault_order_timeout_s
            )
        except AskError as error:
            log.warning("the record of a fault may be missing", why=str(error))

    def later(self, work: Coroutine[Any, Any, None], name: str) -> None:
        """Go on beside the run, and end with it at the latest."""
        task = asyncio.create_task(work, name=name)
        self._later.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._later.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("what was to follow a fault failed", task=task.get_name(), error=repr(error))

    def heal_after(self, after_s: float, heal: Callable[[], str], **fields: float | str) -> None:
        """Call ``heal`` after a while, and record what it says of how that went."""

        async def wait() -> None:
            await asyncio.sleep(after_s)
            self.record("fault_healed", **fields, how=heal())

        self.later(wait(), f"heal {fields}")

    def stop(self) -> None:
        """The run is over: nothing comes later any more."""
        for task in self._later:
            task.cancel()

    def roster(self) -> Roster:
        """Everybody who runs now."""
        head = self.cluster.system.address(HEAD)
        agents = {node.name: node.agent for node in self.cluster.nodes.present}
        local = beside(head)
        running = [Victim(HEAD, HEAD, HEAD, os.getpid(), head.peer.name, local, local)]
        for node in self.cluster.nodes.present:
            if not node.local:
                there = beside(node.agent)
                running.append(Victim(node.name, "node", node.name, 0, node.agent.peer.name, there, there))
        known: set[str] = set()
        for supervisor in self.run.tree.supervisors.values():
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

    async def victims(self, target: Target, rng: random.Random) -> list[Victim]:
        """Those that the target names, as soon as one of them runs: it may be in the middle of a restart."""
        return await self.as_soon_as(lambda: self.roster().victims(target, rng), target)

    async def ends(self, target: Target) -> tuple[list[Victim], list[Victim]]:
        """Those at both ends of a link, as soon as somebody runs at each."""
        link = target.link
        assert link is not None, "asked for links only"

        def look() -> tuple[list[Victim], list[Victim]] | None:
            one, other = self.roster().ends(link)
            return (one, other) if one and other else None

        return await self.as_soon_as(look, target)

    async def as_soon_as(self, look: Callable[[], T | None], target: Target) -> T:
        """What ``look`` returns, as soon as that is something; ``target`` is for the message.

        Raises:
            FaultNotPossible: not within ``limits.fault_target_wait_s``.
        """
        wait_s = self._limits.fault_target_wait_s
        try:
            async with asyncio.timeout(wait_s):
                while not (found := look()):  # noqa: ASYNC110 - nobody tells of a start
                    await asyncio.sleep(_POLL_S)
        except TimeoutError as error:
            raise FaultNotPossible(f"nothing that {target} names has been running for {wait_s:g} s") from error
        return found

    async def order(self, to: ActorAddress, message: Message) -> None:
        try:
            await self.cluster.system.ref(to).ask(message, FaultApplied, self._limits.fault_order_timeout_s)
        except RemoteError as error:
            raise FaultNotPossible(error.detail or str(error)) from error
        except AskError as error:
            raise FaultNotPossible(f"{to.name} of {to.peer.name} does not answer: {error}") from error

    async def signal(self, victim: Victim, number: signal.Signals, continue_after_s: float | None = None) -> None:
        if victim.is_node:
            await self.order(victim.node_faults, SignalNode(signal=number, continue_after_s=continue_after_s))
        else:
            await self.order(victim.node_faults, SignalChild(pid=victim.pid, signal=number))
