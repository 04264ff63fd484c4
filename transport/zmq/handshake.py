"""The handshake by which two processes become linked, even when both dial at once.

    dialer                                   listener
      HELLO    ── signal lane ──────────────▶  version, cluster, codec, fenced?      ── REFUSED(why)
      ◀──────── signal lane ── WELCOME         who I am, where my other sockets are
      CONFIRM  ── every other socket ───────▶  "I have no live link to you"          ── YIELD
      ◀──────── every socket ─── READY         the link is up here; and there when this arrives

Invariants
- A link uses three connections, and more if both have several sockets for the bulk lane (``limits.bulk_sockets``): as
  many as the end with fewer has. It is up at the listener when CONFIRM has come on all, at the dialer with READY.
- If both dial at once, the dial of the smaller PeerId wins, and the other side yields.
- A CONFIRM names the last dial of the listener that the dialer has accepted. If the listener's live link is a later
  one, the CONFIRM was sent before that link and yields to it; else the dialer has lost the link, and so does the
  listener.
- Each message on the wire begins with a head of 9 bytes, kind and sequence number; only data is numbered, from 1.
- Data travels as DATA, a head and its frames, or in a PACK: one frame with the head of its first message and then, for
  each message, the number of its frames, their sizes and their bytes.
"""

from __future__ import annotations

import enum
import struct
from typing import Annotated, Any, Final, TypeVar, cast

import msgspec

from transport.address import PeerId
from transport.errors import MalformedInput
from transport.transport import DownReason, Frame

PROTOCOL_VERSION: Final = 3
CODEC: Final = "msgpack+ext12/1"
HEAD: Final = struct.Struct("<BQ")
FRAMES_MAX: Final = 4096
SOCKETS_MAX: Final = 10
"""Most sockets of a link: signal, message, and eight of the bulk lane."""

NAME_IS_TAKEN: Final = "this name is taken"
"""Beginning of a refusal that may be temporary: the other peer of that name may be gone in a moment."""

Text = Annotated[str, msgspec.Meta(max_length=512)]
Name = Annotated[str, msgspec.Meta(min_length=1, max_length=200)]
Number = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]


class Mark(enum.IntEnum):
    """The first byte of every message, which says its kind."""

    DATA = 1
    HELLO = 2
    WELCOME = 3
    CONFIRM = 4
    READY = 5
    REFUSED = 6
    YIELD = 7
    GOODBYE = 8
    PROBE = 9
    """Test, by libzmq's result of the send, of whether the connection still exists; the receiver ignores it."""
    PACK = 10
    """Pack of small messages of one turn in one frame, numbered from the number in the head."""


class Hello(msgspec.Struct, array_like=True, frozen=True):
    """The dialer introduces itself."""

    version: Number
    codec: Text
    cluster: Text
    name: Name
    incarnation: Number
    endpoint: Text
    dial: Number
    role: Text = ""

    @property
    def peer(self) -> PeerId:
        return PeerId(self.name, self.incarnation)


class Welcome(msgspec.Struct, array_like=True, frozen=True):
    """The listener answers. ``lanes`` are its sockets' endpoints, signal and message first, the others are the
    bulk lane's; ``*`` stands for the dialed host.
    """

    name: Name
    incarnation: Number
    endpoint: Text
    lanes: Annotated[list[Text], msgspec.Meta(min_length=3, max_length=SOCKETS_MAX)]
    role: Text = ""

    @property
    def peer(self) -> PeerId:
        return PeerId(self.name, self.incarnation)


class Confirm(msgspec.Struct, array_like=True, frozen=True):
    """The dialer confirms; ``last_seen`` is the listener's latest dial that the dialer has accepted."""

    last_seen: Number
    sockets: Annotated[int, msgspec.Meta(ge=3, le=SOCKETS_MAX)] = 3
    """Number of connections of the link; the dialer confirms on each but the first."""


class Refusal(msgspec.Struct, array_like=True, frozen=True):
    """The listener refuses; the reason is for people."""

    why: Text


class Goodbye(msgspec.Struct, array_like=True, frozen=True):
    """The last message on a socket."""

    reason: DownReason


T = TypeVar("T", Hello, Welcome, Confirm, Refusal, Goodbye)
_encoder = msgspec.msgpack.Encoder()
_decoders: dict[type, msgspec.msgpack.Decoder[Any]] = {
    kind: msgspec.msgpack.Decoder(kind) for kind in (Hello, Welcome, Confirm, Refusal, Goodbye)
}


def control(mark: Mark, body: msgspec.Struct | None = None) -> list[Frame]:
    """A handshake message: the head and the body, if any."""
    head = HEAD.pack(mark, 0)
    return [head] if body is None else [head, _encoder.encode(body)]


def read_head(frames: list[Frame]) -> tuple[int, int]:
    """Kind and sequence number.

    Raises:
        MalformedInput: no head, or too many frames.
    """
    if not frames or len(frames[0]) != HEAD.size:
        raise MalformedInput("a message without a head")
    if len(frames) > FRAMES_MAX:
        raise MalformedInput(f"a message of {len(frames)} frames, at most {FRAMES_MAX} are allowed")
    return HEAD.unpack(frames[0])


def read_control(kind: type[T], frames: list[Frame]) -> T:
    """The body of a handshake message.

    Raises:
        MalformedInput: the frames hold no such message.
    """
    if len(frames) != 2:
        raise MalformedInput(f"a {kind.__name__} of {len(frames)} frames, expected 2")
    try:
        return cast("T", _decoders[kind].decode(frames[1]))
    except (msgspec.DecodeError, ValueError, TypeError, RecursionError) as error:
        raise MalformedInput(f"a {kind.__name__} that could not be read: {error}") from error


def routing_id(peer: PeerId, dial: int) -> bytes:
    """The routing id of a dial: never used twice, as neither incarnations nor dial numbers are."""
    return f"{peer.name}#{peer.incarnation:x}/{dial}".encode()


def objection(hello: Hello, cluster: str, peer: PeerId) -> str | None:
    """Reason why a HELLO must be refused, as a sentence for its sender; None: it need not be."""
    if hello.version != PROTOCOL_VERSION:
        older = hello.name if hello.version < PROTOCOL_VERSION else peer.name
        return (
            f"{peer.name} speaks protocol version {PROTOCOL_VERSION}, {hello.name} version {hello.version}; "
            f"{older} is older: install the same version on both"
        )
    if hello.codec != CODEC:
        return f"{peer.name} encodes as {CODEC!r}, {hello.name} as {hello.codec!r}: install the same version on both"
    if hello.cluster != cluster:
        return f"{peer.name} belongs to cluster {cluster!r}, {hello.name} to {hello.cluster!r}"
    if hello.peer == peer:
        return f"{peer.name} has dialed itself"
    return None
