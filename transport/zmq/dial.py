"""An attempt to link to a listener: its sockets, three at least, and the dialer's half of the handshake.

An attempt ends once, with an outcome: LINKED (by this dial or by the peer's own), REFUSED, or RETRY. It never retries
by itself, nor does libzmq, since a silent reconnect could hand one life's mail to another.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from transport.address import PeerId
from transport.endpoints import resolve_lane
from transport.errors import HandshakeRefused, MalformedInput
from transport.transport import Frame, Lane
from transport.zmq.handshake import Confirm, Hello, Mark, Refusal, Welcome, control, read_control, read_head
from transport.zmq.link import Counters, Link
from transport.zmq.socket import Sent, SocketEvent, ZmqSocket


@dataclass
class DialHost:
    """Holds what a dial needs of its transport."""

    hello: Callable[[int], Hello]
    open_socket: Callable[[Dial, int], ZmqSocket]
    welcomed: Callable[[Dial, Welcome], Confirm | None]
    """Callback once the listener is known; None: a link exists or is nearly up, so that this dial ends."""
    linked: Callable[[Dial], Link]
    counters: Counters


class Dial:
    """Makes one attempt to connect. ``done`` yields the peer, None for RETRY, or raises HandshakeRefused."""

    def __init__(self, host: DialHost, endpoint: str, address: str, server_key: str | None, number: int) -> None:
        self.endpoint = endpoint
        self.number = number
        self.server_key = server_key
        self.waiters = 0
        self.peer: PeerId | None = None
        self.welcome: Welcome | None = None
        self.confirmed = False
        self.link: Link | None = None
        self.done: asyncio.Future[PeerId | None] = asyncio.get_running_loop().create_future()
        self._host = host
        self._address = address
        self.sockets: dict[int, ZmqSocket] = {}
        """Sockets by their numbers, see ``lane.lane_of``."""
        self._unsent: dict[int, list[Frame]] = {}

    def start(self) -> None:
        """Connect the signal lane, and send HELLO as soon as it is up."""
        self._open(Lane.SIGNAL, self._address, control(Mark.HELLO, self._host.hello(self.number)))

    def _open(self, socket: int, address: str, first: list[Frame]) -> None:
        self.sockets[socket] = self._host.open_socket(self, socket)
        self.sockets[socket].connect(address)
        self._unsent[socket] = first
        self.on_writable(socket)

    def on_writable(self, socket: int) -> None:
        """Send what waits for the writable socket: its first message, or the link's queues."""
        if self.link is not None:
            self.link.flush()
        elif socket in self._unsent and self.sockets[socket].try_send(self._unsent[socket]) is Sent.SENT:
            del self._unsent[socket]

    def on_message(self, socket: int, frames: list[Frame]) -> None:
        try:
            if self.link is None:
                self._handshake(frames)
            else:
                self.link.receive(socket, frames)
        except MalformedInput:
            self._host.counters.malformed += 1
            if self.link is None:
                self.finish(None)
            else:
                self.link.malformed += 1
                self.link.on_malformed(self.link)

    def _handshake(self, frames: list[Frame]) -> None:
        if self.done.done():
            return
        mark, _ = read_head(frames)
        match mark:
            case Mark.WELCOME if self.welcome is None:
                self._welcomed(read_control(Welcome, frames))
            case Mark.READY if self.confirmed:
                assert self.peer is not None, "confirmed only after a welcome"
                self.link = self._host.linked(self)
                self.finish(self.peer)
            case Mark.REFUSED:
                self.refuse(read_control(Refusal, frames).why)
            case Mark.YIELD | Mark.GOODBYE:
                self.finish(None)
            case Mark.PROBE:
                pass
            case _:
                raise MalformedInput(f"a message of kind {mark} in the handshake")

    def _welcomed(self, welcome: Welcome) -> None:
        self.welcome = welcome
        self.peer = welcome.peer
        addresses = [resolve_lane(self._address, lane) for lane in welcome.lanes[1:]]
        confirm = self._host.welcomed(self, welcome)
        if confirm is None or self.done.done():
            self.finish(None)
            return
        self.confirmed = True
        for socket, address in enumerate(addresses[: confirm.sockets - 1], Lane.MESSAGE):
            self._open(socket, address, control(Mark.CONFIRM, confirm))

    def on_event(self, event: SocketEvent) -> None:
        """React to a connection that failed or broke."""
        if self.link is not None:
            self.link.on_broken(self.link)
        elif event is SocketEvent.AUTH_FAILED:
            self.refuse("the listener does not allow our key: add our node.public to its key directory's allowed/")
        else:
            self.finish(None)

    def refuse(self, why: str) -> None:
        """End the attempt as refused."""
        if not self.done.done():
            self.done.set_exception(HandshakeRefused(f"{self.endpoint}: {why}"))
            self.done.exception()
            self.close(linger_s=0)

    def finish(self, peer: PeerId | None) -> None:
        """End the attempt; without a link the sockets are closed."""
        if not self.done.done():
            self.done.set_result(peer)
            if self.link is None:
                self.close(linger_s=0)

    def close(self, *, linger_s: float) -> None:
        for socket in self.sockets.values():
            socket.close(linger_s=linger_s)
