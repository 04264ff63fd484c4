"""The header frame of every message: sender, receiver, kind, and the request that it belongs to.

Invariants
- A message on the wire is ``[envelope, body, raw arrays…]``; a router reads the envelope only.
- The envelope is a MessagePack array in field order; fields are only ever added at the end, with a default.
- Deadlines travel as the remaining time (``deadline_ms``): clocks of two hosts are not compared.
- Malformed bytes raise MalformedEnvelope, and nothing else.
"""

from __future__ import annotations

import enum
from typing import Annotated, Final

import msgspec

from transport.errors import MalformedEnvelope
from transport.transport import Frame

ENVELOPE_VERSION: Final = 1
ANY_INCARNATION: Final = 0
NO_DEADLINE: Final = -1
NAME_MAX_CHARS: Final = 256

Name = Annotated[str, msgspec.Meta(max_length=NAME_MAX_CHARS)]
Count = Annotated[int, msgspec.Meta(ge=0)]


class Kind(enum.IntEnum):
    """Says what a message is to the actor system; its ``tag`` says what it is to an actor."""

    TELL = 1
    ASK = 2
    REPLY = 3
    """The handler's answer to the ask with the same ``request_id``."""
    ERROR = 4
    """The handler raised; the body is the typed error."""
    REFUSED = 5
    """The message was not handled: mailbox full, draining, unknown actor, stale incarnation or term."""
    STREAM_OPEN = 6
    STREAM_ITEM = 7
    STREAM_END = 8
    CREDIT = 9
    CANCEL = 10
    WATCH = 11
    UNWATCH = 12
    DOWN = 13


class Envelope(msgspec.Struct, array_like=True, gc=False, kw_only=True):
    """Holds a message's header. ``source`` and ``target`` are actor names; the link knows the peers."""

    version: int = ENVELOPE_VERSION
    kind: Kind
    source: Name = ""
    target: Name = ""
    target_incarnation: Count = ANY_INCARNATION
    """Incarnation of the target's process that the sender means; 0 means any."""
    request_id: Count = 0
    """Number that is unique per sending process; asks, streams and watches are answered under it. 0 for a tell."""
    attempt: Count = 0
    """Unused field, as are ``term``, ``job`` and the two ids: they keep the other fields in their places."""
    term: Count = 0
    deadline_ms: Annotated[int, msgspec.Meta(ge=-1)] = NO_DEADLINE
    """Milliseconds that remain until the deadline at the moment of sending; -1 means no deadline."""
    job: Name = ""
    trace_id: Count = 0
    parent_id: Count = 0
    tag: Name = ""
    """Tag of the body's message class, see ``actors/core/message.py``; empty where the kind is enough."""
    number: Count = 0
    """Offset of a stream item, or the number of items that a credit or the opening of a stream grants."""
    number_bytes: Count = 0
    """Bytes that a credit or the opening of a stream grants."""


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Envelope)


def encode_envelope(envelope: Envelope) -> bytes:
    return _encoder.encode(envelope)


def decode_envelope(frame: Frame) -> Envelope:
    """Decode the header frame.

    Raises:
        MalformedEnvelope: the bytes are no envelope, a field is out of range, or the version differs.
    """
    try:
        envelope = _decoder.decode(frame)
    except (msgspec.DecodeError, ValueError, TypeError, RecursionError) as error:
        raise MalformedEnvelope(f"a header of {memoryview(frame).nbytes} bytes could not be read: {error}") from error
    if envelope.version != ENVELOPE_VERSION:
        older = "the sender" if envelope.version < ENVELOPE_VERSION else "this process"
        raise MalformedEnvelope(f"envelope version {envelope.version}, expected {ENVELOPE_VERSION}: {older} is older")
    return envelope
