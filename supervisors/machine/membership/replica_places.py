"""Where trainers' ranks on other machines are: a node is kept for each part of a trainer but the first.

A part is what is on one machine: a copy of the weights (``cluster.place_replicas: remote``), or as many ranks as
``trainer.nodes`` leaves for each, of one copy or several. This page calls it a replica.

    expect ─▶ settle ─▶ kept on the node with most room ─▶ its ranks start there, once all of the trainer's have one
    its node drains  ─▶ settle ─▶ another one, if any has room: the ranks are astray, and their group starts anew there
    its node is lost ─▶ its ranks are released ─▶ settle: the next one with room

Invariants
- The ranks of a replica are on one node. Each takes a slot there, and devices that no other rank of its trainer has.
- A slot that is kept is no rollout worker's, whether its rank runs or not. Workers that come and go with their node
  (``Node.lent``) give theirs up for it.
- A replica stays where it is while its node is there and not draining, and has room for it unless it runs: a head's
  next life adopts workers whose slots were not known to be taken. A node that is cut off, and may be back the next
  moment, is kept until the ranks are released.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from configs.names import leader_of, ranks_in_words
from supervisors.machine.membership.joined_node import Node

Replica = frozenset[str]
"""Names of the processes of a replica's ranks."""


@dataclass(frozen=True, slots=True)
class Expected:
    """What one trainer expects of other machines: its replicas but the first, and how many devices each rank wants."""

    replicas: tuple[Replica, ...]
    devices: int

    @property
    def processes(self) -> frozenset[str]:
        return frozenset[str]().union(*self.replicas)


_NOTHING = Expected((), 0)


class ReplicaPlaces:
    """Updates ``Node.kept`` of the nodes that are there, ``nodes``, and of those that are cut off, ``away``.

    A trainer is named by its process. Processes of other roles have no replicas.
    """

    def __init__(self, nodes: Mapping[str, Node], away: Mapping[str, Node]) -> None:
        self._nodes, self._away = nodes, away
        self._expected: dict[str, Expected] = {}

    def expect(self, trainer: str, replicas: Sequence[Collection[str]], devices: int) -> None:
        """Note that ``trainer`` wants a node for each of ``replicas`` from now on; none: it wants no more."""
        before, now = self._expected.pop(trainer, _NOTHING), Expected(tuple(map(frozenset, replicas)), devices)
        self._drop(before.processes - now.processes)
        if replicas:
            self._expected[trainer] = now

    def settle(self) -> None:
        """Have a node kept for each replica, as far as there are any with room."""
        for expected in self._expected.values():
            for replica in expected.replicas:
                now = next((node for node in self._all if node.kept >= replica), None)
                if now is None or now.draining or _is_crowded_out(now, replica, expected):
                    self._keep(replica, expected)

    def _keep(self, replica: Replica, expected: Expected) -> None:
        """Keep the node with most room for ``replica``; if none has room, it stays where it is."""
        admitting = [node for node in self._usable if all(map(node.admits, replica))]
        fitting = [node for node in admitting if _fits(node, replica, expected)]
        if fitting:
            self._move(replica, min(fitting, key=lambda node: (node.slots_used - node.slots, node.name)))

    def enter(self, process: str, node: Node) -> None:
        """Note that ``process`` runs on ``node`` already, started by a former life of the head."""
        for replica in self._of(process).replicas:
            if process in replica:
                self._move(replica, node)

    def released(self, process: str) -> None:
        """Note that ``process`` is no longer where it was placed: if its node is cut off, it is not waited for."""
        for node in self._away.values():
            node.kept.discard(process)

    def place_of(self, process: str) -> Node | None:
        """The node on which the rank ``process`` can start now; None: it waits."""
        fitting = (node for node in self._usable if process in node.kept and node.slots_used <= node.slots)
        return next(fitting, None)

    def are_settled(self, process: str) -> bool:
        """Whether all ranks on other machines can start now, of the trainer that ``process`` is or follows."""
        return all(self.place_of(rank) is not None for rank in self._of(process).processes)

    def beside(self, process: str) -> frozenset[str]:
        """Ranks on other machines of the trainer that ``process`` is or follows."""
        return self._of(process).processes

    def astray(self, trainer: str) -> bool:
        """Whether a rank of ``trainer`` runs on another node than the one that is kept for it."""
        usable = [*self._usable]
        return any(
            process in node.kept and any(process in other.placed for other in self._all if other is not node)
            for process in self._of(trainer).processes
            for node in usable
        )

    def nodes_of(self, trainer: str) -> list[str]:
        """Names of the nodes of its replicas but the first; of one that waits: empty."""
        return [next((n.name for n in self._all if n.kept >= replica), "") for replica in self._of(trainer).replicas]

    def in_words(self, trainer: str) -> str:
        """Its ranks on other machines, each with the node that is kept for it."""
        parts = zip(self._of(trainer).replicas, self.nodes_of(trainer), strict=True)
        return ", ".join(f"{ranks_in_words(replica)} on {node or 'no node yet'}" for replica, node in parts)

    def wanted(self, trainer: str) -> str:
        """What ``trainer`` waits for, as the end of a sentence; empty: nothing."""
        expected = self._of(trainer)
        for replica in expected.replicas:
            if any(self.place_of(process) is None for process in replica):
                slots = f"{len(replica)} free {'slots' if len(replica) > 1 else 'slot'}"
                devices = f" and {len(replica) * expected.devices} devices" if expected.devices else ""
                ranks = ranks_in_words(replica)
                return f"a node with {slots}{devices * self._have_devices} for {ranks}; {self._there()}"
        return ""

    # ------------------------------------------------------------ who is where

    def _of(self, process: str) -> Expected:
        return self._expected.get(leader_of(process), _NOTHING)

    @property
    def _all(self) -> list[Node]:
        return [*self._nodes.values(), *self._away.values()]

    @property
    def _usable(self) -> list[Node]:
        return [node for node in self._nodes.values() if not node.local and not node.draining]

    @property
    def _have_devices(self) -> bool:
        return any(node.devices.ids for node in self._usable)

    def _move(self, replica: Replica, to: Node) -> None:
        self._drop(replica)
        to.kept |= replica

    def _drop(self, processes: frozenset[str]) -> None:
        for node in self._all:
            node.kept -= processes

    def _there(self) -> str:
        """What the other machines have, for people, and what to do."""
        said = [f"{n.name} has {max(0, n.slots - n.slots_used)} of {n.slots} free" for n in self._usable]
        said += [f"{node.name} is draining" for node in self._nodes.values() if node.draining and not node.local]
        return f"{', '.join(said) or 'none is there'}; start one with headrace node --join ADDR"


def _fits(node: Node, replica: Replica, expected: Expected) -> bool:
    """Whether ``node`` has room for ``replica`` too; slots that workers give up for it count as room."""
    beside = node.kept & expected.processes - replica
    firm = {slot for process, slot in node.placed.items() if process not in node.lent} | node.kept
    enough = node.devices.fits(expected.devices * (len(beside) + len(replica)))
    return enough and len(firm - replica) + len(replica) <= node.slots


def _is_crowded_out(node: Node, replica: Replica, expected: Expected) -> bool:
    """Whether ``node`` is kept for ``replica``, no rank of which is there, and others have the slots meanwhile."""
    return node.placed.keys().isdisjoint(replica) and not _fits(node, replica, expected)
