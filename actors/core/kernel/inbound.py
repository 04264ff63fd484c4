"""Handles messages from other processes: reads the header, decides, and only then decodes the body.

Invariants
- Nothing that arrives can raise out of here: what cannot be read is counted and refused, and a peer that sends
  ``limits.malformed_max`` such messages is cut off.
- A message that will not be executed is refused before its body is decoded. One that its sender may not send
  (``senders.py``) is refused before the sender learns anything about the target.
- Nothing is dropped without an answer, if the sender can be told: a refused tell comes back as REFUSED with id 0.
- An answer is taken only from the process that was asked, since ids are numbers from 1, which anybody could guess.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any, cast

import structlog

from actors.core.errors import RefusalReason
from actors.core.kernel.answers import Caller, Refusal, TargetGone
from actors.core.kernel.death_watch import DeathWatch
from actors.core.kernel.delivery import Delivery, StreamWindow
from actors.core.kernel.port import Port
from actors.core.kernel.stream_table import StreamTable
from actors.core.kernel.streams import Stream
from actors.core.message import class_of
from actors.core.senders import Guard
from actors.core.watch import Gone, gone_by_link
from transport.address import ActorAddress, PeerId
from transport.codec import decode_body
from transport.envelope import ANY_INCARNATION, NO_DEADLINE, Envelope, Kind, decode_envelope
from transport.errors import MalformedBody, MalformedEnvelope, MalformedInput
from transport.rarely import worth_a_line
from transport.transport import DownReason, Frame, Lane

log = structlog.get_logger("headrace.actors")

_Receive = Callable[[PeerId, Lane, Envelope, list[Frame]], None]


class Inbound:
    """The transport hands every message to this object, and tells it when a link comes or goes."""

    def __init__(self, port: Port, deaths: DeathWatch, streams: StreamTable, guard: Guard | None = None) -> None:
        self._port = port
        self._deaths = deaths
        self._streams = streams
        self._incarnation = port.own.incarnation
        self._strikes: Counter[PeerId] = Counter()
        self._guard = guard
        self._forbidden: Counter[PeerId] = Counter()
        self._by_kind: dict[Kind, _Receive] = {
            Kind.TELL: self._message,
            Kind.ASK: self._message,
            Kind.STREAM_OPEN: self._message,
            Kind.REPLY: self._answer,
            Kind.ERROR: self._answer,
            Kind.REFUSED: self._answer,
            Kind.DOWN: self._down,
            Kind.STREAM_ITEM: self._item,
            Kind.STREAM_END: self._stream_end,
            Kind.CREDIT: self._credit,
            Kind.CANCEL: self._cancel,
            Kind.WATCH: self._watch,
            Kind.UNWATCH: self._unwatch,
        }

    def on_frames(self, peer: PeerId, lane: Lane, frames: list[Frame]) -> None:
        try:
            if not frames:
                raise MalformedEnvelope("a message without frames")
            envelope = decode_envelope(frames[0])
            self._by_kind[envelope.kind](peer, lane, envelope, frames[1:])
        except MalformedInput as error:
            self._strike(peer, str(error))
        except Exception:
            # The transport's drain must go on whatever is wrong here; the count shows it, the log says where.
            self._port.count("internal_errors")
            log.exception("a message could not be routed", peer=str(peer))

    def on_peer_up(self, peer: PeerId) -> None:
        self._port.links.on_peer_up(peer)

    def on_peer_down(self, peer: PeerId, reason: DownReason) -> None:
        self._strikes.pop(peer, None)
        self._forbidden.pop(peer, None)
        self._port.links.on_peer_down(peer, reason)
        self._port.peer_gone(peer, f"the link to {peer} is down ({reason.value})", gone_by_link(reason))

    def _strike(self, peer: PeerId, why: str) -> None:
        self._port.count("malformed")
        self._strikes[peer] += 1
        if self._strikes[peer] == 1:
            log.warning("a message could not be read", peer=str(peer), why=why)
        if self._strikes[peer] == self._port.limits.malformed_max:
            self._port.count("peers_cut_off")
            log.error("a peer sends what cannot be read and is cut off", peer=str(peer))
            self._port.links.cut(peer)

    def _message(self, peer: PeerId, lane: Lane, envelope: Envelope, body: list[Frame]) -> None:
        refusal = self._try_message(peer, lane, envelope, body)
        if refusal is None:
            return
        kind = "tells" if envelope.kind is Kind.TELL else "asks"
        self._port.count(f"{kind}_refused.{refusal.reason}")
        self._port.note_refused(refusal, envelope.tag, f"{envelope.source}@{peer}", envelope.target)
        self._port.send_answer(Caller(peer, envelope.request_id), Kind.REFUSED, refusal, lane)

    def _try_message(self, peer: PeerId, lane: Lane, envelope: Envelope, body: list[Frame]) -> Refusal | None:
        port = self._port
        life = envelope.target_incarnation
        if life not in (self._incarnation, ANY_INCARNATION):
            return Refusal(reason=RefusalReason.OLDER_LIFE, detail=f"this is {port.own}")
        kind = class_of(envelope.tag)
        if kind is None:
            return Refusal(reason=RefusalReason.UNKNOWN_TAG, detail=f"{envelope.tag!r} is not known here")
        if self._guard is not None and (why := self._guard(peer, envelope.tag, envelope.target)) is not None:
            return self._forbid(peer, why)
        stream = envelope.kind is Kind.STREAM_OPEN
        admitted = port.admit(envelope.target, kind, stream=stream)
        if isinstance(admitted, Refusal):
            return admitted
        if envelope.deadline_ms == 0:
            return Refusal(reason=RefusalReason.EXPIRED)
        try:
            message = decode_body(kind, body or [b""])
        except MalformedBody as error:
            self._strike(peer, str(error))
            return Refusal(reason=RefusalReason.MALFORMED, detail=str(error))
        sender = ActorAddress(envelope.source, peer, port.links.endpoint_of(peer)) if envelope.source else None
        caller = None if envelope.kind is Kind.TELL else Caller(peer, envelope.request_id)
        deadline_at = None
        if envelope.deadline_ms != NO_DEADLINE:
            deadline_at = port.now() + envelope.deadline_ms / 1000
        window = self._window(envelope) if stream else None
        cell, handler = admitted
        cell.mailbox.put(Delivery(message, envelope.tag, handler, sender, caller, deadline_at, lane, window))
        return None

    def _forbid(self, peer: PeerId, why: str) -> Refusal:
        """Refuse a message that ``peer`` may not send; logs its first, tenth, hundredth … attempt."""
        self._port.count("forbidden")
        self._forbidden[peer] += 1
        attempts = self._forbidden[peer]
        if worth_a_line(attempts):
            log.warning("a message that its sender may not send is refused", peer=str(peer), why=why, attempts=attempts)
        return Refusal(reason=RefusalReason.NOT_ALLOWED, detail=why)

    def _window(self, envelope: Envelope) -> StreamWindow:
        timeout_s = self._port.limits.ask_timeout_s
        if envelope.deadline_ms != NO_DEADLINE:
            timeout_s = envelope.deadline_ms / 1000
        return StreamWindow(envelope.number, envelope.number_bytes, timeout_s)

    def _answer(self, peer: PeerId, lane: Lane, envelope: Envelope, body: list[Frame]) -> None:
        if envelope.kind is Kind.REFUSED and envelope.request_id == 0:
            refusal = decode_body(Refusal, body or [b""])
            self._port.count(f"tells_refused.{refusal.reason}")
            log.warning("a tell was refused", peer=str(peer), why=str(refusal.reason), detail=refusal.detail)
            return
        waiter = self._port.requests.get(envelope.request_id)
        if waiter is None or waiter.target.peer != peer:
            self._port.count("late_replies")
            return
        kind = class_of(envelope.tag)
        try:
            message = None if kind is None else decode_body(kind, body or [b""])
        except MalformedBody:
            self._port.settle(envelope.request_id, envelope.kind, None, 0)
            raise
        self._port.settle(envelope.request_id, envelope.kind, message, envelope.number)

    def _down(self, peer: PeerId, lane: Lane, envelope: Envelope, body: list[Frame]) -> None:
        if self._deaths.is_held(envelope.request_id, peer):
            gone = decode_body(TargetGone, body or [b""])
            self._deaths.end(envelope.request_id, gone.reason, gone.detail, permanent=gone.permanent)
        else:
            self._answer(peer, lane, envelope, body)

    def _item(self, peer: PeerId, lane: Lane, envelope: Envelope, body: list[Frame]) -> None:
        stream = self._port.requests.get(envelope.request_id)
        if not isinstance(stream, Stream) or stream.target.peer != peer:
            return
        kind = class_of(envelope.tag)
        if kind is not stream.reply_kind or not body:
            self._streams.spoil(cast("Stream[Any]", stream))
            return
        try:
            item = decode_body(kind, body)
        except MalformedBody:
            self._streams.spoil(cast("Stream[Any]", stream))
            raise
        size = sum(memoryview(frame).nbytes for frame in body)
        self._streams.take_item(envelope.request_id, item, envelope.number, size)

    def _stream_end(self, peer: PeerId, lane: Lane, envelope: Envelope, body: list[Frame]) -> None:
        waiter = self._port.requests.get(envelope.request_id)
        if waiter is None or waiter.target.peer != peer:
            self._port.count("late_replies")
        else:
            self._port.settle(envelope.request_id, Kind.STREAM_END, None, envelope.number)

    def _credit(self, peer: PeerId, lane: Lane, envelope: Envelope, body: list[Frame]) -> None:
        self._streams.credit(Caller(peer, envelope.request_id), envelope.number, envelope.number_bytes)

    def _cancel(self, peer: PeerId, lane: Lane, envelope: Envelope, body: list[Frame]) -> None:
        self._port.cancel(envelope.target, Caller(peer, envelope.request_id))

    def _watch(self, peer: PeerId, lane: Lane, envelope: Envelope, body: list[Frame]) -> None:
        if envelope.target in self._port.cells:
            self._deaths.add_watcher(envelope.target, Caller(peer, envelope.request_id))
            return
        gone = TargetGone(reason=Gone.UNKNOWN_ACTOR, detail=f"no {envelope.target!r} at {self._port.own}")
        self._port.send_answer(Caller(peer, envelope.request_id), Kind.DOWN, gone, Lane.MESSAGE)

    def _unwatch(self, peer: PeerId, lane: Lane, envelope: Envelope, body: list[Frame]) -> None:
        self._deaths.remove_watcher(envelope.target, Caller(peer, envelope.request_id))
