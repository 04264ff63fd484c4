"""A node process: lends this machine to a head (``headrace node --join ADDR``).

start ─▶ NodeAgent ─▶ Membership ──JoinCluster──▶ head        head gone ─▶ ask its next life ─▶ rejoin_patience_s ─▶ end
head says goodbye ─▶ the same, and an end in good order
SIGTERM, Ctrl-C ─▶ LeaveCluster ─▶ [notice: workers go by themselves] ─▶ processes stopped in order ─▶ end
"""

from __future__ import annotations

import asyncio
import math
import os
import platform
import re
from pathlib import Path
from typing import Final

from actors.core.context import named_rng
from actors.core.errors import AskError
from actors.core.patience import Patience
from actors.core.reason import is_permanent
from actors.core.ref import ActorRef
from actors.core.registered import RegisteredActor
from actors.core.system import ActorSystem
from actors.core.watch import Down, Gone
from actors.protocol.who_may_send import guard_for
from configs.limits import DEFAULT_LIMITS, Limits
from configs.names import NODE_NAME_CHARACTERS_MAX, name_problem, node_name_problem
from supervisors.faults.node_faults import NAME as NODE_FAULTS
from supervisors.faults.node_faults import NodeFaults
from supervisors.faults.process_faults import faults_of
from supervisors.machine.machine import CLUSTER, LOCAL, Machine, slowed_by
from supervisors.machine.membership.nodes import JoinCluster, Joined, LeaveCluster
from supervisors.machine.node_agent import NodeAgent, NodeOptions
from supervisors.machine.runtime_directory import remove_runtime_directory
from supervisors.tree.errors import HeadLost
from transport.address import ActorAddress, PeerId
from transport.endpoints import check_dialed, is_loopback, split_key
from transport.errors import HandshakeRefused, InsecureBind, LinkTimeout
from transport.own_address import address_towards
from transport.zmq.handshake import NAME_IS_TAKEN
from transport.zmq.own_keys import directory_or_own
from transport.zmq.security import load_keys

HEAD_ENDED: Final = "the head has ended"
_SAID_GOODBYE: Final = (Gone.STOPPED, Gone.UNKNOWN_ACTOR)
"""A head whose process answers, but has no register, is ending: its actors end before its links do."""


class Membership(RegisteredActor):
    """Keeps this node in the head's register (its ``scheduler``). Crashes with HeadLost when the head stays away."""

    def __init__(
        self, node: str, head: ActorAddress, agent: ActorAddress, slots: int, kind: str, options: NodeOptions
    ) -> None:
        devices = options.machine.devices.ids
        self._offer = JoinCluster(node=node, agent=agent, slots=slots, kind=kind, devices=devices)
        self._options = options
        self._first = head
        self._leaving = False
        self._head_ended = False
        """True once the head has said goodbye, and has not been found again."""

    async def on_start(self) -> None:
        self.obey(self._first, self.ctx.limits.rejoin_patience_s)
        await self.register()

    async def introduce(self, scheduler: ActorRef) -> None:
        self._options.neighbours = (await scheduler.ask(self._offer, Joined)).neighbours

    async def register(self) -> None:
        try:
            await super().register()
        except AskError as error:
            if is_permanent(error):
                raise HeadLost(f"the head at {self._first.endpoint} refuses this node: {error}") from error
            if self._head_ended:
                self.ctx.stop(HEAD_ENDED)
                return
            raise HeadLost(f"the head at {self._first.endpoint} does not answer: {error}") from error
        self._head_ended = False

    def scheduler_lost(self, message: Down) -> None:
        self.ctx.log.warning("the head is gone", reason=str(message.reason))
        self._head_ended = message.reason in _SAID_GOODBYE
        if not self._leaving:
            self.register_again()

    async def leave(self, left_s: float) -> bool:
        """Tell the head that this node takes no more processes and is gone in ``left_s``; False: it did not answer."""
        self._leaving = True
        if not self.is_registered:
            return False
        order = LeaveCluster(node=self._offer.node, left_s=left_s)
        try:
            await self.ctx.ref(self.scheduler.address).ask(order, Joined, timeout_s=self.ctx.limits.close_timeout_s)
        except AskError:
            return False  # the head will see the link end
        return True


