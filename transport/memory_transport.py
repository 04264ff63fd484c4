"""A network inside one process: the transport of single-process runs, tests and (with delays) simulations.

    MemoryTransport.send ─▶ Pipe (bounded, per lane) ─▶ MemoryNetwork.route ─▶ Pipe.deliver ─▶ Receiver.on_frames

Invariants
- Nothing is delivered inside ``send``: delivery is a loop callback, so a handler never re-enters its caller.
- Lanes are served in order of urgency; within a lane first in, first out.
- A link is one object that both ends share; messages in flight on a link that is down are never delivered.
- Disconnecting reports its reason at both ends; ``close`` reports nothing at the closing end, and ``abort`` is a crash:
  nothing is flushed and the others see UNREACHABLE.
- Only the loop's clock is used, so everything here runs under virtual time.
- A receiver is called in the context in which its transport was started, not in the sender's, so that the tasks that it
  starts belong to its own process.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
from collections import deque
from collections.abc import Sequence
from typing import Final

from configs.limits import DEFAULT_LIMITS, Limits
from transport.address import PeerId
from transport.errors import HandshakeRefused, LinkTimeout
from transport.lives import Lives
from transport.transport import DownReason, Frame, Lane, Receiver, SendOutcome, queue_bounds

SCHEME: Final = "memory://"


class MemoryNetwork:
    """Knows which transport listens where, and carries frames. A subclass may delay, lose, repeat or hold them."""

    def __init__(self) -> None:
        self._listening: dict[str, MemoryTransport] = {}
        self._waiting: dict[str, list[asyncio.Future[None]]] = {}

    def listener(self, endpoint: str) -> MemoryTransport | None:
        """The transport that listens at ``endpoint`` now."""
        return self._listening.get(endpoint)

    def transports(self) -> list[MemoryTransport]:
        """All listening transports, in order of arrival."""
        return list(self._listening.values())

    # hooks of a simulated network

    def reachable(self, source: PeerId, target: PeerId) -> bool:
        """Whether a handshake from ``source`` can reach ``target`` at this moment."""
        return True

    def handshake_s(self) -> float:
        """Seconds that a handshake takes."""
        return 0.0

    def route(self, pipe: Pipe) -> None:
        """Have ``pipe.pump`` run once, soon; called when ``pipe`` has something to carry."""
        pipe.pump_soon()

    def link_ended(self, link: Link) -> None:
        """Called when ``link`` is down."""

    def crashed(self, link: Link, transport: MemoryTransport, *, silent: bool = False) -> None:
        """Tell the other end of ``link`` that ``transport``, at this end, has crashed.

        ``silent``: its machine is gone too, so that nothing closes the connection.
        """
        link.down_seen_from(transport, None, DownReason.UNREACHABLE)

    def listen(self, transport: MemoryTransport) -> None:
        """Make ``transport`` reachable; a newer life of a name takes over its endpoint."""
        self._listening[transport.endpoint] = transport
        for waiter in self._waiting.pop(transport.endpoint, []):
            if not waiter.done():
                waiter.set_result(None)

    def unlisten(self, transport: MemoryTransport) -> None:
        """Make ``transport`` unreachable."""
        if self._listening.get(transport.endpoint) is transport:
            del self._listening[transport.endpoint]

    async def wait_listening(self, endpoint: str) -> MemoryTransport:
        """Wait until somebody listens at ``endpoint``; the caller sets the deadline."""
        while (transport := self._listening.get(endpoint)) is None:
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.setdefault(endpoint, []).append(waiter)
            try:
                await waiter
            finally:
                waiters = self._waiting.get(endpoint, [])
                if waiter in waiters:
                    waiters.remove(waiter)
        return transport


class Pipe:
    """Carries one direction of a link, in bounded queues, one per lane."""

    def __init__(self, link: Link, source: MemoryTransport, target: MemoryTransport) -> None:
        self.link = link
        self.source = source
        self.target = target
        self.queues: dict[Lane, deque[list[Frame]]] = {lane: deque() for lane in Lane}
        self.in_flight: dict[Lane, int] = dict.fromkeys(Lane, 0)
        self.ending: DownReason | None = None
        """Reason with which the source has ended the link, which goes down when all is carried; None: it has not."""
        self._scheduled = False

    def offer(self, lane: Lane, frames: list[Frame], bound: int) -> SendOutcome:
        """Queue one message, or say that the lane is at its bound (messages in flight count)."""
        if len(self.queues[lane]) + self.in_flight[lane] >= bound:
            return SendOutcome.FULL
        self.queues[lane].append(frames)
        self.source.network.route(self)
        return SendOutcome.QUEUED

    def pump_soon(self) -> None:
        """Let ``pump`` run in the next turn of the loop."""
        if not self._scheduled:
            self._scheduled = True
            self.source.loop.call_soon(self.pump)

    def pump(self) -> None:
        """Deliver a bounded number of messages, most urgent lane first; the rest in a later turn."""
        self._scheduled = False
        for _ in range(self.source.limits.drain_max_messages):
            lane = self.next_lane()
            if lane is None or not self.link.alive:
                break
            self.deliver(lane, self.queues[lane].popleft())
        self.settle()

    def settle(self) -> None:
        """Go on after some deliveries, or end the link if it was only waiting to be flushed."""
        if not self.link.alive:
            return
        if self.next_lane() is not None:
            self.source.network.route(self)
        elif self.ending is not None and not any(self.in_flight.values()):
            self.link.down(self.ending, self.ending)

    def next_lane(self) -> Lane | None:
        """The most urgent lane that holds a message."""
        for lane, queue in self.queues.items():
            if queue:
                return lane
        return None

    def deliver(self, lane: Lane, frames: list[Frame]) -> None:
        """Hand one message to the receiver, if the link is still up."""
        if self.link.alive:
            self.target.context.run(self.target.receiver.on_frames, self.source.peer, lane, frames)


class Link:
    """Holds what two transports share: a pipe each way, and whether the link is up."""

    def __init__(self, near: MemoryTransport, far: MemoryTransport) -> None:
        self.near = near
        self.far = far
        self.alive = True
        self._pipes = {near.peer: Pipe(self, near, far), far.peer: Pipe(self, far, near)}

    def pipe_from(self, transport: MemoryTransport) -> Pipe:
        """The direction in which ``transport`` sends."""
        return self._pipes[transport.peer]

    def pipes(self) -> list[Pipe]:
        """Both directions."""
        return list(self._pipes.values())

    def down(self, near_sees: DownReason | None, far_sees: DownReason | None) -> None:
        """End the link, once. Each end is told in a later turn; None tells that end nothing."""
        if not self.alive:
            return
        self.alive = False
        self.near.network.link_ended(self)
        self.near.lose(self, self.far.peer, near_sees)
        self.far.lose(self, self.near.peer, far_sees)

    def down_seen_from(self, transport: MemoryTransport, here: DownReason | None, there: DownReason | None) -> None:
        """Call ``down`` with the reasons ordered from the point of view of one end."""
        if transport is self.near:
            self.down(here, there)
        else:
            self.down(there, here)


class MemoryTransport:
    """Links a peer on a ``MemoryNetwork``; its endpoint is ``listen``, or else ``memory://<name>``."""

    def __init__(
        self,
        network: MemoryNetwork,
        peer: PeerId,
        *,
        listen: str = "",
        cluster: str = "",
        limits: Limits = DEFAULT_LIMITS,
    ) -> None:
        self.network = network
        self.limits = limits
        self.cluster = cluster
        self.loop: asyncio.AbstractEventLoop
        self.receiver: Receiver
        self.context = contextvars.copy_context()
        self.peer = peer
        self.endpoint = listen or SCHEME + peer.name
        self._bounds = queue_bounds(limits)
        self._links: dict[PeerId, Link] = {}
        self.lives = Lives(limits)
        self.open = False
        """Flag that the transport is started and not closed."""
        self._unlinked = asyncio.Event()

    async def start(self, receiver: Receiver) -> None:
        """Listen; callbacks come on the loop that runs this."""
        self.loop = asyncio.get_running_loop()
        self.receiver = receiver
        self.context = contextvars.copy_context()
        self.open = True
        self.network.listen(self)

    async def connect(self, endpoint: str, *, timeout_s: float) -> PeerId:
        """See ``Transport.connect``. Waits for somebody to listen at ``endpoint``."""
        if not endpoint.startswith(SCHEME):
            raise HandshakeRefused(
                f"endpoint {endpoint!r}: this process is on a memory network, expected memory://name"
            )
        if endpoint == self.endpoint:
            raise HandshakeRefused(f"endpoint {endpoint!r} is this process itself; deliver locally instead")
        try:
            async with asyncio.timeout(timeout_s):
                return await self._handshake(endpoint)
        except TimeoutError:
            raise LinkTimeout(f"nobody answered at {endpoint} within {timeout_s} s") from None

    async def _handshake(self, endpoint: str) -> PeerId:
        while True:
            other = await self.network.wait_listening(endpoint)
            if other.peer in self._links:
                return other.peer
            if not self.open:
                raise LinkTimeout(f"{self.peer} is closed")
            delay_s = self.network.handshake_s()
            await asyncio.sleep(delay_s if self.network.reachable(self.peer, other.peer) else max(delay_s, 0.05))
            if not self.network.reachable(self.peer, other.peer) or self.network.listener(endpoint) is not other:
                continue
            if other.peer not in self._links:
                self._welcome(other)
            return other.peer

    def _welcome(self, other: MemoryTransport) -> None:
        if other.cluster != self.cluster:
            raise HandshakeRefused(
                f"{other.peer} belongs to cluster {other.cluster!r}, this process to {self.cluster!r}"
            )
        if other.lives.is_fenced(self.peer):
            raise HandshakeRefused(f"{other.peer} has welcomed a newer {self.peer.name}; this one is fenced")
        link = Link(self, other)
        self.take(link, other.peer)
        other.take(link, self.peer)

    def take(self, link: Link, peer: PeerId) -> None:
        """Take a new link to ``peer``; the dialer calls this at both ends. Every other life of that name is fenced."""
        self.lives.welcome(peer)
        for old in [old for old in self._links if old.name == peer.name and old != peer]:
            self._links[old].down_seen_from(self, DownReason.REPLACED, DownReason.REPLACED)
        self._links[peer] = link
        self.loop.call_soon(self.receiver.on_peer_up, peer, context=self.context)

    def send(self, peer: PeerId, lane: Lane, frames: Sequence[Frame]) -> SendOutcome:
        link = self._links.get(peer)
        if link is None or link.pipe_from(self).ending is not None:
            return SendOutcome.NO_LINK
        return link.pipe_from(self).offer(lane, list(frames), self._bounds[lane])

    def disconnect(self, peer: PeerId, reason: DownReason = DownReason.STOPPED) -> None:
        """Drop the link once what is queued has been carried; both ends see ``reason``."""
        link = self._links.get(peer)
        if link is not None:
            link.pipe_from(self).ending = reason
            self.network.route(link.pipe_from(self))

    def peers(self) -> list[PeerId]:
        """Peers with a live link, in order of arrival."""
        return list(self._links)

    def links(self) -> list[Link]:
        """Live links, in order of arrival."""
        return list(self._links.values())

    async def close(self, *, timeout_s: float) -> None:
        self.open = False
        self.network.unlisten(self)
        for peer in self.peers():
            self.disconnect(peer)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while self._links:
                    self._unlinked.clear()
                    await self._unlinked.wait()
        for peer, link in list(self._links.items()):
            heard = self.network.reachable(self.peer, peer)
            link.down_seen_from(self, None, DownReason.STOPPED if heard else DownReason.UNREACHABLE)

    def abort(self, *, silent: bool = False) -> None:
        """Crash: vanish without flushing or a goodbye. The others see UNREACHABLE, this end sees nothing.

        ``silent``: see ``MemoryNetwork.crashed``. Idempotent.
        """
        if self.open:
            self.open = False
            self.network.unlisten(self)
            for link in self.links():
                self.network.crashed(link, self, silent=silent)

    def lose(self, link: Link, peer: PeerId, reason: DownReason | None) -> None:
        """Drop an ended link; called by the link, once."""
        if self._links.get(peer) is link:
            del self._links[peer]
        if reason is not None and self.open:
            self.loop.call_soon(self.receiver.on_peer_down, peer, reason, context=self.context)
        self._unlinked.set()
