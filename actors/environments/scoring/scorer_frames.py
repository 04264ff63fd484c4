"""What travels between the pool and its processes: a 4-byte big-endian length and a MessagePack value.

``scorer_process.py`` says which values.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, BinaryIO, cast

import msgpack

Verdict = tuple[float | None, str, list[float], bool]
"""A reward, or why there is none; what several rewards were; whether the response was cut for its length."""
Send = Callable[[object], None]
Answer = Callable[[dict[str, Any]], None]
"""Answers one request, or raises."""


def read_frame(stream: BinaryIO) -> Any:
    head = stream.read(4)
    if len(head) < 4:
        raise EOFError
    return msgpack.unpackb(stream.read(int.from_bytes(head, "big")))


def frame(value: object) -> bytes:
    """``value`` as one frame of bytes."""
    body = cast("bytes", msgpack.packb(value))
    return len(body).to_bytes(4, "big") + body


def as_text(value: str) -> str:
    """What MessagePack carries of ``value``: half a surrogate pair is written out."""
    return value.encode("utf-8", "backslashreplace").decode()
