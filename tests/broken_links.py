"""Breaks a link of a memory network, as a cut cable would."""

from __future__ import annotations

from transport.memory_transport import MemoryNetwork
from transport.transport import DownReason


def break_link(network: MemoryNetwork, name: str, other: str) -> None:
    """Cut the link between two peers: each sees the other UNREACHABLE; they may connect again."""
    for link in {link for transport in network.transports() for link in transport.links()}:
        if {link.near.peer.name, link.far.peer.name} == {name, other}:
            link.down(DownReason.UNREACHABLE, DownReason.UNREACHABLE)
