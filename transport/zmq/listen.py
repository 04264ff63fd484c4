"""The listening half of a transport: one or more ROUTER sockets per lane, and its half of the handshake.

Invariants
- A connection is known by its routing id, which names peer and dial; a dialer is a stranger until its HELLO,
  and other messages of a stranger are counted and dropped.
- State that strangers can make us keep is bounded in number and in time.
- With keys, a peer has the name that its key may bear (``security.py``), on each of a link's connections.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from dataclasses import dataclass, field

from configs.limits import Limits
from transport.address import PeerId
from transport.errors import MalformedInput
from transport.lives import Lives
from transport.transport import DownReason, Frame, Lane
from transport.zmq.handshake import (
    NAME_IS_TAKEN,
    Confirm,
    Goodbye,
    Hello,
    Mark,
    Refusal,
    Welcome,
    control,
    objection,
    read_control,
    read_head,
    routing_id,
)
from transport.zmq.link import Counters, Link, LinkState
from transport.zmq.socket import ZmqSocket


@dataclass
class Incoming:
    """Holds a dialer that has said HELLO and not yet confirmed on all of its other sockets."""

    hello: Hello
    expires_s: float
    confirmed: set[int] = field(default_factory=lambda: set[int]())


@dataclass
class ListenHost:
    """Holds what the listening half needs of its transport."""

    peer: PeerId
    cluster: str
    welcome: Callable[[], Welcome]
    is_taken: Callable[[PeerId], bool]
    """Callback that says whether another life of that name has a live link here. Only nodes are refused for it: other
    processes are replaced by their next life, but a machine is not pushed out by one that was given the same name."""
    accept: Callable[[Incoming, Confirm, bytes], Link | None]
    """Callback that makes a dialer a link; None: the dialer must yield."""
    name_objection: Callable[[str, bytes], str | None] = lambda name, key: None
    """Callback that says why a peer with this key may not have this name; None: it may, as anyone may without keys."""


class Listener:
    """Routes messages from the ROUTER sockets to links, or through the handshake."""

    def __init__(self, host: ListenHost, lives: Lives, counters: Counters, limits: Limits) -> None:
        self.sockets: dict[int, ZmqSocket] = {}
        """Sockets by their numbers, see ``lane.lane_of``."""
        self._host = host
        self._lives = lives
        self._counters = counters
        self._limits = limits
        self._loop = asyncio.get_running_loop()
        self._links: dict[bytes, Link] = {}
        self._stuck: dict[bytes, Link] = {}
        self._pending: dict[bytes, Incoming] = {}

    def on_message(self, socket: int, frames: list[Frame]) -> None:
        route = bytes(frames[0])
        link = self._links.get(route)
        try:
            if link is not None:
                link.receive(socket, frames[1:])
            else:
                self._stranger(route, socket, frames[1:])
        except MalformedInput:
            self._counters.malformed += 1
            if link is not None:
                link.malformed += 1
                link.on_malformed(link)

    def _stranger(self, route: bytes, socket: int, frames: list[Frame]) -> None:
        mark, _ = read_head(frames)
        if mark == Mark.HELLO and socket == Lane.SIGNAL:
            self._hello(route, read_control(Hello, frames))
        elif mark == Mark.CONFIRM and socket != Lane.SIGNAL and route in self._pending:
            self._confirm(route, socket, read_control(Confirm, frames))
        elif mark in (Mark.DATA, Mark.PROBE) and len(route) > 5:
            # the peer believes in a link that we have given up
            self._reply(socket, route, control(Mark.GOODBYE, Goodbye(DownReason.UNREACHABLE)))
        elif mark != Mark.GOODBYE:
            raise MalformedInput(f"a message of kind {mark} from a stranger")

    def _hello(self, route: bytes, hello: Hello) -> None:
        if route != routing_id(hello.peer, hello.dial):
            raise MalformedInput("a HELLO under another's routing id")
        why = objection(hello, self._host.cluster, self._host.peer) or self._name_objection(hello, Lane.SIGNAL)
        if why is None and self._lives.is_fenced(hello.peer):
            why = f"{self._host.peer.name} has welcomed a newer {hello.name}; this one is fenced and must stop"
        if why is None and hello.role == "node" and self._host.is_taken(hello.peer):
            why = f"{NAME_IS_TAKEN}: a node named {hello.name} is here and answers; give this one another --name"
        if why is None and len(self._pending) >= self._limits.handshakes_max:
            raise MalformedInput("too many handshakes at once")
        if why is not None:
            self._counters.refused += 1
            self._reply(Lane.SIGNAL, route, control(Mark.REFUSED, Refusal(why)))
            return
        self._pending[route] = Incoming(hello, self._loop.time() + self._limits.connect_timeout_s)
        self._reply(Lane.SIGNAL, route, control(Mark.WELCOME, self._host.welcome()))

    def _name_objection(self, hello: Hello, socket: int) -> str | None:
        return self._host.name_objection(hello.name, self.sockets[socket].sender_key())

    def _confirm(self, route: bytes, socket: int, confirm: Confirm) -> None:
        if not socket < confirm.sockets <= len(self.sockets):
            raise MalformedInput(f"a CONFIRM of {confirm.sockets} sockets on number {socket} of {len(self.sockets)}")
        incoming = self._pending[route]
        if self._name_objection(incoming.hello, socket) is not None:
            raise MalformedInput("a CONFIRM under another's routing id")
        incoming.confirmed.add(socket)
        if len(incoming.confirmed) < confirm.sockets - 1:
            return
        del self._pending[route]
        if self._lives.is_fenced(incoming.hello.peer):
            why = f"{self._host.peer.name} has welcomed a newer {incoming.hello.name}"
            self._reply(Lane.SIGNAL, route, control(Mark.REFUSED, Refusal(why)))
            return
        link = self._host.accept(incoming, confirm, route)
        if link is None:
            self._reply(Lane.SIGNAL, route, control(Mark.YIELD))
            return
        self._links[route] = link
        for out in link.outs.values():
            out.on_stuck = functools.partial(self._stuck.__setitem__, route, link)
        self._stuck[route] = link

    def _reply(self, socket: int, route: bytes, frames: list[Frame]) -> None:
        """Reply to a stranger once; if its connection is full, the reply is lost."""
        self.sockets[socket].try_send([route, *frames])

    def forget(self, route: bytes) -> None:
        """Forget the link of ``route``, which is down."""
        self._links.pop(route, None)
        self._stuck.pop(route, None)

    def flush(self) -> None:
        """Flush links that may hold queued messages, not all, as there may be a thousand; a socket became writable."""
        for route, link in list(self._stuck.items()):
            link.flush()
            if link.flushed or link.state in (LinkState.DYING, LinkState.DOWN):
                self._stuck.pop(route, None)

    def probe(self, lane: Lane) -> None:
        """Break the links whose connection on ``lane`` no longer exists."""
        for link in list(self._links.values()):
            if not link.outs[lane].probe():
                link.on_broken(link)

    def expire(self) -> None:
        """Forget dialers that have not confirmed in time."""
        now = self._loop.time()
        for route in [route for route, incoming in self._pending.items() if incoming.expires_s <= now]:
            del self._pending[route]

    def close(self, *, linger_s: float) -> None:
        for socket in self.sockets.values():
            socket.close(linger_s=linger_s)
