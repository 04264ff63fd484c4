"""Packs small messages of one turn of the loop into one frame, since a frame costs more than most of them.

    PACK = head (mark, number of the first message) · message · message · …
    message = number of frames (1 byte) · size of each (4 bytes) · their bytes

Invariants
- Packing copies, so the sender may change its buffers at once.
- A pack whose sizes do not add up to its length is malformed as a whole; none of it is delivered.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Final

from transport.errors import MalformedInput
from transport.transport import Frame
from transport.zmq.handshake import HEAD, Mark

MESSAGE_MAX_BYTES: Final = 4096
"""Size beyond which copying costs as much as frames of their own."""
FRAMES_MAX: Final = 8
PACK_MAX_BYTES: Final = 16384
PACK_MAX_MESSAGES: Final = 64
"""Most messages in a pack: a receiver takes a pack at once, and so many handlers may begin in one loop turn."""

_SIZES: Final = tuple(struct.Struct("<B" + "I" * count) for count in range(FRAMES_MAX + 1))


def packed(frames: Sequence[Frame]) -> bytes | None:
    """One message in the form that it has in a pack; None if it is too large for one."""
    sizes = [len(frame) for frame in frames]
    if len(sizes) > FRAMES_MAX or sum(sizes) > MESSAGE_MAX_BYTES:
        return None
    return b"".join((_SIZES[len(sizes)].pack(len(sizes), *sizes), *frames))


def pack(first: int, messages: Sequence[bytes]) -> bytes:
    """The frame that carries ``messages``, which are numbered from ``first``."""
    return b"".join((HEAD.pack(Mark.PACK, first), *messages))


def unpack(frame: Frame) -> list[list[Frame]]:
    """The frames of each message of a pack.

    Raises:
        MalformedInput: a size leads beyond the end, or there are too many messages or frames.
    """
    messages: list[list[Frame]] = []
    at, end = HEAD.size, len(frame)
    while at < end:
        count = frame[at]
        if count > FRAMES_MAX or at + _SIZES[count].size > end or len(messages) >= PACK_MAX_MESSAGES:
            raise MalformedInput(f"message {len(messages)} of a pack of {end} bytes could not be read")
        sizes = _SIZES[count].unpack_from(frame, at)
        at += _SIZES[count].size
        frames: list[Frame] = []
        for size in sizes[1:]:
            frames.append(frame[at : at + size])
            at += size
        messages.append(frames)
    if at != end:
        raise MalformedInput(f"a pack of {end} bytes ends in the middle of a message")
    return messages
