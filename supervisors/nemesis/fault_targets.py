"""A fault's target in a run that is under way: which processes, on which nodes, right now.

    Target(role, name, node, link) ─▶ victims(roster) ─▶ Victim: a process, where it is, and who speaks for it

A roster is a snapshot; a process that does not run at that moment cannot be hit, and the nemesis waits for it a while.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from configs.fault_plan import Target
from supervisors.faults.node_faults import NAME as NODE_FAULTS
from supervisors.tree.errors import FaultNotPossible
from transport.address import ActorAddress

HEAD = "head"
IN_HEAD = frozenset({"scheduler", "job", "metrics"})
"""The roles of actors that have no process of their own."""


@dataclass(frozen=True)
class Victim:
    """A process that can be hit."""

    name: str
    """The name of its actor, such as ``rollout-0``; of its node, if it hosts a node agent; or ``head``."""
    role: str
    node: str
    pid: int
    """The process id; 0 if it is not known here."""
    peer: str
    """The name of its peer."""
    node_faults: ActorAddress
    """The actor that commits faults on it from outside."""
    own_faults: ActorAddress
    """The actor in it that commits faults on itself."""

    @property
    def is_node(self) -> bool:
        """Whether it hosts a node agent and no role: the head's process, or a node's."""
        return self.role in ("node", HEAD)

    def __str__(self) -> str:
        return f"{self.name} (process {self.pid} on {self.node})" if self.pid else self.name


@dataclass(frozen=True)
class Roster:
    """The processes of a run that are running now."""

    running: Sequence[Victim]
    known: frozenset[str]
    """The names of the job's role processes, running or not."""

    def victims(self, target: Target, rng: random.Random) -> list[Victim]:
        """The processes that ``target`` (not a link or chunk) names; empty if none of them runs right now.

        Raises:
            FaultNotPossible: there is no such process in this run, and there will not be.
        """
        if target.role is not None:
            return self._of_role(target.role, target.count, rng)
        if target.node == HEAD:
            raise FaultNotPossible("with the head's own machine the whole run would end: take role head")
        return self._named(str(target.name or target.node), node=target.node is not None)

    def ends(self, link: tuple[str, str]) -> tuple[list[Victim], list[Victim]]:
        """The processes at both ends of a link; an end is a name, a role or a node.

        Raises:
            FaultNotPossible: an end is none of these, or both ends are one process.
        """
        one, other = ([self._head()] if end in IN_HEAD else self._end(end) for end in link)
        both = {victim.peer for victim in one} & {victim.peer for victim in other}
        if both:
            raise FaultNotPossible(f"{link[0]} and {link[1]} are one process here ({', '.join(sorted(both))})")
        return one, other

    def _end(self, end: str) -> list[Victim]:
        of_role = [victim for victim in self.running if victim.role == end]
        return of_role or self._named(end, node=any(v.is_node and v.name == end for v in self.running))

    def _of_role(self, role: str, count: int, rng: random.Random) -> list[Victim]:
        fitting = sorted((v for v in self.running if v.role == role), key=lambda v: v.name)
        if role == "train_service":
            raise FaultNotPossible("training services serve several runs: they are hit in simulations only")
        if role == "node" and not fitting:
            raise FaultNotPossible("no other node has joined; the head's own machine is hit by role head")
        return rng.sample(fitting, min(count, len(fitting)))

    def _named(self, name: str, *, node: bool) -> list[Victim]:
        if name == HEAD:
            return [self._head()]
        found = [v for v in self.running if v.name == name and v.is_node == node]
        if found or (not node and name in self.known):
            return found
        if name.partition(".")[0] in IN_HEAD:
            raise FaultNotPossible(f"{name} lives in the head's process: take role head")
        there = sorted({v.name for v in self.running if v.is_node == node} | (self.known if not node else frozenset()))
        raise FaultNotPossible(f"there is no {'node' if node else 'process'} {name!r}; there are: {', '.join(there)}")

    def _head(self) -> Victim:
        return next(victim for victim in self.running if victim.role == HEAD)


def beside(agent: ActorAddress) -> ActorAddress:
    """The actor for faults in the process of a node agent."""
    return ActorAddress(NODE_FAULTS, agent.peer, agent.endpoint)
