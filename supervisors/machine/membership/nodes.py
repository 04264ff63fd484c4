"""Which machines there are: node agents join, are watched, and are chosen for new processes.

    node process ──JoinCluster──▶ Nodes ──watch──▶ gone ─▶ not chosen; its workers are placed elsewhere
                                                   └ cut off, and back in the same life ─▶ as full as it was
    supervisor   ──choose────────▶ the live node of the wanted kind with the least of its slots in use,
                                   and there the devices that the fewest have (``device_places``)

The head's own node agent is a node like the others, marked local. The processes of a rank group are on one node, and
take one slot of it together; replicas of a trainer that are on other machines have nodes of their own, kept for them
(``replica_places``).

A broken link says nothing of a machine: supervisors may keep what runs there (``node_loss``), and if it was drained, it
stays so. The node's record is therefore kept aside until it is back, or comes in a new life.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Collection, Mapping, Sequence

from actors.core.actor import Actor, handles
from actors.core.message import Message, message
from actors.core.watch import Down, Gone
from configs.limits import Limits
from configs.names import leader_of, name_problem, node_name_problem
from supervisors.machine.devices import is_device_id
from supervisors.machine.membership.device_places import DevicePlaces
from supervisors.machine.membership.joined_node import Node
from supervisors.machine.membership.replica_places import ReplicaPlaces
from supervisors.tree.errors import NodeRefused, NoNode, NotYourNode
from transport.address import ActorAddress

Neighbours = tuple[tuple[str, str], ...]
"""(Name, key) of each node that a head lets in: the name of its key, and the key as endpoints carry it."""


@message("nodes.join")
class JoinCluster(Message):
    """Ask: a machine offers itself. Answered with Joined. Joining again is harmless."""

    node: str
    agent: ActorAddress
    slots: int
    """Number of rollout workers that it takes at most."""
    kind: str = "reserved"
    """Kind by which it is priced: a key of ``cluster.prices``."""
    devices: tuple[str, ...] = ()
    """Devices of the machine, as ``CUDA_VISIBLE_DEVICES`` calls them; empty: none are known."""


@message("nodes.joined")
class Joined(Message):
    head: str
    neighbours: Neighbours = ()


@message("nodes.leave")
class LeaveCluster(Message):
    """Ask: the machine takes no further process. Answered with Joined."""

    node: str
    left_s: float = 0.0
    """Time for which its processes may go on; then the machine is gone."""


class Nodes(Actor):
    """Keeps the register of nodes. ``choose`` is called by code of the same process."""

    def __init__(self, head: str, neighbours: Neighbours = ()) -> None:
        self._head = head
        self._neighbours = neighbours
        self._nodes: dict[str, Node] = {}
        self._cut_off: dict[str, Node] = {}
        self._reserved: dict[str, str] = {}
        """Beginning of machines' names → the job that has these machines for itself."""
        self.replicas = ReplicaPlaces(self._nodes, self._cut_off)
        """Places of trainers' ranks on other machines."""
        self._changed = asyncio.Event()
        self._listeners: list[Callable[[], None]] = []

    def subscribe(self, listener: Callable[[], None]) -> Callable[[], None]:
        """Call ``listener`` whenever a node comes, goes, or begins to drain; returns what ends that."""
        self._listeners.append(listener)
        return lambda: self._listeners.remove(listener)

    def add_local(self, name: str, agent: ActorAddress, slots: int, devices: Sequence[str] = ()) -> None:
        """Add the head's own machine."""
        self._nodes[name] = Node(name, agent, slots, local=True, devices=DevicePlaces(devices))

    @property
    def present(self) -> list[Node]:
        return list(self._nodes.values())

    def reserve(self, prefix: str, job: str) -> None:
        """Reserve machines whose names begin with ``prefix`` for this job, also those that are here already."""
        self._reserved[prefix] = job
        for node in (*self._nodes.values(), *self._cut_off.values()):
            node.owner = self.owner_of(node.name)

    def owner_of(self, name: str) -> str:
        """The only job that may use the machine of that name; empty: any may."""
        prefixes = [prefix for prefix in self._reserved if name.startswith(prefix)]
        return self._reserved[max(prefixes, key=len)] if prefixes else ""

    def usable_by(self, job: str) -> list[Node]:
        """The nodes that are here, without those of other jobs' providers."""
        return [node for node in self._nodes.values() if node.owner in ("", job)]

    @property
    def devices_here(self) -> int:
        """Number of devices of the head's own machine."""
        return sum(len(node.devices.ids) for node in self._nodes.values() if node.local)

    def devices_in_words(self) -> str:
        """Who has which device, for people; empty where there are none."""
        with_devices = [node for node in self._nodes.values() if node.devices.ids]
        return "; ".join(f"devices of {node.name}: {node.devices}" for node in with_devices)

    @handles(JoinCluster)
    async def join(self, message: JoinCluster) -> Joined:
        check_offer(message, self.ctx.limits)
        self._check_own(message.node, message.agent)
        known = self._nodes.get(message.node)
        if known is None or known.agent != message.agent:
            self.ctx.log.info("node joined", node=message.node, slots=message.slots, kind=message.kind,
                              devices=message.devices)  # fmt: skip
            self._nodes[message.node] = self._returned(message) or Node(
                message.node, message.agent, message.slots, local=False, kind=message.kind,
                owner=self.owner_of(message.node), devices=DevicePlaces(message.devices),
            )  # fmt: skip
            self.ctx.watch(message.agent)
        self._signal()
        return Joined(head=self._head, neighbours=self._neighbours)

    def _check_own(self, node: str, agent: ActorAddress | None = None) -> None:
        """Check that a machine speaks for itself only.

        Raises:
            NotYourNode: the sender is on another machine.
        """
        sender = self.ctx.sender
        if sender is None or sender.peer.name != node or (agent is not None and agent.peer != sender.peer):
            raise NotYourNode(f"{sender} speaks for the node {node!r}: a node joins and leaves under its own name")

    def _returned(self, message: JoinCluster) -> Node | None:
        """The machine as it was before it was cut off, if this is the same life of it."""
        node = self._cut_off.pop(message.node, None)
        return node if node is not None and node.agent == message.agent else None

    @handles(LeaveCluster)
    async def leave(self, message: LeaveCluster) -> Joined:
        self._check_own(message.node)
        if not (math.isfinite(message.left_s) and message.left_s >= 0):
            raise NodeRefused(f"left_s is {message.left_s}, expected seconds from 0")
        if self.drain(message.node, message.left_s):
            self._node(message.node).leaving = True
        return Joined(head=self._head)

    def drain(self, name: str, left_s: float = 0.0) -> bool:
        """Place nothing more on ``name``, which is gone in ``left_s``; False if there is no such node.

        A node that is cut off just now is drained too, and still is when it is back.
        """
        if not self.knows(name):
            return False
        node = self._node(name)
        node.draining, node.leaves_s = True, self.ctx.now() + left_s
        self._signal()
        return True

    def undrain(self, name: str) -> bool:
        """Place processes on ``name`` again; False if the machine itself has said that it leaves.

        Raises:
            KeyError: there is no such node.
        """
        node = self._node(name)
        if node.leaving:
            return False
        node.draining = False
        self._signal()
        return True

    def knows(self, name: str) -> bool:
        """Whether a node of that name is here, or was until it was cut off."""
        return name in self._nodes or name in self._cut_off

    def _node(self, name: str) -> Node:
        return self._nodes.get(name) or self._cut_off[name]

    @handles(Down)
    async def down(self, message: Down) -> None:
        for name, node in list(self._nodes.items()):
            if node.agent == message.address:
                self.ctx.log.warning("node lost", node=name, reason=str(message.reason))
                del self._nodes[name]
                if message.reason is Gone.UNREACHABLE:
                    self._keep_aside(node)
        self._signal()

    def _keep_aside(self, node: Node) -> None:
        self._cut_off[node.name] = node
        if len(self._cut_off) > self.ctx.limits.cut_off_nodes:
            del self._cut_off[next(iter(self._cut_off))]

    async def wait_for_remote(self, count: int, timeout_s: float, job: str) -> None:
        """Wait until ``count`` remote nodes are there that ``job`` may use.

        Raises:
            NoNode: fewer came in time.
        """
        try:
            async with asyncio.timeout(timeout_s):
                while self._remote_count(job) < count:
                    await self._next_change()
        except TimeoutError as error:
            raise NoNode(
                f"{self._remote_count(job)} of {count} nodes (cluster.nodes) joined within {timeout_s:g} s; "
                "start them with headrace node --join ADDR"
            ) from error

    def _remote_count(self, job: str) -> int:
        return sum(not node.local for node in self.usable_by(job))

    async def choose(
        self, process: str, kind: str, timeout_s: float, *, devices: int = 0, group: Collection[str] = ()
    ) -> Node:
        """The node on which ``process`` is to start: ``kind`` is local, remote, spread, or ``node:`` and a name.

        A remote node takes no more processes than it has slots; waits until one joins or has room. The head's own
        machine has no such bound: the job file says how many workers it wants there.

        ``replica`` is the node that is kept for a rank (``replicas``): its whole trainer waits for all such nodes.

        Args:
            devices: number of devices that it is given, on a node that has any.
            group: the processes of its rank group, as far as they are on one machine: they go where one of them is, and
                share no device.

        Raises:
            NoNode: none of that kind had room in time.
        """
        self.release(process)
        others = {*group} - {process}
        count = devices * (len(others) + 1)
        if kind.startswith("node:"):
            timeout_s = 0.0  # if it is not there, waiting is no use: it never comes back under its name
        try:
            async with asyncio.timeout(timeout_s):
                while (node := self._best(process, kind, count, others)) is None:
                    await self._next_change()
        except TimeoutError as error:
            raise self._no_node(process, kind, timeout_s, count) from error
        node.put(process, others, lent=kind.startswith("node:"))
        node.devices.take(process, devices, others | self.replicas.beside(process))
        return node

    def _no_node(self, process: str, kind: str, timeout_s: float, devices: int) -> NoNode:
        """The error that says why there is no node: its devices are too few, or none of that kind is there."""
        if wanted := self.replicas.wanted(leader_of(process)):
            return NoNode(f"{process} waits for {wanted} ({timeout_s:g} s have passed: cluster.wait_s)")
        small = [n for n in self._nodes.values() if _is_of(n, kind) and not n.draining and not n.devices.fits(devices)]
        if small:
            has = ", ".join(f"{n.name} has {len(n.devices.ids)}" for n in small)
            return NoNode(f"{process} and the other ranks of its group want {devices} devices of one node, but {has}")
        return NoNode(f"no {kind} node for {process} within {timeout_s:g} s; start one with headrace node --join ADDR")

    def _best(self, process: str, kind: str, devices: int, others: Collection[str]) -> Node | None:
        """The node that suits best now. ``devices``: for ``process`` and ``others``, the rest of its group."""
        if not self.replicas.are_settled(process):
            return None
        if kind == "replica":
            return self.replicas.place_of(process)
        admitting = [node for node in self._nodes.values() if node.admits(process) and not node.draining]
        there = [node for node in admitting if _is_of(node, kind) and node.devices.fits(devices)]
        for node in there:
            if any(other in node.placed for other in others):
                return node
        if kind.startswith("node:"):
            return there[0] if there else None
        fitting = [n for n in there if n.local or n.takes_one_more(max(devices, 1))]
        remote = [n for n in fitting if not n.local]
        if kind == "spread" and remote:
            fitting = remote  # the head's machine trains; it generates only when nobody else can
        return min(fitting, key=lambda n: (n.slots_used / max(n.slots, 1), n.name), default=None)

    def place(
        self,
        process: str,
        name: str,
        devices: Collection[str] = (),
        group: Collection[str] = (),
        *,
        lent: bool = False,
    ) -> None:
        """Note that ``process`` runs already on the node of that name, with these devices. ``lent``: ``Node.lent``."""
        self.release(process)
        if (node := self._nodes.get(name)) is not None:
            self.replicas.enter(process, node)
            node.put(process, group, lent=lent)
            node.devices.enter(process, devices)

    def heard(self, name: str, running: Mapping[str, Collection[str]]) -> None:
        """Note what the agent of that node says of its processes and their devices, also of those not adopted yet.

        Otherwise a head's next life would give away their devices as free before it adopts them.
        """
        if (node := self._nodes.get(name)) is None:
            return
        users = {process for users in node.devices.users.values() for process in users}
        for process in users - node.placed.keys() - running.keys():
            node.devices.release(process)
        for process, devices in running.items():
            if process not in node.placed:
                node.devices.enter(process, devices)

    def devices_of(self, process: str) -> tuple[str, ...] | None:
        """Devices that ``process`` was given where it was placed; None: its node has none to give."""
        node = next((node for node in self._nodes.values() if process in node.placed), None)
        return node.devices.of(process) if node is not None and node.devices.ids else None

    def release(self, process: str) -> None:
        """Free the place of ``process``."""
        for node in (*self._nodes.values(), *self._cut_off.values()):
            node.let_go(process)
        self.replicas.released(process)
        self._signal()

    def expect(self, trainer: str, replicas: Sequence[Collection[str]], devices: int) -> None:
        """Keep a node for each of ``replicas``, the further ones of the process ``trainer``; none: keep no more."""
        self.replicas.expect(trainer, replicas, devices)
        self._signal()

    async def _next_change(self) -> None:
        self._changed.clear()
        await self._changed.wait()

    def _signal(self) -> None:
        self.replicas.settle()
        self._changed.set()
        for listener in list(self._listeners):
            listener()


def _is_of(node: Node, kind: str) -> bool:
    """Whether ``node`` is one that ``kind`` means (``Nodes.choose``)."""
    if kind.startswith("node:"):
        return node.name == kind.removeprefix("node:")
    return kind == "spread" or node.local == (kind == "local")


def check_offer(offer: JoinCluster, limits: Limits) -> None:
    """Raises:
    NodeRefused: the offer has a malformed name, kind or device, or too many slots or devices.
    """
    if problem := node_name_problem(offer.node):
        raise NodeRefused(f"the node's name {problem}")
    if problem := name_problem(offer.kind):
        raise NodeRefused(f"the node's kind {problem}")
    if not 1 <= offer.slots <= limits.node_slots_max:
        raise NodeRefused(f"the node's slots are {offer.slots}, expected 1 to {limits.node_slots_max}")
    if len(offer.devices) > limits.node_devices_max:
        raise NodeRefused(
            f"the node has {len(offer.devices)} devices, expected at most {limits.node_devices_max} (node_devices_max)"
        )
    for device in offer.devices:
        if not is_device_id(device):
            raise NodeRefused(f"the node's device {device[:80]!r} is none, expected a number or an id such as GPU-…")
