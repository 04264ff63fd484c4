"""The header frame of every message: who says what to whom, and what it belongs to.

Invariants
- A message on the wire is ``[envelope, body, raw arrays…]``; a router reads the envelope only.
- The envelope is a MessagePack array in field order; fields are only ever added at the end, with a default.
- Times travel as what remains (``deadline_ms``), never as a time of day: clocks of two hosts are not compared.
- Bytes that do not fit raise MalformedEnvelope, and nothing else.
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
    """The kind says what a message is to the kernel; what it is to an actor, its ``tag`` does."""

    TELL = 1
    ASK = 2
    REPLY = 3
    """The handler's answer to the ask with the same ``request_id``."""
    ERROR = 4
    """The handler raised; the body is the error, typed."""
    REFUSED = 5
    """Not executed: mailbox full, draining, unknown actor, stale incarnation or term."""
    STREAM_OPEN = 6
    STREAM_ITEM = 7
    STREAM_END = 8
    CREDIT = 9
    CANCEL = 10
    WATCH = 11
    UNWATCH = 12
    DOWN = 13


class Envelope(msgspec.Struct, array_like=True, gc=False, kw_only=True):
    """An envelope is a message's header. ``source`` and ``target`` are actor names; the link knows the peers."""

    version: int = ENVELOPE_VERSION
    kind: Kind
    source: Name = ""
    target: Name = ""
    target_incarnation: Count = ANY_INCARNATION
    """The life of the target's process that the sender means; 0 means any."""
    request_id: Count = 0
    """Number that is unique per sending process; asks, streams and watches are answered under it. 0 for a tell."""
    attempt: Count = 0
    """Number that nobody sets any more, as ``term``, ``job`` and the two ids: they keep the places of the others."""
    term: Count = 0
    deadline_ms: Annotated[int, msgspec.Meta(ge=-1)] = NO_DEADLINE
    """Time that remains until the deadline at the moment of sending; -1 means no deadline."""
    job: Name = ""
    trace_id: Count = 0
    parent_id: Count = 0
    tag: Name = ""
    """The message class of the body, see ``actors/core/message.py``; empty where the kind says it all."""
    number: Count = 0
    """Offset of a stream item, or the number of items that a credit or the opening of a stream grants."""
    number_bytes: Count = 0
    """Bytes that a credit or the opening of a stream grants."""


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Envelope)


def encode_envelope(envelope: Envelope) -> bytes:
    """Encode the header frame."""
    return _encoder.encode(envelope)


def decode_envelope(frame: Frame) -> Envelope:
    """Decode the header frame.

    Raises:
        MalformedEnvelope: the bytes are no envelope, a field is out of range, or the version is another one.
    """
    try:
        envelope = _decoder.decode(frame)
    except (msgspec.DecodeError, ValueError, TypeError, RecursionError) as error:
        raise MalformedEnvelope(f"a header of {memoryview(frame).nbytes} bytes could not be read: {error}") from error
    if envelope.version != ENVELOPE_VERSION:
        older = "the sender" if envelope.version < ENVELOPE_VERSION else "this process"
        raise MalformedEnvelope(f"envelope version {envelope.version}, expected {ENVELOPE_VERSION}: {older} is older")
    return envelope
