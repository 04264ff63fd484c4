"""A leader's orders to its followers, as bytes: the calls of a backend, each with the follower's part.

    Begin ─▶ Begun        ScoreCall ─▶ TokensScored       ValuesCall ─▶ Valued      AccumulateCall ─▶ Accumulated
    StepCall ─▶ Stepped   LearnCall ─▶ TargetsLearned      SealShare ─▶ Sealed      CopyOut ─▶ CopiedOut
    Measure ─▶ Measured
    WriteRows, WriteShare, SaveCall, Restore, DropSums, UseRecompute, Release, TakeBack ─▶ Finished
    any of them ─▶ CallFailed

bytes    = number of frames, length of each, the frames (``transport/codec.py``: structure first, arrays after it)
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final, TypeVar

import msgspec
import numpy as np

from actors.protocol.training import (
    AccumulateCall,
    Accumulated,
    CallFailed,
    DropSums,
    Finished,
    LearnCall,
    LossSpec,
    MicroBatch,
    SaveCall,
    ScoreCall,
    StepCall,
    Stepped,
    TargetsLearned,
    TokensScored,
    Valued,
    ValuesCall,
)
from actors.ranks.meeting_place import hold_meeting_place, remove_meeting_place
from actors.trainer.parking import Block
from actors.weights.segments import open_ours
from transport.codec import decode_body, encode_body
from transport.errors import MalformedBody
from transport.transport import Frame

T = TypeVar("T")

_COUNT: Final = struct.Struct("<I")


class Meeting(msgspec.Struct, frozen=True):
    """Says where the ranks of one life meet, and how they share the model."""

    directory: str
    """Directory for the store's file, private to the leader's user, if all ranks are on one machine; else empty."""
    host: str
    """Address of the leader's machine; without a ``directory`` its store listens there, at ``port``."""
    port: int
    size: int
    replicas: int
    """Copies of the whole weights, each sharded over ``size / replicas`` ranks."""
    context: int
    """Ranks that share each row, numbered one after another; 1: none do."""
    offload: bool
    """Whether weights and moments are kept in the CPU's memory."""
    timeout_s: float
    """Limit of a single exchange between ranks."""


def hold_meeting(meeting: Meeting) -> None:
    """Keep the store's directory for one more bundle of this process."""
    if meeting.directory:
        hold_meeting_place(Path(meeting.directory))


def remove_meeting(meeting: Meeting) -> None:
    """Remove the store's directory at the end of a life, unless another bundle of this process meets there.

    Any rank may: a leader that was killed has not.
    """
    if meeting.directory:
        remove_meeting_place(Path(meeting.directory))


class Begin(msgspec.Struct, frozen=True, tag="begin"):
    """The first order of a life, answered by Begun."""

    spec: str
    """BackendSpec as JSON."""
    meeting: Meeting


class WriteRows(msgspec.Struct, frozen=True, tag="write_rows"):
    """Write the rank's rows of the weights into the file ``path``, at their offsets in the segment."""

    path: str


class WriteShare(msgspec.Struct, frozen=True, tag="write_share"):
    """Write the rank's rows into its machine's share of the version whose segment is at ``path``."""

    path: str


class SealShare(msgspec.Struct, frozen=True, tag="seal_share"):
    """Give the share, which all ranks of the machine have written, its final name, if the rank is the first there."""

    path: str
    chunk_bytes: int


class Sealed(msgspec.Struct, frozen=True, tag="sealed"):
    hashes: tuple[bytes, ...]
    """Hashes of the share's chunks; none if another rank has sealed it."""


class Restore(msgspec.Struct, frozen=True, tag="restore"):
    """Load what was saved in ``directory``."""

    directory: str
    kind: str
    """Kind of backend that saved the checkpoint."""
    steps: int
    """Steps of the backend; ``optimizer_steps`` are fewer where steps were skipped."""
    optimizer_steps: int
    critic_steps: int = 0
    """Steps of the critic's optimizer, which are more after a critic's warmup."""
    optimizer: bool = True
    """Whether the optimizer's state stays as it was saved; else it begins anew."""


