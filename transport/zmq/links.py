"""Keeps the links of one transport: brings them up, and takes down those that break or are ended.

    up ─▶ LIVE ─┬─ broken ─▶ DYING    arrived messages are read ─┬─▶ DOWN: the receiver is told, once
                └─ end ────▶ ENDING   queued ones are sent ──────┘

Invariants
- There is one link per peer, and one peer per name: a newer life replaces the older one's link.
- A link that breaks first delivers the messages that have arrived, then reports; a link that is down delivers nothing.
- Once the transport is closed, the receiver hears nothing.
"""

from __future__ import annotations

import asyncio
from typing import Final

from configs.limits import Limits
from transport.address import PeerId
from transport.lives import Lives
from transport.transport import DownReason, Lane, Receiver
from transport.zmq.lane import LaneOut
from transport.zmq.link import Counters, Link, LinkState
from transport.zmq.timers import Timers

_SETTLE_S: Final = 0.005
"""Seconds to wait for libzmq, which reports a disconnect before it hands over the last messages it has read."""
_SETTLE_LOOK_S: Final = 0.001


class Links:
    """Holds all links of one transport, by peer, in order of arrival."""

    def __init__(self, limits: Limits, counters: Counters, lives: Lives) -> None:
        self.by_peer: dict[PeerId, Link] = {}
        self.open = False
        """Flag that the transport is started and not closed."""
        self._limits = limits
        self._counters = counters
        self._lives = lives
        self._loop: asyncio.AbstractEventLoop
        self._timers: Timers
        self._receiver: Receiver

    def start(self, timers: Timers, receiver: Receiver) -> None:
        """Allow links from now on."""
        self._loop = asyncio.get_running_loop()
        self._timers, self._receiver = timers, receiver
        self.open = True

    def live(self) -> list[PeerId]:
        return [peer for peer, link in self.by_peer.items() if link.state is LinkState.LIVE]

    def is_taken(self, name: PeerId) -> bool:
        """Whether another life of that name has a live link."""
        return any(peer.name == name.name and peer != name for peer in self.live())

    def at(self, endpoint: str) -> PeerId | None:
        """The peer with a live link that is known to listen at ``endpoint``."""
        for peer, link in self.by_peer.items():
            if link.state is LinkState.LIVE and endpoint in link.endpoints:
                return peer
        return None

    def make(self, peer: PeerId, number: int, outs: dict[Lane, LaneOut], *, dialed_here: bool) -> Link:
        return Link(
            peer, number, dialed_here, outs, self._counters, self._limits.early_messages, self._receiver.on_frames,
            self.broken, self.malformed,
        )  # fmt: skip

    def up(self, link: Link) -> None:
        """Take a link whose handshake is done; it replaces every other link to that name."""
        for old in [other for peer, other in self.by_peer.items() if peer.name == link.peer.name]:
            same_life = old.peer == link.peer  # its link broke, and is still being read
            reason = DownReason.UNREACHABLE if same_life else DownReason.REPLACED
            old.end(reason)
            self.down(old, reason)
        self._lives.welcome(link.peer)
        self.by_peer[link.peer] = link
        self._receiver.on_peer_up(link.peer)

    def broken(self, link: Link) -> None:
        """Take a broken link down: read the messages that have arrived, then report."""
        if link.state in (LinkState.DYING, LinkState.DOWN):
            return
        link.state = LinkState.DYING
        self._timers.later(_SETTLE_S, self._begin_settling, link)

    def _begin_settling(self, link: Link) -> None:
        for socket in link.sockets:
            socket.check_soon()
        self._settle(link, [socket.empties for socket in link.sockets], self._loop.time() + self._limits.settle_max_s)

    def _settle(self, link: Link, before: list[int], until: float) -> None:
        read = all(s.closed or s.empties > b for s, b in zip(link.sockets, before, strict=True))
        if read or self._loop.time() > until:
            self.down(link, link.reason)
        else:
            self._timers.later(_SETTLE_LOOK_S, self._settle, link, before, until)

    def malformed(self, link: Link) -> None:
        """End the link if its peer has sent too many unreadable messages."""
        if link.malformed >= self._limits.malformed_max and link.state is LinkState.LIVE:
            self._counters.cut_off += 1
            self.end(link, DownReason.UNREACHABLE)

    def end(self, link: Link, reason: DownReason) -> None:
        """Queue a goodbye behind the data, and take the link down when that is sent."""
        link.end(reason)
        self._timers.later(0, self._await_flushed, link, self._loop.time() + self._limits.close_timeout_s)

    def _await_flushed(self, link: Link, until: float) -> None:
        if link.flushed or self._loop.time() > until:
            self.down(link, link.reason)
        else:
            self._timers.later(self._limits.flush_look_s, self._await_flushed, link, until)

    def down(self, link: Link, reason: DownReason) -> None:
        """Remove the link, and tell the receiver. Idempotent."""
        if link.state is LinkState.DOWN:
            return
        link.state = LinkState.DOWN
        if reason is DownReason.UNREACHABLE:
            self._counters.broken += 1
        if self.by_peer.get(link.peer) is link:
            del self.by_peer[link.peer]
        link.release(link)
        if self.open:
            self._receiver.on_peer_down(link.peer, reason)

    def drop_all(self, reason: DownReason, *, linger_s: float) -> None:
        """Close the sockets of every link; libzmq goes on sending its messages for at most ``linger_s``."""
        for link in list(self.by_peer.values()):
            for socket in link.sockets:
                socket.close(linger_s=linger_s)
            self.down(link, reason)
