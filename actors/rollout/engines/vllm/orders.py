"""The orders of a tensor parallel engine's leader to its followers, and their answers, as bytes.

    EngineBegin ─▶ [ EngineStep · EngineLoad · EngineSleep ─▶ EngineWake ]*     each with the requests that were added
                                                                                and aborted since the last order

An answer holds a hash of the tokens that a rank has drawn, or the reason why it refuses the order.

Weights are not sent: an order names the file that they lie in, which the leader holds open until all have read it.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any, Literal

import msgspec
import numpy as np
import xxhash

from actors.protocol.weights import TensorEntry
from actors.rollout.engine import EngineSpec, GenerationRequest, StepOutput, WeightTensors
from actors.weights.manifest import SegmentViews, entry_views, layout
from actors.weights.memory import map_file
from actors.weights.segments import open_ours, segment_directory


class AddRequests(msgspec.Struct, frozen=True, tag="Add"):
    requests: list[GenerationRequest]


class AbortRequests(msgspec.Struct, frozen=True, tag="Abort"):
    requests: list[int]


class EngineBegin(msgspec.Struct, frozen=True, tag="Begin"):
    """The first order after a start: start the engine of ``spec`` and meet the other ranks in ``directory``."""

    spec: EngineSpec
    directory: Path
    silence_s: float


class EngineStep(msgspec.Struct, frozen=True, tag="Step"):
    """Take one engine step with the leader."""


class EngineLoad(msgspec.Struct, frozen=True, tag="Load"):
    """Serve the version whose tensors lie in ``file`` as ``entries`` say."""

    file: str
    entries: tuple[TensorEntry, ...]
    policy_version: int
    in_flight: Literal["keep", "recompute"]


class EngineSleep(msgspec.Struct, frozen=True, tag="Sleep"):
    level: int


class EngineWake(msgspec.Struct, frozen=True, tag="Wake"):
    """Wake the engine; the ranks meet again in ``directory``."""

    directory: Path


class EngineOrder(msgspec.Struct, frozen=True):
    commands: list[AddRequests | AbortRequests]
    call: EngineBegin | EngineStep | EngineLoad | EngineSleep | EngineWake


class EngineAnswer(msgspec.Struct, frozen=True):
    drawn: bytes = b""
    """Hash of the tokens that a step has drawn."""
    refusal: str = ""
    error: str = ""
    """Class name of the error whose text is ``refusal``."""


def encoded(message: EngineOrder | EngineAnswer) -> bytes:
    return msgspec.msgpack.encode(message, enc_hook=_plain)


def decoded_order(data: bytes) -> EngineOrder:
    return msgspec.msgpack.decode(data, type=EngineOrder, dec_hook=_from_plain)


def decoded_answer(data: bytes) -> EngineAnswer:
    return msgspec.msgpack.decode(data, type=EngineAnswer)


def is_refusal(answer: bytes) -> bool:
    return bool(decoded_answer(answer).refusal)


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.astype(np.int32).tobytes()
    if isinstance(value, Path):
        return str(value)
    raise NotImplementedError(f"{type(value).__name__} is in no order")


def _from_plain(kind: type, value: Any) -> Any:
    if kind is np.ndarray:
        return np.frombuffer(value, np.int32)
    return Path(value)


def hash_of(output: StepOutput) -> bytes:
    """A hash that is equal in ranks that have drawn the same tokens for the same requests."""
    digest = xxhash.xxh3_64()
    for column in (output.requests, output.offsets, output.counts, output.finished, output.tokens):
        digest.update(np.ascontiguousarray(column).tobytes())
    return digest.digest()


@contextlib.contextmanager
def as_file(tensors: WeightTensors, dtypes: Mapping[str, str]) -> Iterator[tuple[str, tuple[TensorEntry, ...]]]:
    """A path by which processes of this machine open the file that holds ``tensors``, and their places in it.

    Tensors that lie in no file, or in one that is gone, are written to an unnamed file that ends with the context.
    """
    file, entries = _segment(tensors) or _written(tensors, dtypes)
    with file:
        yield f"/proc/{os.getpid()}/fd/{file.fileno()}", entries


_Placed = tuple[IO[bytes], tuple[TensorEntry, ...]]


def _segment(tensors: WeightTensors) -> _Placed | None:
    if isinstance(tensors, SegmentViews):
        with contextlib.suppress(OSError):  # the version has retired, and its file is gone
            return open_ours(tensors.path, "rb"), tensors.entries
    return None


def _written(tensors: WeightTensors, dtypes: Mapping[str, str]) -> _Placed:
    entries, size = layout([(name, dtypes[name], array.shape) for name, array in tensors.items()])
    file = tempfile.TemporaryFile(dir=segment_directory())  # noqa: SIM115  it is handed out
    file.truncate(size)
    for entry in entries:
        file.seek(entry.offset_bytes)
        file.write(np.ascontiguousarray(tensors[entry.name]).reshape(-1).view(np.uint8).data)
    file.flush()
    return file, entries


@contextlib.contextmanager
def read(load: EngineLoad) -> Iterator[dict[str, np.ndarray]]:
    """The tensors in the leader's file, mapped into memory until the context ends."""
    with Path(load.file).open("rb") as file:
        views = entry_views(load.entries, map_file(file))
    yield views
    views.clear()
