"""Names of processes and actors: a process is a peer, an actor lives in a peer.

Invariants
- An incarnation is drawn at random once per process start and is never reused, so two lives of the
  same name can always be told apart.
- An address names one actor in one life of its process. Mail for an older life is refused by the receiver.
"""

from __future__ import annotations

import secrets

import msgspec


class PeerId(msgspec.Struct, frozen=True, order=True):
    """Names one life of one process on the network: a readable name and a 63-bit incarnation."""

    name: str
    incarnation: int

    def __str__(self) -> str:
        return f"{self.name}#{self.incarnation:x}"


class ActorAddress(msgspec.Struct, frozen=True, order=True):
    """Says where an actor lives: ``name@peer#incarnation``, and the endpoint at which its peer listens.

    ``endpoint`` is empty for a peer that only this process's in-memory transport can reach.
    """

    name: str
    peer: PeerId
    endpoint: str = ""

    def __str__(self) -> str:
        return f"{self.name}@{self.peer}"


def new_peer(name: str) -> PeerId:
    """An identity for this process, with a fresh incarnation drawn from true randomness.

    Simulations build ``PeerId`` from their own seed instead.
    """
    return PeerId(name, secrets.randbits(62) + 1)