class UseRecompute(msgspec.Struct, frozen=True, tag="use_recompute"):
    """Let activations come to the backward pass in that way from now on."""

    way: str


class Measure(msgspec.Struct, frozen=True, tag="measure"):
    """Compute a micro-batch's gradients, drop them, and tell what memory that took."""

    batch: MicroBatch
    loss: LossSpec


class Measured(msgspec.Struct, frozen=True, tag="measured"):
    peak_bytes: int
    free_bytes: int
    seconds: float


class StoredFile(msgspec.Struct, frozen=True):
    """Says which file holds a part's stored copy, or will hold it."""

    path: str
    blocks: tuple[Block, ...]
    chunk_bytes: int
    hashes: tuple[bytes, ...] = ()
    """Digests of the chunks of all blocks; none yet where the copy is still to be made."""

    @property
    def memory(self) -> memoryview:
        """Raises OSError if the file is gone, or no file of ours."""
        with open_ours(Path(self.path), "r+b") as file:
            return memoryview(mmap.mmap(file.fileno(), 0))

    def hashes_by_block(self) -> Iterator[tuple[Block, tuple[bytes, ...]]]:
        first = 0
        for block in self.blocks:
            last = first + -(-block.length_bytes // self.chunk_bytes)
            yield block, self.hashes[first:last]
            first = last


class CopyOut(msgspec.Struct, frozen=True, tag="copy_out"):
    """Copy the rank's rows of each part of the state, by name, into its file."""

    files: dict[str, StoredFile]


class CopiedOut(msgspec.Struct, frozen=True, tag="copied_out"):
    digests: dict[str, tuple[bytes, ...]]
    """Digests of the rank's chunks of each part."""


class Release(msgspec.Struct, frozen=True, tag="release"):
    """Give the memory of the rank's state back."""


class TakeBack(msgspec.Struct, frozen=True, tag="take_back"):
    """Take the rank's state back from the files of its parts; those that are not named are zeros."""

    files: dict[str, StoredFile]


class Begun(msgspec.Struct, frozen=True, tag="begun"):
    """The rank has joined and loaded its rows."""


FsdpOrder = (
    Begin
    | ScoreCall
    | ValuesCall
    | AccumulateCall
    | LearnCall
    | DropSums
    | UseRecompute
    | Measure
    | StepCall
    | WriteRows
    | WriteShare
    | SealShare
    | SaveCall
    | Restore
    | CopyOut
    | Release
    | TakeBack
)
FsdpAnswer = (
    Begun
    | TokensScored
    | Valued
    | Accumulated
    | TargetsLearned
    | Measured
    | Stepped
    | Sealed
    | CopiedOut
    | Finished
    | CallFailed
)


def nothing() -> MicroBatch:
    """The part of a rank for which there are no rows: two tokens, from which nothing is learned."""
    zeros = np.zeros((1, 2), np.float32)
    return MicroBatch(
        input_ids=np.zeros((1, 2), np.int32),
        lengths=np.full(1, 2, np.int32),
        prompt_lengths=np.ones(1, np.int32),
        behaviour_logprobs=zeros,
        advantages=zeros,
        loss_weight=zeros,
    )


def encode(value: FsdpOrder | FsdpAnswer) -> bytes:
    frames = [memoryview(frame).cast("B") for frame in encode_body(value)]
    head = _COUNT.pack(len(frames)) + struct.pack(f"<{len(frames)}Q", *map(len, frames))
    return b"".join([head, *frames])


def decode_order(data: bytes) -> FsdpOrder:
    """Raises MalformedBody when ``data`` is no order."""
    return decode_body(FsdpOrder, _frames(data))  # type: ignore[arg-type]  a union is no ``type``


def decode_answer(data: bytes) -> FsdpAnswer:
    """Raises MalformedBody when ``data`` is no answer."""
    return decode_body(FsdpAnswer, _frames(data))  # type: ignore[arg-type]


def is_failure(answer: bytes) -> bool:
    """Whether a rank has failed: the others may be in an exchange with it."""
    return isinstance(decode_answer(answer), CallFailed)


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
