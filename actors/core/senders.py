"""Decides from a sender's name whether it may send a message: asked for each message, before it is decoded.

    peer's name, which the transport has bound to a key ─▶ Sender: kind, node, job
                                                              │
    envelope's tag ─▶ table: tag → kinds that may send it ────┴─▶ may, or a sentence that says why not

Invariants
- A message that the table does not name may not be sent over a link. Within a process nothing is checked.
- A role process may speak only to the actors of its own job, in whichever process they live, to its own node's agent,
  and to the training services of the head's machine.
- A name is only as certain as what the transport has checked: without keys a peer may claim any name, but every peer is
  a process of our own user, as only that user can open our sockets.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Final, NamedTuple

from configs.names import SERVING, SHARED, leader_of
from transport.address import PeerId

HEAD: Final = "head"
"""Name of the head's peer, and of the node on the head's machine."""
MACHINE: Final = "machine"
"""Name of the process that keeps the head, and hosts the node agent of the head's machine."""
AGENT_ACTOR: Final = "agent"
_SERVICES: Final = frozenset(["trainer", "weights", "rewards", "ranker", "gateway"])
_TRAINER: Final = ".trainer"
_ENVIRONMENTS: Final = "environments-"
MODELS: Final = "models"
"""Name of the model server's main actor."""
_SAMPLERS: Final = "sampler-"
_WORKERS: Final = ".rollout-"

Guard = Callable[[PeerId, str, str], str | None]
"""Given peer, tag and target of a message that arrives, a guard returns None, or why the message is refused."""


class SenderKind(enum.StrEnum):
    """A peer is of one of these kinds. A stranger is none of the others, and may send nothing."""

    HEAD = "head"
    MACHINE = "machine"
    """The process that keeps the head alive."""
    AGENT = "node"
    """The node agent's process on another machine."""
    SERVICE = "service"
    """A role process on the head's machine: trainer, weights, rewards, ranker, gateway, environments."""
    TRAIN_SERVICE = "train_service"
    """A process on the head's machine that trains for several jobs."""
    MODEL_SERVER = "model_server"
    """The process on the head's machine that serves models to programs of other people."""
    SAMPLER = "sampler"
    """A process on the head's machine that samples for the model server."""
    WORKER = "worker"
    """A rollout worker's process, on whichever machine."""
    RANK = "rank"
    """A process that follows the leader of its rank group, a trainer, a training service, or a rollout worker."""
    STRANGER = "stranger"


class Sender(NamedTuple):
    """A peer's name says this of the peer."""

    kind: SenderKind
    node: str
    job: str = ""
    """Job of a role process; a training service's own name; empty for the others, which serve all jobs."""


@lru_cache(maxsize=1024)
def sender_of(name: str) -> Sender:
    """Parse a name: ``head``, ``machine``, ``<node>``, ``<node>.<job>.<actor>``, ``head.service.<name>`` or
    ``head.serving.<actor>``.

    A name that ends in ``.rank<n>`` follows the process with the name before that; a trainer's rank may also be on
    another machine. A node's name has no dot; a job's may. No job's actor can have a training service's name.
    """
    leader = leader_of(name)
    if leader != name:
        leads = sender_of(leader)
        follows = leads.kind in (SenderKind.WORKER, SenderKind.TRAIN_SERVICE)
        follows = follows or (bool(leads.job) and leader.endswith(_TRAINER))
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
    if node == HEAD and job == SERVING:
        kind = SenderKind.MODEL_SERVER if service == MODELS else SenderKind.SAMPLER
        return Sender(kind if service == MODELS or service.startswith(_SAMPLERS) else SenderKind.STRANGER, node, job)
    return Sender(SenderKind.STRANGER, node, job)


def leads(name: str) -> str:
    """Name of the process that leads the rank's process ``name``.

    A trainer is on the head's machine, wherever its ranks are; a rollout worker is on the same machine as its ranks.
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
            return None  # it serves the trainers of all jobs, each for its own job only
        if here.job:
            return f"{name} serves the job {sender.job!r}, and this process another one"
        if target == AGENT_ACTOR:
            return None if sender.node == here.node else f"{name} runs on {sender.node}, not on {here.node}"
        if here.kind is SenderKind.HEAD and target.partition(".")[2] == sender.job:
            return None
        return f"{name} serves the job {sender.job!r}, and {target!r} does not"

    return lambda peer, tag, target: judge(peer.name, tag, target)
