"""What a role process is told on its standard input: one JSON object."""

from __future__ import annotations

import functools

import msgspec

from actors.roles import AnyArgs
from configs.limits import Limits
from transport.address import ActorAddress


class ProcessSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What a process needs to become a peer of the cluster and to host a role's actors."""

    name: str
    """Name at the node agent: ``<job>.<actor>``."""
    peer: str
    """Peer name of this process: ``<node>.<job>.<actor>``."""
    args: AnyArgs
    """Arguments of the role; their tag ``serves`` says whether it is of a job or of a training service."""
    agent: ActorAddress
    """Node agent that started the process, and is told of its readiness and progress."""
    cluster: str
    listen: str
    """Endpoint to listen at; a port of 0 or ``*`` takes a free one."""
    limits: str
    """``Limits`` as JSON."""
    seed: int
    """Seed of the actor system's random streams."""
    keys: str = ""
    """Directory of this node's keys; empty: none, loopback only."""
    neighbours: tuple[tuple[str, str], ...] = ()
    """The head's other nodes with their keys: their workers pass weights on to each other."""

    def encode(self) -> bytes:
        return msgspec.json.encode(self)

    @staticmethod
    def decode(data: bytes) -> ProcessSpec:
        """Raises:
        msgspec.DecodeError: the bytes are no spec; a bug of the node agent.
        """
        return msgspec.json.decode(data, type=ProcessSpec)

    def parsed_limits(self) -> Limits:
        return parsed_limits(self.limits)


@functools.lru_cache(maxsize=16)
def parsed_limits(limits: str) -> Limits:
    """``Limits`` from their JSON."""
    return Limits.model_validate_json(limits)
