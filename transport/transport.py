"""The interface between actors and a network, which memory, simulated and ZeroMQ transports implement.

Invariants (asserted for every kind by ``tests/contracts/test_transport_contract.py``)
- At most once, and first-in-first-out, per (sender, receiver, lane) within one pair of incarnations.
- A gap is never silent: frames are delivered gap-free or the link is declared down.
- ``send`` never blocks and never drops: it queues, or says FULL or NO_LINK.
- ``on_peer_down`` comes once per lost link, after every frame that had been delivered from that incarnation.
- Receiver callbacks run on the loop that started the transport and must not raise or block.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Protocol

from configs.limits import Limits
from transport.address import PeerId

Frame = bytes | bytearray | memoryview


class Lane(enum.IntEnum):
    """Names a link's three lanes; a big frame on a later lane never delays an earlier one."""

    SIGNAL = 0
    """Small, urgent messages: down notices, watches, credit, drain."""
    MESSAGE = 1
    """All other messages between actors."""
    BULK = 2
    """Large data, such as weight chunks."""


def queue_bounds(limits: Limits) -> dict[Lane, int]:
    """The bound of each lane's queue to one peer, in messages."""
    return {
        Lane.SIGNAL: limits.signal_queue_frames,
        Lane.MESSAGE: limits.message_queue_frames,
        Lane.BULK: limits.bulk_queue_frames,
    }


class SendOutcome(enum.Enum):
    """Says whether a message was queued, and if not, why."""

    QUEUED = "queued"
    FULL = "full"
    """The lane's queue to this peer is at its bound; nothing was queued."""
    NO_LINK = "no_link"
    """No live link to this incarnation; nothing was queued."""


class DownReason(enum.Enum):
    """Says why a peer is gone. Unreachable is not dead: the process may still run behind a cut link."""

    STOPPED = "stopped"
    """The peer said goodbye."""
    UNREACHABLE = "unreachable"
    """Heartbeats ceased or the connection broke."""
    REPLACED = "replaced"
    """A newer incarnation of the same name was welcomed, or we were told that we are fenced."""


class Receiver(Protocol):
    """Callbacks of a transport; the actor system implements them."""

    def on_frames(self, peer: PeerId, lane: Lane, frames: list[Frame]) -> None: ...
    def on_peer_up(self, peer: PeerId) -> None: ...
    def on_peer_down(self, peer: PeerId, reason: DownReason) -> None: ...


class Transport(Protocol):
    """Moves frames between this process and its peers."""

    @property
    def peer(self) -> PeerId: ...

    @property
    def endpoint(self) -> str:
        """The endpoint at which others connect to this process (``ipc://…``, ``tcp://host:port``, ``memory://…``)."""
        ...

    async def start(self, receiver: Receiver) -> None: ...

    async def connect(self, endpoint: str, *, timeout_s: float) -> PeerId:
        """Open a link to the peer that listens at ``endpoint``, and finish the handshake.

        Idempotent: a second call for a live link returns at once.

        Raises:
            HandshakeRefused: the other side speaks another protocol or belongs to another cluster.
            LinkTimeout: nobody answered within ``timeout_s``.
        """
        ...

    def send(self, peer: PeerId, lane: Lane, frames: Sequence[Frame]) -> SendOutcome: ...

    def disconnect(self, peer: PeerId, reason: DownReason = DownReason.STOPPED) -> None:
        """Drop the link to ``peer`` once its queues are sent; both ends see ``reason``."""
        ...

    def peers(self) -> list[PeerId]: ...

    async def close(self, *, timeout_s: float) -> None:
        """Say goodbye to every peer, flush for at most ``timeout_s``, and close. Our receiver is called no more."""
        ...
