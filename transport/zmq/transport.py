"""Links to other processes over ZeroMQ, by ipc or TCP.

    listener: ROUTER per lane ◀── HELLO, DATA ── dialer: DEALER per lane; several for bulk with limits.bulk_sockets
        │                                             │
        └──── listen.Listener ──▶ link.Link ◀── dial.Dial
                                      │
                                 links.Links ─▶ Receiver.on_frames / on_peer_up / on_peer_down

Invariants
- Liveness is that of the connection: ZMTP heartbeats run in libzmq's own thread, so a process whose loop or GIL is
  busy stays linked, and a stopped, killed or cut-off one does not.
- The listener finds out whether a connection exists by sending a PROBE to its routing id: after each disconnect that
  the monitor reports, and at every heartbeat.
- The receiver is called from socket and timer callbacks only, never from within ``send`` or ``disconnect``.
- A frame of 64 KiB or more is shared with libzmq, not copied: its sender must not change the buffer afterwards.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import itertools
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import structlog

from configs.limits import Limits
from transport.address import PeerId
from transport.endpoints import advertised, check_socket_is_ours, for_welcome, lane_binds, split_key
from transport.errors import HandshakeRefused, LinkTimeout
from transport.lives import Lives
from transport.rarely import worth_a_line
from transport.transport import DownReason, Frame, Lane, Receiver, SendOutcome, queue_bounds
from transport.zmq.context import new_context, terminate
from transport.zmq.dial import Dial, DialHost
from transport.zmq.handshake import CODEC, PROTOCOL_VERSION, Confirm, Hello, Mark, Welcome, control, routing_id
from transport.zmq.lane import lane_of, lanes_out
from transport.zmq.link import Counters, Link, LinkState
from transport.zmq.links import Links
from transport.zmq.listen import Incoming, Listener, ListenHost
from transport.zmq.options import Curve, lane_options
from transport.zmq.security import NodeKeys, ZapAllowList
from transport.zmq.socket import Context, Role, SocketEvent, ZmqSocket
from transport.zmq.timers import Probes, Timers

log = structlog.get_logger("headrace.transport")


class ZmqTransport:
    """Links one peer to others over ZeroMQ sockets. ``role`` is sent to others in the handshake."""

    def __init__(
        self,
        peer: PeerId,
        *,
        listen: str,
        cluster: str,
        limits: Limits,
        keys: NodeKeys | None = None,
        context: Context[Any] | None = None,
        role: str = "",
        unguarded: bool = False,
    ) -> None:
        """``unguarded``: listen at TCP on loopback without keys, for tests and measurements; see ``lane_binds``."""
        if keys is not None and context is not None:
            raise ValueError("keys need a context of their own: the allow-list is one per context; pass context=None")
        self.limits = limits
        self.counters = Counters()
        self.peer = peer
        self._cluster = cluster
        self._listen = listen
        self._keys = keys
        self._role = role
        self._owns_context = context is None
        self._context = context
        self._sockets = len(Lane) - 1 + limits.bulk_sockets
        self._binds = lane_binds(listen, secure=keys is not None, sockets=self._sockets, unguarded=unguarded)
        self._bounds = queue_bounds(limits)
        self._lives = Lives(limits)
        self._links = Links(limits, self.counters, self._lives)
        self._dials: dict[str, Dial] = {}
        self._accepted: dict[PeerId, int] = {}
        self._dial_numbers = itertools.count(1)
        self._bound: list[str] = []
        self.endpoint = ""
        self._zap: ZapAllowList | None = None
        self._listener: Listener
        self._timers: Timers
        self._probes: Probes
        self._loop: asyncio.AbstractEventLoop

    def peers(self) -> list[PeerId]:
        """Peers with a live link, in order of arrival."""
        return self._links.live()

    async def start(self, receiver: Receiver) -> None:
        """Bind and listen.

        Raises:
            OSError: the address is taken.
        """
        self._loop = asyncio.get_running_loop()
        self._timers = Timers()
        self._context = self._context or new_context(self.limits.bulk_sockets)
        if self._secure:
            assert self._keys is not None, "secure means that there are keys"
            self._zap = ZapAllowList(self._context, self._keys, self.limits)
        host = ListenHost(self.peer, self._cluster, self._welcome, self._links.is_taken, self._accept)
        if self._secure and self._keys is not None:
            host.name_objection = self._keys.objection
        self._listener = Listener(host, self._lives, self.counters, self.limits)
        self._probes = Probes(self._timers, self._listener.probe)
        try:
            for number, address in enumerate(self._binds):
                self._listener.sockets[number] = socket = self._router(number)
                self._bound.append(socket.bind(address))
        except OSError:
            self._close_sockets(linger_s=0)
            raise
        key = self._keys.public_hex if self._secure and self._keys is not None else None
        self.endpoint = advertised(self._bound[0], key)
        self._links.start(self._timers, receiver)
        self._tick()

    @property
    def _secure(self) -> bool:
        """CURVE guards TCP; an ipc socket is guarded by its directory."""
        return self._keys is not None and self._binds[0].startswith("tcp://")

    def _router(self, number: int) -> ZmqSocket:
        assert self._context is not None, "made at start"
        lane = lane_of(number)
        curve = self._keys.for_listener() if self._secure and self._keys is not None else None
        return ZmqSocket(
            self._context,
            Role.LISTENER,
            lane_options(lane, self._bounds[lane], self.limits, curve=curve),
            functools.partial(self._listener.on_message, number),
            functools.partial(self._on_listener_event, lane),
            self._listener.flush,
        )

    def _welcome(self) -> Welcome:
        lanes = for_welcome(self._bound)
        return Welcome(self.peer.name, self.peer.incarnation, self.endpoint, lanes, self._role)

    async def connect(self, endpoint: str, *, timeout_s: float) -> PeerId:
        """See ``Transport.connect``; failed attempts are repeated until ``timeout_s`` is over."""
        if endpoint == self.endpoint:
            raise HandshakeRefused(f"endpoint {endpoint!r} is this process itself; deliver locally instead")
        try:
            async with asyncio.timeout(timeout_s):
                return await self._connect(endpoint)
        except TimeoutError:
            raise LinkTimeout(f"nobody answered at {endpoint} within {timeout_s} s") from None

    async def _connect(self, endpoint: str) -> PeerId:
        pause_s = self.limits.connect_retry_first_s
        while True:
            if (linked := self._links.at(endpoint)) is not None:
                return linked
            if not self._links.open:
                raise LinkTimeout(f"{self.peer} is closed")
            dial = self._dial(endpoint)
            dial.waiters += 1
            try:
                peer = await asyncio.shield(dial.done)
            finally:
                dial.waiters -= 1
                if not dial.waiters and not dial.done.done():
                    dial.finish(None)
            if peer is not None:
                return peer
            await asyncio.sleep(pause_s)
            pause_s = min(self.limits.connect_retry_max_s, pause_s * 2)

    def _dial(self, endpoint: str) -> Dial:
        dial = self._dials.get(endpoint)
        if dial is not None and not dial.done.done():
            return dial
        address, key = split_key(endpoint)
        host = DialHost(self._hello, self._dealer, self._on_welcome, self._on_ready, self.counters)
        dial = Dial(host, endpoint, address, key, next(self._dial_numbers))
        self._dials[endpoint] = dial
        dial.done.add_done_callback(
            lambda _: self._dials.pop(endpoint, None) if self._dials.get(endpoint) is dial else None
        )
        try:
            dial.start()
        except ValueError as error:
            dial.refuse(str(error))
        except HandshakeRefused:
            dial.finish(None)
            raise
        return dial

    def _hello(self, number: int) -> Hello:
        name, incarnation = self.peer.name, self.peer.incarnation
        return Hello(PROTOCOL_VERSION, CODEC, self._cluster, name, incarnation, self.endpoint, number, self._role)

    def _dealer(self, dial: Dial, number: int) -> ZmqSocket:
        assert self._context is not None, "made at start"
        lane = lane_of(number)
        route = routing_id(self.peer, dial.number)
        options = lane_options(lane, self._bounds[lane], self.limits, routing_id=route, curve=self._dial_curve(dial))
        return ZmqSocket(
            self._context,
            Role.DIALER,
            options,
            functools.partial(dial.on_message, number),
            dial.on_event,
            functools.partial(dial.on_writable, number),
        )

    def _dial_curve(self, dial: Dial) -> Curve | None:
        if dial.endpoint.startswith("ipc://"):
            check_socket_is_ours(Path(dial.endpoint.removeprefix("ipc://")))
            return None
        if self._keys is not None:
            return self._keys.for_dialer(dial.server_key, dial.endpoint)
        if dial.server_key is not None:
            raise HandshakeRefused(f"endpoint {dial.endpoint!r} wants keys: make them with `headrace keys`")
        return None

    def _on_welcome(self, dial: Dial, welcome: Welcome) -> Confirm | None:
        if welcome.peer == self.peer:
            dial.refuse("this is the process itself; deliver locally instead")
            return None
        if (why := self._name_objection(dial, welcome)) is not None:
            dial.refuse(why)
            return None
        if self._lives.is_fenced(welcome.peer):
            dial.refuse(f"{welcome.peer} has been replaced by a newer {welcome.name}")
            return None
        link = self._links.by_peer.get(welcome.peer)
        if link is not None and link.state is LinkState.LIVE:
            link.endpoints.add(dial.endpoint)
            return None
        if any(other.confirmed and other.peer == welcome.peer for other in self._dials.values()):
            return None
        return Confirm(self._accepted.get(welcome.peer, 0), min(self._sockets, len(welcome.lanes)))

    def _name_objection(self, dial: Dial, welcome: Welcome) -> str | None:
        """Reason why the listener may not have its name; None: it may, or it has no keys to prove one."""
        if self._keys is None or dial.server_key is None or dial.endpoint.startswith("ipc://"):
            return None
        return self._keys.objection(welcome.name, bytes.fromhex(dial.server_key))

    def _on_ready(self, dial: Dial) -> Link:
        assert dial.welcome is not None, "READY is heard after WELCOME only"
        outs = lanes_out(dial.sockets, None, self._bounds)
        link = self._links.make(dial.welcome.peer, dial.number, outs, dialed_here=True)
        link.release = lambda _: dial.close(linger_s=self.limits.close_timeout_s)
        link.endpoints = {dial.endpoint, dial.welcome.endpoint}
        self._links.up(link)
        return link

    def _accept(self, incoming: Incoming, confirm: Confirm, route: bytes) -> Link | None:
        peer = incoming.hello.peer
        if not self._links.open:
            return None
        old = self._links.by_peer.get(peer)
        if old is not None and old.dialed_here and confirm.last_seen < old.dial:
            return None
        mine = [dial for dial in self._dials.values() if dial.peer == peer and dial.confirmed and not dial.done.done()]
        if mine and self.peer < peer:
            return None
        if old is not None:
            self._links.down(old, DownReason.UNREACHABLE)
        sockets = {number: self._listener.sockets[number] for number in (Lane.SIGNAL, *sorted(incoming.confirmed))}
        link = self._links.make(peer, incoming.hello.dial, lanes_out(sockets, route, self._bounds), dialed_here=False)
        link.release = lambda _: self._listener.forget(route)
        link.endpoints = {incoming.hello.endpoint}
        self._remember_accepted(peer, incoming.hello.dial)
        for out in link.outs.values():
            out.push(control(Mark.READY))
        self._links.up(link)
        for dial in [d for d in self._dials.values() if d.peer == peer or d.endpoint == incoming.hello.endpoint]:
            dial.finish(peer)
        return link

    def _remember_accepted(self, peer: PeerId, number: int) -> None:
        self._accepted.pop(peer, None)
        self._accepted[peer] = number
        if len(self._accepted) > 4096:
            del self._accepted[next(iter(self._accepted))]

    def _on_listener_event(self, lane: Lane, event: SocketEvent) -> None:
        if event is SocketEvent.DISCONNECTED:
            self._probes.after_disconnect(lane)
        elif event is not SocketEvent.CONNECT_FAILED:
            self.counters.refused += 1
            if event is SocketEvent.HANDSHAKE_FAILED and worth_a_line(self.counters.refused):
                log.warning("a connection without the right keys is refused", times=self.counters.refused)

    def _tick(self) -> None:
        self._listener.expire()
        for lane in Lane:
            self._listener.probe(lane)
        for link in list(self._links.by_peer.values()):
            link.flush()
        self._timers.later(self.limits.heartbeat_interval_s, self._tick)

    def send(self, peer: PeerId, lane: Lane, frames: Sequence[Frame]) -> SendOutcome:
        """See ``Transport.send``.

        Raises:
            ValueError: a frame is larger than ``message_max_bytes``; nothing was queued.
        """
        link = self._links.by_peer.get(peer)
        if link is None:
            return SendOutcome.NO_LINK
        limit = self.limits.message_max_bytes
        for frame in frames:
            if len(frame) > limit:
                raise ValueError(
                    f"a frame of {len(frame)} bytes, at most {limit} are allowed: send it as a bulk stream"
                )
        return link.send(lane, frames)

    def send_again(self, peer: PeerId, lane: Lane, frames: Sequence[Frame]) -> SendOutcome:
        """See ``link_faults.Repeating``."""
        link = self._links.by_peer.get(peer)
        return SendOutcome.NO_LINK if link is None else link.send_again(lane, frames)

    def disconnect(self, peer: PeerId, reason: DownReason = DownReason.STOPPED) -> None:
        """Queue a goodbye behind the data; both ends see ``reason``."""
        link = self._links.by_peer.get(peer)
        if link is not None:
            self._links.end(link, reason)

    async def close(self, *, timeout_s: float) -> None:
        if not self._links.open:
            return
        self._links.open = False
        until = self._loop.time() + timeout_s
        for dial in list(self._dials.values()):
            dial.finish(None)
        for link in list(self._links.by_peer.values()):
            link.end(DownReason.STOPPED)
        # libzmq does not report that it has taken a message, so poll
        while self._loop.time() < until and any(not link.flushed for link in self._links.by_peer.values()):  # noqa: ASYNC110
            await asyncio.sleep(self.limits.flush_look_s)
        await self._shut(max(0.05, until - self._loop.time()))
        log.info("transport closed", peer=self.peer.name, **dataclasses.asdict(self.counters))

    async def _shut(self, linger_s: float) -> None:
        self._drop_all(DownReason.STOPPED, linger_s=linger_s)
        if self._owns_context and self._context is not None:
            ended = await terminate(self._context, linger_s + self.limits.close_timeout_s)
            if not ended:
                log.warning("sockets linger beyond their time; they are left behind", peer=self.peer.name)
        if self._listen == "ipc://*":  # our fresh directory, with sockets that killed processes may have left in it
            shutil.rmtree(Path(self._binds[0].removeprefix("ipc://")).parent, ignore_errors=True)

    def _drop_all(self, reason: DownReason, *, linger_s: float) -> None:
        self._timers.cancel_all()
        self._links.drop_all(reason, linger_s=linger_s)
        self._close_sockets(linger_s=linger_s)

    def _close_sockets(self, *, linger_s: float) -> None:
        self._listener.close(linger_s=linger_s)
        if self._zap is not None:
            self._zap.close()

    def abort(self) -> None:
        """Crash, for tests and fault injection: close every connection without a goodbye and without flushing."""
        self._links.open = False
        for dial in list(self._dials.values()):
            dial.finish(None)
        self._drop_all(DownReason.UNREACHABLE, linger_s=0)
        if self._owns_context and self._context is not None:
            self._context.term()