class NodeProcess:
    """Lends its machine to a head: ``start`` it, then ``wait`` until it is stopped or its head is lost."""

    def __init__(
        self,
        *,
        join: str,
        name: str | None,
        slots: int | None,
        keys: Path | None,
        kind: str = "reserved",
        notice_s: float = 0.0,
        limits: Limits = DEFAULT_LIMITS,
        machine: Machine = LOCAL,
    ) -> None:
        """``notice_s``: how long this machine is still there after it is told to go; 0: it goes at once."""
        self._machine = machine
        self._join = join
        self.name = name if name is not None else _own_name()
        if problem := node_name_problem(self.name):
            raise ValueError(f"--name {problem}")
        self._slots = slots or self._machine.slots
        self._keys_directory = directory_or_own(keys, join, "nodes")
        self._is_own = keys is None and split_key(join)[1] is None
        self._kind = kind
        self._notice_s = notice_s
        self._limits = limits
        self._membership: Membership | None = None
        self._runtime: Path | None = None
        """Directory of this machine's sockets; None where it has no Unix sockets."""
        self.system: ActorSystem | None = None

    async def start(self) -> None:
        """Connect, start the agent and join.

        Raises:
            LinkTimeout: nobody listens at the head's address.
            HandshakeRefused: the head speaks another protocol or does not know our key.
        """
        keys = load_keys(self._keys_directory) if self._keys_directory else None
        if keys is not None and self._is_own:  # the head is the same user's, and has the same key pair
            self._join = f"{split_key(self._join)[0]}?key={keys.public_hex}"
        keys = keys.of_head(split_key(self._join)[1]) if keys is not None else None
        transport = self._machine.transport(
            self.name,
            listen=self._listen(),
            cluster=CLUSTER,
            limits=self._limits,
            keys=keys,
            role="node",
        )
        self.system = system = ActorSystem(transport, limits=self._limits, guard=guard_for(transport.peer))
        await system.start()
        try:
            head = await self._connect(system)
        except LinkTimeout as error:
            raise LinkTimeout(
                f"--join {self._join}: nobody answers; is headrace head running there? ({error})"
            ) from error
        options = NodeOptions(keys=str(self._keys_directory or ""), machine=self._machine)
        self._agent = NodeAgent(self.name, options)
        agent = await system.spawn("agent", self._agent)
        await system.spawn(NODE_FAULTS, NodeFaults(faults_of(transport), slowed_by(self._machine)))
        there = ActorAddress("nodes", head, self._join)
        self._membership = Membership(self.name, there, agent.address, self._slots, self._kind, options)
        await system.spawn("membership", self._membership)

    def _listen(self) -> str:
        """Endpoint to listen at: private or on loopback for a head on this machine, else the interface towards it."""
        join = self._join
        if join.startswith("memory://"):
            return f"memory://{self.name}"
        if join.startswith("ipc://"):
            self._runtime = self._machine.runtime_directory()
            return f"ipc://{self._runtime}/node"
        return f"tcp://{'127.0.0.1' if _is_here(join) else address_towards(_host_of(join))}:*"

    async def _connect(self, system: ActorSystem) -> PeerId:
        """Try again while the head has not yet noticed the end of a former life of this node, which had its name."""
        patience = Patience(self._limits, named_rng(0, self.name, "patience"), 2 * self._limits.heartbeat_timeout_s)
        while True:
            try:
                return await system.connect(self._join)
            except HandshakeRefused as error:
                if NAME_IS_TAKEN not in str(error) or not await patience.again():
                    raise

    async def wait(self, stopped: asyncio.Event) -> bool:
        """Wait until ``stopped`` is set; False: the head has ended in good order, and no other took its place.

        Raises:
            HeadLost: the head has not answered for ``limits.rejoin_patience_s``.
        """
        assert self.system is not None, "started"
        stop = asyncio.create_task(stopped.wait(), name="stop requested")
        lost = asyncio.create_task(self.system.wait_stopped("membership"), name="membership ended")
        for task in (stop, lost):
            task.add_done_callback(lambda _: stopped.set())
        try:
            await stop
            if lost.done() and (error := lost.result().error) is not None:
                raise HeadLost(str(error))
            return not lost.done()
        finally:
            stop.cancel()
            lost.cancel()

    async def stop(self) -> None:
        """Leave the cluster, let processes end by themselves while there is time, and stop the rest. Idempotent."""
        if self.system is None:
            return
        if self._membership is not None and "membership" in self.system.actors():
            known = await self._membership.leave(self._notice_s)
            if known and self._notice_s > 0:
                await self._agent.wait_empty(self._notice_s - self._limits.end_news_s)  # its workers hand back and end
        await self.system.stop()
        if self._runtime is not None:
            remove_runtime_directory(self._runtime)


def _own_name() -> str:
    """The host's name, as far as its characters are allowed, and the process id."""
    number = f"-{os.getpid()}"
    host = re.sub(r"[^A-Za-z0-9_-]", "-", platform.node().split(".")[0]).strip("-_") or "node"
    return host[: NODE_NAME_CHARACTERS_MAX - len(number)] + number


def check_node(name: str | None, kind: str, site: str, notice_s: float) -> None:
    """Refuse what a head would refuse, and a notice without an end.

    Raises:
        ValueError: naming option, value and what was expected.
    """
    problems = [("--name", node_name_problem(name) if name is not None else ""), ("--kind", name_problem(kind))]
    problems.append(("--site", name_problem(site) if site else ""))
    for option, problem in problems:
        if problem:
            raise ValueError(f"{option} {problem}")
    if not (math.isfinite(notice_s) and notice_s >= 0):
        raise ValueError(f"--notice is {notice_s}, expected seconds from 0, such as 120")


def check_join(join: str, keys: Path | None) -> None:
    """Refuse what joining would refuse later.

    Raises:
        ValueError: ``join`` is no address.
        HandshakeRefused: the key in it is malformed.
        KeyFileError: the key directory cannot be used.
        InsecureBind: the head is on another machine, and there are no keys.
    """
    check_dialed(join)
    if keys is not None:
        load_keys(keys)
    elif not _is_here(join):
        raise InsecureBind(
            f"{join}: a head on another machine is joined with keys only; make them with headrace keys DIRECTORY, "
            "let the head allow the public one, and add --keys DIRECTORY"
        )


def _is_here(join: str) -> bool:
    return not join.startswith("tcp://") or is_loopback(_host_of(join))


def _host_of(join: str) -> str:
    return join.partition("?")[0].removeprefix("tcp://").rpartition(":")[0]
