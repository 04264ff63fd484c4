"""Sending to other processes: connect on first use, queue meanwhile, and never lose what must arrive.

    send ─▶ live link ─▶ transport.send
       └─▶ no link yet ─▶ outbox (bounded) ─▶ connect ─▶ drain, in order
       └─▶ lane full, ``surely`` ─▶ outbox ─▶ drain, in order

Invariants
- While an outbox holds something for a lane, all that follows on that lane queues behind it: order is kept.
- An outbox is bounded. A message that must arrive and finds it full breaks the link, or the attempt to make one: a gap
  is never silent. Both ends are then told UNREACHABLE, since the peer has not said goodbye.
- Messages queued for a link are lost with it, never sent on the next one, and ``on_lost`` is called for each. Else an
  actor could get an older message after a Down, and a Down promises silence.
- A parcel whose deadline passes in the outbox is not sent; what remains of a deadline is computed when it is sent.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

import structlog

from actors.core.errors import ActorError
from configs.limits import Limits
from transport.address import PeerId
from transport.envelope import NO_DEADLINE, Envelope, encode_envelope
from transport.errors import TransportError
from transport.transport import DownReason, Frame, Lane, SendOutcome, Transport

log = structlog.get_logger("headrace.actors")

_RETRY_S: Final = 0.005
"""Pause before a full lane is tried again: the transport does not say when a lane has room."""


class MessageTooLarge(ActorError):
    """A message is larger than ``limits.message_max_bytes``: a bug of the sender, who must cut it up or stream it."""

    permanent = True


class Parcel(NamedTuple):
    """Holds a message that is ready to be sent. ``deadline_at`` is loop time."""

    envelope: Envelope
    body: Sequence[Frame]
    deadline_at: float | None


class _Outbox:
    """Holds messages that wait for the link to one peer, or for room on it."""

    def __init__(self) -> None:
        self.queues: dict[Lane, deque[Parcel]] = {lane: deque() for lane in Lane}
        self.connecting: asyncio.Task[None] | None = None
        self.retry: asyncio.TimerHandle | None = None
        self.cut = False
        """Whether a message that must arrive is missing here: then none of the others may be sent."""

    def cancel(self) -> None:
        if self.connecting is not None:
            self.connecting.cancel()
        if self.retry is not None:
            self.retry.cancel()


class Links:
    """Sends all messages of one process to others.

    links.send(peer, endpoint, ...)                    # no link: QUEUED in an outbox, and connecting begins
    links.send(peer, endpoint, ...)                    # QUEUED behind it
    links.on_peer_up(peer)                             # both go, in order; later ones go straight to the transport
    links.send(peer, endpoint, ..., surely=True)       # lane full: an outbox again, tried every 5 ms; if that
                                                       # is full too, the link is cut: both ends hear UNREACHABLE
    """

    def __init__(
        self,
        transport: Transport,
        limits: Limits,
        on_sent: Callable[[PeerId], None],
        on_unreachable: Callable[[PeerId, str], None],
        on_lost: Callable[[PeerId, Envelope], None],
    ) -> None:
        self._transport = transport
        self._limits = limits
        self._on_sent = on_sent
        self._on_unreachable = on_unreachable
        self._on_lost = on_lost
        self._boxes: dict[PeerId, _Outbox] = {}
        self._replaced: dict[PeerId, None] = {}
        self._endpoints: dict[PeerId, str] = {}
        self._tasks: dict[asyncio.Task[None], None] = {}
        self._closed = False
        self.counters: Counter[str] = Counter()

    def endpoint_of(self, peer: PeerId) -> str:
        """Where ``peer`` listens, if this process has ever connected to it; else empty."""
        return self._endpoints.get(peer, "")

    async def connect(self, endpoint: str) -> PeerId:
        """See ``Transport.connect``, within ``limits.connect_timeout_s``."""
        peer = await self._transport.connect(endpoint, timeout_s=self._limits.connect_timeout_s)
        self._endpoints[peer] = endpoint
        return peer

    def is_queueing(self, peer: PeerId) -> bool:
        """Whether a message sent to ``peer`` now would wait for the link."""
        box = self._boxes.get(peer)
        return box is not None and box.connecting is not None

    def send(
        self,
        peer: PeerId,
        endpoint: str,
        lane: Lane,
        envelope: Envelope,
        body: Sequence[Frame],
        *,
        deadline_at: float | None = None,
        surely: bool = False,
    ) -> SendOutcome:
        """Send, or queue, one message. ``surely``: rather break the link than lose it.

        Raises:
            MessageTooLarge: it is larger than the transport carries.
        """
        self._check_size(envelope, body)
        box = self._boxes.get(peer) if self._boxes else None
        if box is not None and (box.connecting is not None or box.queues[lane]):
            return self._queue(peer, box, lane, Parcel(envelope, body, deadline_at), surely)
        outcome = self._hand_over(peer, lane, envelope, body, deadline_at)
        if outcome is SendOutcome.QUEUED:
            return outcome
        parcel = Parcel(envelope, body, deadline_at)
        if outcome is SendOutcome.FULL and surely:
            box = self._boxes.setdefault(peer, _Outbox())
            outcome = self._queue(peer, box, lane, parcel, surely)
            self._retry_soon(peer, box)
        elif outcome is SendOutcome.NO_LINK and self._may_connect(peer, endpoint):
            self._drop(peer)  # what it holds waited for room on the link that is gone
            box = self._boxes[peer] = _Outbox()
            box.connecting = asyncio.get_running_loop().create_task(self._connect(peer, endpoint, box))
            self._tasks[box.connecting] = None
            box.connecting.add_done_callback(self._tasks.pop)
            outcome = self._queue(peer, box, lane, parcel, surely)
        return outcome

    def _check_size(self, envelope: Envelope, body: Sequence[Frame]) -> None:
        size = 0
        for frame in body:
            size += len(frame) if isinstance(frame, bytes) else memoryview(frame).nbytes
        if size > self._limits.message_max_bytes:
            bound = self._limits.message_max_bytes
            raise MessageTooLarge(
                f"{envelope.tag} has {size} bytes, expected at most {bound} (limits.message_max_bytes)"
            )

    def _may_connect(self, peer: PeerId, endpoint: str) -> bool:
        return bool(endpoint) and peer not in self._replaced and not self._closed

    def _queue(self, peer: PeerId, box: _Outbox, lane: Lane, parcel: Parcel, surely: bool) -> SendOutcome:
        if len(box.queues[lane]) < self._limits.message_queue_frames:
            box.queues[lane].append(parcel)
            return SendOutcome.QUEUED
        if surely:
            self.cut(peer)
        return SendOutcome.FULL

    def _hand_over(
        self, peer: PeerId, lane: Lane, envelope: Envelope, body: Sequence[Frame], deadline_at: float | None
    ) -> SendOutcome:
        if deadline_at is not None:
            remaining_s = deadline_at - asyncio.get_running_loop().time()
            if remaining_s <= 0:
                self.counters["expired_before_sending"] += 1
                return SendOutcome.QUEUED
            envelope.deadline_ms = max(1, int(remaining_s * 1000))
        else:
            envelope.deadline_ms = NO_DEADLINE
        return self._transport.send(peer, lane, [encode_envelope(envelope), *body])

    async def _connect(self, peer: PeerId, endpoint: str, box: _Outbox) -> None:
        try:
            found = await self._transport.connect(endpoint, timeout_s=self._limits.connect_timeout_s)
        except TransportError as error:
            self._give_up(peer, box, str(error))
            return
        except Exception as error:
            # A bug in the transport; those who wait for the link must still not wait for ever.
            log.exception("connecting failed", peer=str(peer), endpoint=endpoint)
            self._give_up(peer, box, repr(error))
            return
        if found != peer:
            self._give_up(peer, box, f"at {endpoint} lives {found}, not {peer}")
            return
        self._endpoints[peer] = endpoint
        self.on_peer_up(peer)

    def _give_up(self, peer: PeerId, box: _Outbox, why: str) -> None:
        if self._boxes.get(peer) is box:
            del self._boxes[peer]
            box.connecting = None
            self._lose(peer, box)
            self._on_unreachable(peer, why)

    def _drop(self, peer: PeerId) -> None:
        box = self._boxes.pop(peer, None)
        if box is not None:
            box.cancel()
            self._lose(peer, box)

    def _lose(self, peer: PeerId, box: _Outbox) -> None:
        for queue in box.queues.values():
            for parcel in queue:
                self._on_lost(peer, parcel.envelope)

    def on_peer_up(self, peer: PeerId) -> None:
        """The link is up: send what has waited for it before anything else."""
        self._replaced.pop(peer, None)  # a peer that has a link has not been replaced
        box = self._boxes.get(peer)
        if box is not None and box.connecting is not None and not box.cut:
            # The connecting task may be the caller; if it is not, nothing is left for it but to return.
            box.connecting = None
            self._on_sent(peer)
            self._drain(peer, box)

    def _drain(self, peer: PeerId, box: _Outbox) -> None:
        box.retry = None
        if self._boxes.get(peer) is not box:
            return
        for lane, queue in box.queues.items():
            while queue:
                outcome = self._hand_over(peer, lane, *queue[0])
                if outcome is SendOutcome.NO_LINK:
                    return  # on_peer_down is on its way and clears the box
                if outcome is SendOutcome.FULL:
                    break
                queue.popleft()
        if any(box.queues.values()):
            self._retry_soon(peer, box)
        else:
            del self._boxes[peer]

    def _retry_soon(self, peer: PeerId, box: _Outbox) -> None:
        if box.retry is None:
            box.retry = asyncio.get_running_loop().call_later(_RETRY_S, self._drain, peer, box)

    def cut(self, peer: PeerId) -> None:
        """Break the link to a peer that does not take what must arrive, or that sends what cannot be read."""
        self.counters["links_cut"] += 1
        box = self._boxes.get(peer)
        if box is None or box.connecting is None:
            self._transport.disconnect(peer, DownReason.UNREACHABLE)
        elif not box.cut:
            # Called later, as for a lost link: a sender must not be called back from within its own call.
            box.cut = True
            asyncio.get_running_loop().call_soon(self._break_off, peer, box)

    def _break_off(self, peer: PeerId, box: _Outbox) -> None:
        if self._boxes.get(peer) is box:
            box.cancel()
            self._give_up(peer, box, f"the link to {peer} was cut before it was up")
            self._transport.disconnect(peer, DownReason.UNREACHABLE)  # it may have come up meanwhile

    def on_peer_down(self, peer: PeerId, reason: DownReason) -> None:
        """The link is lost, and what was queued with it; a peer that was replaced is not connected to again."""
        self._drop(peer)
        if reason is DownReason.REPLACED:
            self._replaced[peer] = None
            while len(self._replaced) > self._limits.names_remembered:
                del self._replaced[next(iter(self._replaced))]

    def close(self) -> None:
        self._closed = True
        for task in list(self._tasks):
            task.cancel()
        for box in self._boxes.values():
            box.cancel()
        self._boxes.clear()
