"""What a leader has its followers do, as bytes: the calls of a backend, each with this rank's part.

    Begin ─▶ Begun        Score ─▶ Scored        Values ─▶ Valued        Accumulate ─▶ Accumulated
    Step ─▶ Stepped       WriteRows, Save, Restore ─▶ Finished           any of them ─▶ Failed

bytes    = number of frames, length of each, the frames (``transport/codec.py``: structure first, arrays after it)
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Final, TypeVar

import msgspec
import numpy as np

from actors.protocol.training import (
    Accumulate,
    Accumulated,
    Failed,
    Finished,
    MicroBatch,
    Save,
    Score,
    Scored,
    Step,
    Stepped,
    Valued,
    Values,
)
from actors.ranks.meeting_place import remove_meeting_place
from transport.codec import decode_body, encode_body
from transport.errors import MalformedBody
from transport.transport import Frame

T = TypeVar("T")

_COUNT: Final = struct.Struct("<I")


class Meeting(msgspec.Struct, frozen=True):
    """Says where the ranks of one life meet, and how they share the model."""

    directory: str
    """On one machine: a directory of the leader's, private to its user, for the file of the store."""
    host: str
    """Else: the address of the leader's machine, and the port at which its store listens."""
    port: int
    size: int
    replicas: int
    """Copies of the whole weights, each sharded over ``size / replicas`` ranks."""
    offload: bool
    """Whether weights and moments are kept in the CPU's memory."""
    timeout_s: float
    """Limit of a single exchange between ranks."""


def remove_meeting(meeting: Meeting) -> None:
    """Once the life is over. Any rank may: a leader that was killed did not."""
    if meeting.directory:
        remove_meeting_place(Path(meeting.directory))


class Begin(msgspec.Struct, frozen=True, tag="begin"):
    """The first order of a life; Begun."""

    spec: str
    """BackendSpec as JSON."""
    meeting: Meeting


class WriteRows(msgspec.Struct, frozen=True, tag="write_rows"):
    """Write this rank's rows of the weights into the file ``path``, where the segment has them; Finished."""

    path: str


class Restore(msgspec.Struct, frozen=True, tag="restore"):
    """Take over what was saved in ``directory``; Finished."""

    directory: str
    kind: str
    """Kind of backend that has saved it."""
    steps: int
    """Steps of the backend, and those of its optimizer, which are fewer where steps were skipped."""
    optimizer_steps: int
    critic_steps: int = 0
    """Steps of the critic's optimizer, which are more where it has warmed up."""


class Begun(msgspec.Struct, frozen=True, tag="begun"):
    host: str
    """This rank's machine (``actors/weights/segments.py::host_id``)."""


Order = Begin | Score | Values | Accumulate | Step | WriteRows | Save | Restore
Answer = Begun | Scored | Valued | Accumulated | Stepped | Finished | Failed


def nothing() -> MicroBatch:
    """The part of a rank for which there is none: two tokens, of which nothing is to be learned."""
    zeros = np.zeros((1, 2), np.float32)
    return MicroBatch(
        input_ids=np.zeros((1, 2), np.int32),
        lengths=np.full(1, 2, np.int32),
        prompt_lengths=np.ones(1, np.int32),
        behaviour_logprobs=zeros,
        advantages=zeros,
        loss_weight=zeros,
    )


def encode(value: Order | Answer) -> bytes:
    frames = [memoryview(frame).cast("B") for frame in encode_body(value)]
    head = _COUNT.pack(len(frames)) + struct.pack(f"<{len(frames)}Q", *map(len, frames))
    return b"".join([head, *frames])


def decode_order(data: bytes) -> Order:
    """Raises MalformedBody when ``data`` is no order."""
    return decode_body(Order, _frames(data))  # type: ignore[arg-type]  a union is none of type's


def decode_answer(data: bytes) -> Answer:
    """Raises MalformedBody when ``data`` is no answer."""
    return decode_body(Answer, _frames(data))  # type: ignore[arg-type]


def is_failure(answer: bytes) -> bool:
    """Whether a rank has failed: the others may be in an exchange with it."""
    return isinstance(decode_answer(answer), Failed)


def _frames(data: bytes) -> Sequence[Frame]:
    try:
        (count,) = _COUNT.unpack_from(data)
        if not 0 < count <= len(data) // 8:
            raise MalformedBody(f"{count} frames, and {len(data)} bytes are there")
        lengths = struct.unpack_from(f"<{count}Q", data, _COUNT.size)
    except struct.error as error:
        raise MalformedBody(f"{len(data)} bytes are too few: {error}") from error
    at = _COUNT.size + 8 * count
    if at + sum(lengths) != len(data):
        raise MalformedBody(f"frames of {sum(lengths)} bytes, and {len(data) - at} are there")
    frames: list[Frame] = []
    for length in lengths:
        frames.append(memoryview(data)[at : at + length])
        at += length
    return frames
