"""Frames between the pool and its processes: a 4-byte big-endian length and a MessagePack value.

``scorer_process.py`` lists the values.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, BinaryIO, NamedTuple, cast

import msgpack

Send = Callable[[object], None]
Answer = Callable[[dict[str, Any]], None]
"""Answers one request, or raises."""


class ScorerVerdict(NamedTuple):
    """Holds what a scorer says of one response: a reward or, if that is None, why there is none."""

    reward: float | None
    reason: str = ""
    parts: tuple[float, ...] = ()
    """Rewards whose weighted sum is ``reward``, where the job has several."""
    cut: bool = False
    """Whether the text was too long for a reward model, which read it without its beginning."""


def read_frame(stream: BinaryIO) -> Any:
    head = stream.read(4)
    if len(head) < 4:
        raise EOFError
    return msgpack.unpackb(stream.read(int.from_bytes(head, "big")))


def frame(value: object) -> bytes:
    body = cast("bytes", msgpack.packb(value))
    return len(body).to_bytes(4, "big") + body


def as_text(value: str) -> str:
    """``value`` as MessagePack can carry it: half a surrogate pair becomes an escape sequence."""
    return value.encode("utf-8", "backslashreplace").decode()
