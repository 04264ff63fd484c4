"""Who sent a message, and whether such a sender may send it: asked once for each message, before it is decoded.

    peer's name, which the transport has bound to a key ─▶ Sender: kind, node, job
                                                              │
    envelope's tag ─▶ table: tag → kinds that may send it ────┴─▶ may, or a sentence that says why not

Invariants
- What the table does not name, nobody may send over a link. Within a process nobody asks: it trusts itself.
- A role process speaks to its own job only, in whichever process that job's actors live, to its own node's agent, and
  to the training services of the head's machine.
- A name says no more than the transport has checked: without keys every peer is a process of our own user, as only
  that user can open our sockets.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Final, NamedTuple

from configs.names import SHARED, leader_of
from transport.address import PeerId

HEAD: Final = "head"
"""Name of the head's peer, and of the node that its machine is."""
MACHINE: Final = "machine"
"""Name of the process that keeps the head, and hosts the node agent of the head's machine."""
AGENT_ACTOR: Final = "agent"
_SERVICES: Final = frozenset(["trainer", "weights", "rewards", "ranker", "gateway"])
_TRAINER: Final = ".trainer"
_ENVIRONMENTS: Final = "environments-"
_WORKERS: Final = ".rollout-"

Guard = Callable[[PeerId, str, str], str | None]
"""Asked with peer, tag and target of each message that arrives: None, or why it is refused."""


class SenderKind(enum.StrEnum):
    """A peer is one of these kinds, or it is a stranger that may send nothing."""

    HEAD = "head"
    MACHINE = "machine"
    """The process that keeps the head alive."""
    AGENT = "node"
    """The node agent's process on another machine."""
    SERVICE = "service"
    """A role process on the head's machine: trainer, weights, rewards, ranker, gateway, environments."""
    TRAIN_SERVICE = "train_service"
    """A process on the head's machine that trains for several jobs."""
    WORKER = "worker"
    """A rollout worker's process, on whichever machine."""
    RANK = "rank"
    """A process that follows a trainer or a rollout worker, which leads its rank group."""
    STRANGER = "stranger"


class Sender(NamedTuple):
    """A sender is what its peer's name says it is."""

    kind: SenderKind
    node: str
    job: str = ""
    """Job of a role process; empty for the others, which serve all jobs, but for a training service: its own name."""


@lru_cache(maxsize=1024)
def sender_of(name: str) -> Sender:
    """``head``, ``machine``, ``<node>``, ``<node>.<job>.<actor>``, ``head.service.<name>``.

    What ends in ``.rank<n>`` follows whoever has the name before that, a trainer's also from another machine. A node's
    name has no dot; a job's may. A training service is called as no actor of a job is.
    """
    leader = leader_of(name)
    if leader != name:
        leads = sender_of(leader)
        follows = leads.kind is SenderKind.WORKER or (bool(leads.job) and leader.endswith(_TRAINER))
        return Sender(SenderKind.RANK if follows else SenderKind.STRANGER, leads.node, leads.job)
    node, _, rest = name.partition(".")
    job, mark, _ = rest.rpartition(_WORKERS)  # an elastic worker is called rollout-<node>.<number>
    job, _, service = (job, mark, "") if mark else rest.rpartition(".")
    if not rest:
        kinds = {HEAD: SenderKind.HEAD, MACHINE: SenderKind.MACHINE, "": SenderKind.STRANGER}
        kind = kinds.get(node, SenderKind.AGENT)
        return Sender(kind, HEAD if kind is SenderKind.MACHINE else node)
    if not node or not job:
        return Sender(SenderKind.STRANGER, node)
    if mark:
        return Sender(SenderKind.WORKER, node, job)
    if node == HEAD and (service in _SERVICES or service.startswith(_ENVIRONMENTS)):
        return Sender(SenderKind.SERVICE, node, job)
    if node == HEAD and job == SHARED:
        return Sender(SenderKind.TRAIN_SERVICE, node, rest)
    return Sender(SenderKind.STRANGER, node, job)


def leads(name: str) -> str:
    """Name of the process that leads the rank's process ``name``.

    A trainer is on the head's machine, wherever its ranks are; a rollout worker is on that of its ranks.
    """
    leader = leader_of(name)
    on_its_machine = sender_of(leader).kind is SenderKind.WORKER
    return leader if on_its_machine else f"{HEAD}.{leader.partition('.')[2]}"


def guard_of(own: PeerId, table: Mapping[str, frozenset[SenderKind]]) -> Guard:
    """The guard of the process ``own``, for which ``table`` says who may send which message."""
    here, nobody = sender_of(own.name), frozenset[SenderKind]()

    @lru_cache(maxsize=1024)  # a process hears the same few messages from the same few peers again and again
    def judge(name: str, tag: str, target: str) -> str | None:
        sender = sender_of(name)
        if sender.kind not in table.get(tag, nobody):
            return f"{name} is a {sender.kind}, which may not send {tag}"
        if not sender.job or sender.job == here.job:
            return None
        if here.kind is SenderKind.TRAIN_SERVICE:
            return None  # it serves whoever may send this: every job's trainer, each for its own job only
        if here.job:
            return f"{name} serves the job {sender.job!r}, and this process another one"
        if target == AGENT_ACTOR:
            return None if sender.node == here.node else f"{name} runs on {sender.node}, not on {here.node}"
        if here.kind is SenderKind.HEAD and target.partition(".")[2] == sender.job:
            return None
        return f"{name} serves the job {sender.job!r}, and {target!r} does not"

    return lambda peer, tag, target: judge(peer.name, tag, target)
